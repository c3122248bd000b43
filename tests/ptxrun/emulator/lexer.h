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
      else
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

  // Goes to the next of these characters.
  void skip_to(char c) {
    while (p < s.size() && s[p] != c) {
      if (s[p] == '\n') line++;
      p++;
    }
  }

  // A word: an identifier, a directive, a mnemonic with modifiers, or a number.
  string word() { return taken("_$%.", true, "expected a word"); }

  string name() { return taken("_$%", false, "expected a name"); }

  string taken(const char* others, bool colons, const char* expected) {
    blank();
    size_t b = p;
    for (; p < s.size(); p++)
      if (colons && s.compare(p, 2, "::") == 0)
        p++;
      else if (!isalnum((u8)s[p]) && !strchr(others, s[p]))
        break;
    if (b == p) fail(expected);
    return s.substr(b, p - b);
  }

  // An integer, or the bits of a float32 literal.
  bool number(const string& t, i64& v, bool& is_float) {
    is_float = false;
    if (t.empty() || !isdigit((u8)t[0])) return false;
    if (t.find('.') != string::npos || (t.size() == 18 && (t[1] == 'd' || t[1] == 'D'))) fail("a literal of this form");
    is_float = t.size() == 10 && (t[1] == 'f' || t[1] == 'F');
    v = is_float ? (i64)strtoul(t.c_str() + 2, 0, 16) : (i64)strtoull(t.c_str(), 0, 0);
    return true;
  }

  i64 integer() {
    bool neg = eat('-'), is_float;
    i64 v;
    if (!number(word(), v, is_float)) fail("expected a number");
    return neg ? -v : v;
  }
};

}  // namespace ptxrun
