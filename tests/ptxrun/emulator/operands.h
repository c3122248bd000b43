// Names and operands of instructions.
#pragma once

#include "lexer.h"

namespace ptxrun {

struct Operands : Lexer {
  struct Scope {
    std::unordered_map<string, int> regs;
    std::map<string, Var> vars;
  };

  Func* f = nullptr;
  vector<Scope> scopes;
  vector<std::pair<string, vector<int>>> label_names;
  vector<int> path;  // labels are local to { }
  int next_scope = 0;

  using Lexer::Lexer;

  Op immediate(i64 v) {
    Op o;
    o.k = IMM;
    o.off = v;
    m.imms.emplace_back().fill((u64)v);
    o.bc = m.imms.back().data();
    return o;
  }

  const Var* variable(const string& n) {
    for (size_t i = scopes.size(); i--;) {
      auto k = scopes[i].vars.find(n);
      if (k != scopes[i].vars.end()) return &k->second;
    }
    auto k = m.vars.find(n);
    return k == m.vars.end() ? nullptr : &k->second;
  }

  int reg(const string& n) {
    for (size_t i = scopes.size(); i--;) {
      auto k = scopes[i].regs.find(n);
      if (k != scopes[i].regs.end()) return k->second;
    }
    return -1;
  }

  int sreg(const string& n) {
    static const std::unordered_map<string, int> t = {
        {"%tid.x", TID_X},       {"%ntid.x", NTID_X},     {"%ctaid.x", CTAID_X},
        {"%ctaid.y", CTAID_Y},   {"%ctaid.z", CTAID_Z},   {"%nctaid.x", NCTAID_X},
        {"%nctaid.y", NCTAID_Y}, {"%nctaid.z", NCTAID_Z}, {"%laneid", LANEID}};
    auto i = t.find(n);
    return i == t.end() ? -1 : i->second;
  }

  Op operand() {
    blank();
    Op o;
    if (eat('!')) {
      o = operand();
      o.neg = !o.neg;
      return o;
    }
    if (eat('{')) {
      o.k = VEC;
      if (!peek('}')) do
          o.v.push_back(operand());
        while (eat(','));
      need('}');
      return o;
    }
    if (eat('[')) {
      o.k = MEM;
      o.v.push_back(operand());
      while (eat('+') || peek('-')) o.off += integer();
      need(']');
      return o;
    }
    bool neg = eat('-'), is_float;
    blank();
    size_t save = p;
    string w = word();
    i64 v;
    if (number(w, v, is_float)) {
      if (!is_float) return immediate(neg ? -v : v);
      o.k = IMM;
      o.off = neg ? v ^ 0x80000000 : v;
      return o;
    }
    if (neg) fail("a minus before a name");
    if (w == "_") return o;
    int r = reg(w);
    if (r >= 0) {
      o.k = REG;
      o.r = r;
      o.width = f->reg_width[r];
      return o;
    }
    int sr = sreg(w);
    if (sr >= 0) {
      o.k = SREG;
      o.r = sr;
      return o;
    }
    p = save;
    w = name();
    if (const Var* x = variable(w)) {
      i64 off = eat('+') ? integer() : 0;
      o = immediate((i64)x->address + off);
      if (x->dynamic) m.dynamic_imms.push_back({&m.imms.back(), off});
      return o;
    }
    o.k = LABEL;
    o.off = (i64)label_names.size();
    label_names.push_back({w, path});
    return o;
  }
};

}  // namespace ptxrun
