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

  const u64* broadcast(u64 v) {
    m.imms.emplace_back();
    m.imms.back().fill(v);
    return m.imms.back().data();
  }

  Op immediate(i64 v) {
    Op o;
    o.k = IMM;
    o.off = v;
    o.bc = broadcast((u64)v);
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
    static const std::unordered_map<string, int> t = {{"%tid.x", TID_X},
                                                      {"%tid.y", TID_Y},
                                                      {"%tid.z", TID_Z},
                                                      {"%ntid.x", NTID_X},
                                                      {"%ntid.y", NTID_Y},
                                                      {"%ntid.z", NTID_Z},
                                                      {"%ctaid.x", CTAID_X},
                                                      {"%ctaid.y", CTAID_Y},
                                                      {"%ctaid.z", CTAID_Z},
                                                      {"%nctaid.x", NCTAID_X},
                                                      {"%nctaid.y", NCTAID_Y},
                                                      {"%nctaid.z", NCTAID_Z},
                                                      {"%laneid", LANEID},
                                                      {"%warpid", WARPID},
                                                      {"%nwarpid", NWARPID},
                                                      {"%smid", SMID},
                                                      {"%nsmid", NSMID},
                                                      {"%gridid", GRIDID},
                                                      {"%clock", CLOCK},
                                                      {"%clock64", CLOCK64},
                                                      {"%globaltimer", GLOBALTIMER},
                                                      {"%globaltimer_lo", GLOBALTIMER_LO},
                                                      {"%globaltimer_hi", GLOBALTIMER_HI},
                                                      {"%lanemask_eq", LM_EQ},
                                                      {"%lanemask_le", LM_LE},
                                                      {"%lanemask_lt", LM_LT},
                                                      {"%lanemask_ge", LM_GE},
                                                      {"%lanemask_gt", LM_GT},
                                                      {"%dynamic_smem_size", DYN_SMEM},
                                                      {"%total_smem_size", TOTAL_SMEM},
                                                      {"%clusterid.x", CL_ID_X},
                                                      {"%clusterid.y", CL_ID_Y},
                                                      {"%clusterid.z", CL_ID_Z},
                                                      {"%nclusterid.x", NCL_X},
                                                      {"%nclusterid.y", NCL_Y},
                                                      {"%nclusterid.z", NCL_Z},
                                                      {"%cluster_ctaid.x", CL_CTAID_X},
                                                      {"%cluster_ctaid.y", CL_CTAID_Y},
                                                      {"%cluster_ctaid.z", CL_CTAID_Z},
                                                      {"%cluster_nctaid.x", CL_NCTAID_X},
                                                      {"%cluster_nctaid.y", CL_NCTAID_Y},
                                                      {"%cluster_nctaid.z", CL_NCTAID_Z},
                                                      {"%cluster_ctarank", CL_CTARANK},
                                                      {"%cluster_nctarank", CL_NCTARANK},
                                                      {"%is_explicit_cluster", IS_EXPLICIT_CLUSTER}};
    auto i = t.find(n);
    return i == t.end() ? -1 : i->second;
  }

  Op address_of(const Var& v, i64 off) {
    Op o;
    o.k = IMM;
    o.space = v.space;
    o.off = (i64)v.address + off;
    o.bc = broadcast((u64)o.off);
    if (v.dynamic) m.dynamic_imms.push_back({&m.imms.back(), off});
    return o;
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
      Op b = operand();
      i64 off = 0;
      for (;;) {
        if (!eat('+') && !peek('-')) break;
        off += integer();
      }
      o.k = MEM;
      o.off = off;
      o.space = b.space;
      o.v.push_back(b);
      while (eat(',')) o.v.push_back(operand());
      need(']');
      return o;
    }
    bool neg = false;
    if (eat('-')) neg = true;
    blank();
    size_t save = p;
    string w = word();
    i64 v;
    bool db;
    double d;
    if (number(w, v, db, d)) {
      if (db) {
        o.k = IMM;
        o.literal = true;
        o.off = (i64)std::bit_cast<u64>(neg ? -d : d);
        return o;
      }
      return immediate(neg ? -v : v);
    }
    if (neg) fail("a minus before a name");
    if (w == "_") return o;
    int r = reg(w);
    if (r >= 0) {
      o.k = REG;
      o.r = r;
      o.width = f->reg_width[r - f->regs0];
      return o;
    }
    int sr = sreg(w);
    if (sr >= 0) {
      o.k = SREG;
      o.r = sr;
      return o;
    }
    if (w == "WARP_SZ") return immediate(32);
    if (w == "%nctaid" || w == "%tid" || w == "%ntid" || w == "%ctaid") fail("a vector special register");
    p = save;
    w = name();
    i64 off = 0;
    if (w == "generic") {
      need('(');
      w = name();
      need(')');
    }
    if (const Var* x = variable(w)) {
      if (peek('+')) {
        p++;
        off = integer();
      }
      return address_of(*x, off);
    }
    auto fi = m.func_index.find(w);
    if (fi != m.func_index.end()) {
      o.k = FUNC;
      o.r = fi->second;
      return o;
    }
    o.k = LABEL;
    o.r = -1;
    label_names.push_back({w, path});
    o.off = (i64)label_names.size() - 1;
    return o;
  }
};

}  // namespace ptxrun
