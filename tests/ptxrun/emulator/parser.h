// PTX text to Module.
#pragma once

#include "control_flow.h"
#include "declarations.h"

namespace ptxrun {

void select(Module& m, Inst& in);  // select.h

struct Parser : Declarations {
  std::map<std::pair<int, string>, int> labels;
  std::map<string, vector<string>> branch_targets;

  using Declarations::Declarations;

  // After .entry
  void kernel() {
    f = &m.funcs.emplace_back();
    f->name = name();
    if (peek('(')) f->params = parameters(*f);
    while (!peek('{')) {
      string w = word();
      int a[3] = {1, 1, 1}, i = 0;
      if (w == ".pragma") {
        skip_to(';');
        p++;
        continue;
      }
      do
        a[i++] = (int)integer();
      while (i < 3 && eat(','));
      if (w == ".reqntid" || w == ".maxntid")
        std::copy(a, a + 3, w == ".reqntid" ? f->reqntid : f->maxntid);
      else if (w != ".maxnreg" && w != ".minnctapersm")
        fail("function directive " + w);
    }
    body();
    f = nullptr;
  }

  void body() {
    scopes.assign(1, {});
    labels.clear();
    label_names.clear();
    branch_targets.clear();
    path = {0};
    next_scope = 1;
    for (auto& x : f->params) scopes.back().vars[x.name] = {PARAM, (u64)x.offset, false};
    need('{');
    for (int depth = 1; depth;) {
      blank();
      if (p >= s.size()) fail("end of file in a function");
      if (eat('{')) {
        depth++;
        scopes.emplace_back();
        path.push_back(next_scope++);
      } else if (eat('}')) {
        depth--;
        scopes.pop_back();
        path.pop_back();
      } else if (s[p] == '.')
        directive();
      else if (!eat(';') && (s[p] == '@' || !label()))
        instruction();
    }
    Inst end;
    end.name = "ret";
    end.line = line;
    f->code.push_back(end);
    for (auto& in : f->code) {
      if (in.name == "bra")
        in.target = place_of(in, label_names.at(in.o[0].off).first, label_names.at(in.o[0].off).second);
      if (in.name == "brx") {
        auto at = label_names.at(in.o[1].off);
        for (auto& n : branch_targets.at(at.first)) {
          Op o;
          o.k = LABEL;
          o.r = place_of(in, n, at.second);
          in.o.push_back(o);
        }
      }
      try {
        select(m, in);
      } catch (Fault& e) {
        m.unsupported.push_back(fmt("PTX line %u: %s: ", in.line, e.what()) + m.lines[in.line - 1]);
        in.fn = nullptr;
      }
    }
    set_reconvergence(f->code);
  }

  void directive() {
    string w = word();
    if (w == ".reg")
      registers();
    else if (w == ".shared")
      shared_variable();
    else if (w == ".loc")
      skip_to('\n');
    else if (w == ".pragma")
      skip_to(';');
    else
      fail("directive " + w);
  }

  // A label, if one follows.
  bool label() {
    auto before = std::pair(p, line);
    string n = name();
    if (!peek(':') || s[p + 1] == ':') {
      std::tie(p, line) = before;
      return false;
    }
    p++;
    labels[{path.back(), n}] = (int)f->code.size();
    blank();
    if (s.compare(p, 14, ".branchtargets") == 0) {
      word();
      do
        branch_targets[n].push_back(name());
      while (eat(','));
      need(';');
    }
    return true;
  }

  int place_of(const Inst& in, const string& n, const vector<int>& at) {
    for (size_t i = at.size(); i--;) {
      auto k = labels.find({at[i], n});
      if (k != labels.end()) return k->second;
    }
    line = in.line;
    fail("no label " + n);
  }

  void instruction() {
    Inst in;
    if (eat('@')) {
      in.pneg = eat('!');
      string n = name();
      in.pred = reg(n);
      if (in.pred < 0) fail("no predicate " + n);
    }
    blank();
    in.line = line;
    string w = word();
    size_t b = w.find('.');
    in.name = w.substr(0, b);
    while (b != string::npos) {
      size_t e = w.find('.', b + 1);
      in.mods.push_back(w.substr(b + 1, e == string::npos ? e : e - b - 1));
      b = e;
    }
    if (!peek(';')) do {
        Op o = operand();
        if (eat('|')) {
          Op pair;
          pair.k = VEC;
          pair.v = {o, operand()};
          o = pair;
        }
        in.o.push_back(o);
      } while (eat(','));
    need(';');
    f->code.push_back(in);
  }

  void module() {
    for (size_t b = 0, e; b <= s.size(); b = e + 1) {
      e = std::min(s.find('\n', b), s.size());
      m.lines.push_back(s.substr(b, e - b));
    }
    while (blank(), p < s.size()) {
      string w = word();
      if (w == ".version" || w == ".target" || w == ".address_size" || w == ".file")
        skip_to('\n');
      else if (w == ".entry")
        kernel();
      else if (w == ".shared")
        shared_variable();
      else if (w == ".global" || w == ".const" || w == ".pragma") {  // an instruction with such a name is a fault
        skip_to(';');
        p++;
      } else if (w == ".section") {
        skip_to('}');
        p++;
      } else if (w != ".visible" && w != ".extern")
        fail("directive " + w);
    }
  }
};

}  // namespace ptxrun
