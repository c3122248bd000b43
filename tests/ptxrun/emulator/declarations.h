// Declarations of registers, variables and parameters.
#pragma once

#include "operands.h"

namespace ptxrun {

struct Declarations : Operands {
  using Operands::Operands;

  int reg_declare(const string& n, int width) {
    int id = f->regs0 + f->nregs++;
    f->reg_names.push_back(n);
    f->reg_width.push_back(width);
    scopes.back().regs[n] = id;
    return id;
  }

  // After .reg
  void registers() {
    string t = word();
    if (t == ".v2" || t == ".v4") fail("vector registers");
    int width = bits_of(type_named(t.substr(1)));
    if (!width) fail("register type");
    do {
      string n = name();
      if (eat('<')) {
        i64 c = integer();
        need('>');
        for (i64 i = 0; i < c; i++) reg_declare(n + std::to_string(i), width);
      } else
        reg_declare(n, width);
    } while (eat(','));
    need(';');
  }

  // After .shared, .global, .const, .local, .param: variables separated by ',', up to ';'.
  void variable_declaration(Space space, bool external, bool in_body) {
    int align = 0;
    T t = TNONE;
    int vec = 1;
    for (;;) {
      blank();
      if (s[p] != '.') break;
      string w = word();
      if (w == ".align")
        align = (int)integer();
      else if (w == ".v2")
        vec = 2;
      else if (w == ".v4")
        vec = 4;
      else if (w == ".attribute") {
        need('(');
        while (s[p] != ')') p++;
        p++;
      } else if (type_named(w.substr(1)) != TNONE)
        t = type_named(w.substr(1));
    }
    if (t == TNONE) fail("variable type");
    do {
      string n = name();
      i64 count = 1;
      bool open = false;
      if (eat('<')) fail("parametrised variables");
      while (eat('[')) {
        if (peek(']'))
          open = true;
        else
          count *= integer();
        need(']');
      }
      int size = std::max(1, bits_of(t) / 8) * vec;
      int al = std::max(align, size);
      i64 bytes = open ? 0 : count * size;
      Var v{space, 0, (int)bytes, false};
      vector<u64> init;
      vector<std::pair<int, string>> refs;
      if (eat('=')) {
        auto value = [&] {
          if (peek('{')) return false;
          blank();
          bool neg = eat('-');
          string w = word();
          i64 x;
          bool db;
          double d;
          if (number(w, x, db, d)) {
            if (db) x = t == F32 ? (i64)f32_bits((float)d) : (i64)f64_bits(d);
            init.push_back(neg ? (u64)-x : (u64)x);
          } else {
            if (w == "generic") {
              need('(');
              w = name();
              need(')');
            }
            refs.push_back({(int)init.size(), w});
            init.push_back(0);
            if (eat('+')) integer();
          }
          return true;
        };
        std::function<void()> list = [&] {
          if (eat('{')) {
            do {
              if (peek('{'))
                list();
              else
                value();
            } while (eat(','));
            need('}');
          } else
            value();
        };
        list();
        if (open) bytes = v.size = (int)init.size() * size;
      }
      if (space == GLOBAL || space == CONST) {
        m.globals.emplace_back((bytes + 7) / 8 + 2 + al / 8, 0);
        u64 a = ((u64)m.globals.back().data() + al - 1) / al * al;
        for (size_t i = 0; i < init.size(); i++) memcpy((void*)(a + i * size), &init[i], size);
        for (auto& r : refs)
          if (m.vars.count(r.second)) memcpy((void*)(a + r.first * size), &m.vars[r.second].address, size);
        v.address = a;
        m.global_regions.push_back({a, std::max<i64>(bytes, 1)});
        m.global_names.push_back(n);
      } else if (space == SHARED) {
        if (external || (open && init.empty())) {
          v.dynamic = true;
          m.dynamic_align = std::max(m.dynamic_align, al);
        } else {
          int& used = in_body ? f->shared_bytes : m.module_shared;
          used = (used + al - 1) / al * al;
          v.address = SHARED_BASE + used;
          used += (int)bytes;
        }
      } else {  // local and param in a body
        int& used = m.total_local;
        used = (used + al - 1) / al * al;
        v.address = used;
        used += (int)bytes;
        v.space = LOCAL;
      }
      if (in_body)
        scopes.back().vars[n] = v;
      else
        m.vars[n] = v;
    } while (eat(','));
    need(';');
  }

  // .param lists of functions
  vector<Param> parameters(Func& fn, bool entry) {
    vector<Param> list;
    need('(');
    int offset = 0;
    while (!peek(')')) {
      if (peek('.')) {
        string w = word();
        int align = 0;
        T t = TNONE;
        bool isreg = w == ".reg";
        for (;;) {
          blank();
          if (s[p] != '.') break;
          w = word();
          if (w == ".align")
            align = (int)integer();
          else if (w == ".ptr" || w == ".global" || w == ".shared" || w == ".const" || w == ".local") {
          } else if (type_named(w.substr(1)) != TNONE)
            t = type_named(w.substr(1));
        }
        if (isreg) fail("register parameters");
        string n = name();
        i64 count = 1;
        while (eat('[')) {
          if (!peek(']')) count *= integer();
          need(']');
        }
        int size = std::max(1, bits_of(t) / 8);
        int al = std::max(align, size);
        int bytes = (int)count * size;
        if (entry)
          offset = (offset + al - 1) / al * al;
        else {
          m.total_local = (m.total_local + al - 1) / al * al;
          offset = m.total_local;
          m.total_local += bytes;
        }
        list.push_back({n, offset, bytes, al, t});
        if (entry) offset += bytes;
      }
      if (!eat(',')) break;
    }
    need(')');
    if (entry) fn.param_bytes = offset;
    return list;
  }
};

}  // namespace ptxrun
