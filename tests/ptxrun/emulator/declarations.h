// Declarations of registers, shared memory and parameters.
#pragma once

#include "operands.h"

namespace ptxrun {

struct Declarations : Operands {
  using Operands::Operands;

  void reg_declare(const string& n, int width) {
    scopes.back().regs[n] = f->nregs++;
    f->reg_names.push_back(n);
    f->reg_width.push_back(width);
  }

  // After .reg
  void registers() {
    int width = bits_of(type_named(word().substr(1)));
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

  // Alignment and type, then a name and the number of its elements; 0 of an open array.
  struct Declared {
    int align = 1;
    T t = TNONE;
    string n;
    i64 count = 1;

    int element_bytes() const { return std::max(1, bits_of(t) / 8); }
  };

  Declared declared() {
    Declared d;
    while (peek('.')) {
      string w = word();
      if (w == ".align")
        d.align = (int)integer();
      else if (T t = type_named(w.substr(1)))
        d.t = t;
      else if (w != ".ptr" && w != ".global" && w != ".shared")
        fail("directive " + w);
    }
    if (d.t == TNONE) fail("a declaration without a type");
    d.n = name();
    while (eat('[')) {
      d.count *= peek(']') ? 0 : integer();
      need(']');
    }
    d.align = std::max(d.align, d.element_bytes());
    return d;
  }

  // After .shared, in a kernel: an array; outside: the open array whose size the launch determines.
  void shared_variable() {
    Declared d = declared();
    need(';');
    if (!f) {
      if (d.count) fail("shared memory of a module");
      m.vars[d.n] = {SHARED, 0, true};
      m.dynamic_align = std::max(m.dynamic_align, d.align);
      return;
    }
    int& used = f->shared_bytes;
    used = (used + d.align - 1) / d.align * d.align;
    scopes.back().vars[d.n] = {SHARED, (u64)SHARED_BASE + used, false};
    used += (int)d.count * d.element_bytes();
  }

  vector<Param> parameters(Func& fn) {
    vector<Param> list;
    int& offset = fn.param_bytes;
    need('(');
    while (!peek(')')) {
      if (word() != ".param") fail("expected a parameter");
      Declared d = declared();
      offset = (offset + d.align - 1) / d.align * d.align;
      int bytes = (int)d.count * d.element_bytes();
      list.push_back({d.n, offset, bytes, d.t});
      offset += bytes;
      if (!eat(',')) break;
    }
    need(')');
    return list;
  }
};

}  // namespace ptxrun
