// Words of a PTX text.
#pragma once

#include "module.h"

namespace ptxrun {

struct Lexer {
  Module& m;
  const string& s;
  size_t p = 0;
  u32 line = 1;

  explicit Lexer(Module& module) : m(module), s(module.text) {}

  [[noreturn]] void fail(const string& what) {
    throw Fault(fmt("PTX line %u: %s: ", line, what.c_str()) + (line <= m.lines.size() ? m.lines[line - 1] : ""));
  }

  void blank() {
    while (p < s.size()) {
      if (s[p] == '\n')
        line++, p++;
      else if (isspace((u8)s[p]))
        p++;
      else if (s[p] == '/' && p + 1 < s.size() && s[p + 1] == '/')
        while (p < s.size() && s[p] != '\n') p++;
      else if (s[p] == '/' && p + 1 < s.size() && s[p + 1] == '*') {
        while (p + 1 < s.size() && !(s[p] == '*' && s[p + 1] == '/')) {
          if (s[p] == '\n') line++;
          p++;
        }
        p += 2;
      } else
        break;
    }
  }

  bool peek(char c) {
    blank();
    return p < s.size() && s[p] == c;
  }

  bool eat(char c) {
    if (peek(c)) {
      p++;
      return true;
    }
    return false;
  }

  void need(char c) {
    if (!eat(c)) fail(fmt("expected '%c'", c));
  }

  // A word: an identifier, a directive, a mnemonic with modifiers, or a number.
  string word() {
    blank();
    size_t b = p;
    while (p < s.size() && (isalnum((u8)s[p]) || s[p] == '_' || s[p] == '$' || s[p] == '%' || s[p] == '.' ||
                            (s[p] == ':' && p + 1 < s.size() && s[p + 1] == ':')))
      p += s[p] == ':' ? 2 : 1;
    if (b == p) fail("expected a word");
    return s.substr(b, p - b);
  }

  string name() {
    blank();
    size_t b = p;
    while (p < s.size() && (isalnum((u8)s[p]) || s[p] == '_' || s[p] == '$' || s[p] == '%')) p++;
    if (b == p) fail("expected a name");
    return s.substr(b, p - b);
  }

  bool number(const string& t, i64& v, bool& dbl, double& d) {
    dbl = false;
    if (t.empty() || !isdigit((u8)t[0])) return false;
    if (t.size() > 2 && t[0] == '0' && (t[1] == 'f' || t[1] == 'F') && t.size() == 10) {
      dbl = true;
      d = as_f32(strtoul(t.c_str() + 2, 0, 16));
      v = strtoul(t.c_str() + 2, 0, 16);
      return true;
    }
    if (t.size() > 2 && t[0] == '0' && (t[1] == 'd' || t[1] == 'D') && t.size() == 18) {
      dbl = true;
      v = (i64)strtoull(t.c_str() + 2, 0, 16);
      d = as_f64(v);
      return true;
    }
    if (t.find('.') != string::npos || (t.find_first_of("eE") != string::npos && t[1] != 'x' && t[1] != 'X')) {
      dbl = true;
      d = strtod(t.c_str(), 0);
      v = f64_bits(d);
      return true;
    }
    if (t.size() > 2 && t[0] == '0' && (t[1] == 'b' || t[1] == 'B'))
      v = (i64)strtoull(t.c_str() + 2, 0, 2);
    else
      v = (i64)strtoull(t.c_str(), 0, 0);
    return true;
  }

  i64 integer() {
    bool neg = eat('-');
    i64 v;
    bool db;
    double d;
    string w = word();
    if (!number(w, v, db, d)) fail("expected a number");
    return neg ? -v : v;
  }
};

}  // namespace ptxrun
