// PTX text to Module.
#pragma once

#include "control_flow.h"
#include "declarations.h"

namespace ptxrun {

void select(Module& m, Func& f, Inst& in);  // select.h

struct Parser : Declarations {
  int entry_regs = 0, device_regs = 0;
  std::map<std::pair<int, string>, int> labels;
  std::map<string, vector<string>> branch_targets;

  using Declarations::Declarations;

  void function(bool entry) {
    Func fn;
    fn.entry = entry;
    if (!entry && peek('(')) fn.rets = parameters(fn, false);
    fn.name = name();
    if (peek('(')) fn.params = parameters(fn, entry);
    int id;
    auto it = m.func_index.find(fn.name);
    if (it == m.func_index.end()) {
      id = (int)m.funcs.size();
      m.func_index[fn.name] = id;
      m.funcs.push_back({});
    } else
      id = it->second;
    for (;;) {
      blank();
      if (s[p] == ';') {
        p++;
        fn.declared_only = true;
        break;
      }
      if (s[p] == '{') break;
      string w = word();
      auto three = [&](int* a) {
        a[0] = a[1] = a[2] = 1;
        int i = 0;
        do a[i++] = (int)integer();
        while (eat(','));
      };
      if (w == ".reqntid")
        three(fn.reqntid);
      else if (w == ".maxntid")
        three(fn.maxntid);
      else if (w == ".reqnctapercluster")
        three(fn.cluster);
      else if (w == ".maxnreg")
        integer();
      else if (w == ".minnctapersm" || w == ".maxnctapersm" || w == ".maxclusterrank")
        integer();
      else if (w == ".noreturn" || w == ".explicitcluster" || w == ".blocksareclusters") {
      } else if (w == ".pragma") {
        while (s[p] != ';') p++;
        p++;
      } else
        fail("function directive " + w);
    }
    if (fn.declared_only) {
      if (m.funcs[id].code.empty()) m.funcs[id] = fn, m.funcs[id].declared_only = true;
      return;
    }
    m.funcs[id] = fn;
    f = &m.funcs[id];  // funcs does not grow while a body is parsed
    body();
    f = nullptr;
  }

  void body() {
    f->regs0 = f->entry ? 0 : device_regs;
    scopes.clear();
    scopes.emplace_back();
    labels.clear();
    label_names.clear();
    branch_targets.clear();
    path = {0};
    next_scope = 1;
    for (auto& x : f->params) scopes.back().vars[x.name] = {f->entry ? PARAM : LOCAL, (u64)x.offset, x.size, false};
    for (auto& x : f->rets) scopes.back().vars[x.name] = {LOCAL, (u64)x.offset, x.size, false};
    need('{');
    int depth = 1;
    while (depth) {
      blank();
      if (p >= s.size()) fail("end of file in a function");
      if (s[p] == '{') {
        p++;
        depth++;
        scopes.emplace_back();
        path.push_back(next_scope++);
        continue;
      }
      if (s[p] == '}') {
        p++;
        depth--;
        scopes.pop_back();
        path.pop_back();
        continue;
      }
      if (s[p] == ';') {
        p++;
        continue;
      }
      if (s[p] == '.') {
        string w = word();
        if (w == ".reg")
          registers();
        else if (w == ".local" || w == ".param")
          variable_declaration(LOCAL, false, true);
        else if (w == ".shared")
          variable_declaration(SHARED, false, true);
        else if (w == ".loc") {
          while (p < s.size() && s[p] != '\n') p++;
        } else if (w == ".pragma") {
          while (s[p] != ';') p++;
          p++;
        } else
          fail("directive " + w);
        continue;
      }
      // a label?
      if (s[p] != '@') {
        size_t save = p;
        u32 sl = line;
        string n = name();
        blank();
        if (p < s.size() && s[p] == ':' && s[p + 1] != ':') {
          p++;
          labels[{path.back(), n}] = (int)f->code.size();
          blank();
          size_t q = p;
          u32 ql = line;
          if (s[p] == '.') {
            string w = word();
            if (w == ".branchtargets") {
              vector<string> l;
              do l.push_back(name());
              while (eat(','));
              need(';');
              branch_targets[n] = l;
            } else
              p = q, line = ql;
          }
          continue;
        }
        p = save;
        line = sl;
      }
      instruction();
    }
    Inst end;
    end.name = "ret";
    end.line = line;
    f->code.push_back(end);
    // Kernels share register numbers; functions that they call come behind (shifted in `module`).
    if (f->entry)
      entry_regs = std::max(entry_regs, f->nregs);
    else
      device_regs += f->nregs;
    for (auto& in : f->code) {
      if (in.name == "bra" || in.name == "brx") {
        auto find = [&](const string& n, const vector<int>& at) -> int {
          for (size_t i = at.size(); i--;) {
            auto k = labels.find({at[i], n});
            if (k != labels.end()) return k->second;
          }
          line = in.line;
          fail("no label " + n);
        };
        if (in.name == "bra")
          in.target = find(label_names[in.o[0].off].first, label_names[in.o[0].off].second);
        else {
          auto at = label_names[in.o[1].off];
          for (auto& n : branch_targets.at(at.first))
            in.o.push_back([&] {
              Op o;
              o.k = LABEL;
              o.r = find(n, at.second);
              return o;
            }());
        }
      }
      u32 l = line;
      line = in.line;
      try {
        select(m, *f, in);
      } catch (Fault& e) {
        m.unsupported.push_back(fmt("PTX line %u: %s: ", in.line, e.what()) + m.lines[in.line - 1]);
        in.fn = nullptr;
      }
      line = l;
    }
    set_reconvergence(f->code);
  }

  void instruction() {
    Inst in;
    blank();
    in.line = line;
    if (eat('@')) {
      in.pneg = eat('!');
      string n = name();
      in.pred = reg(n);
      if (in.pred < 0) fail("no predicate " + n);
    }
    blank();
    in.line = line;
    string w = word();
    size_t b = 0;
    bool first = true;
    while (b <= w.size()) {
      size_t e = w.find('.', b);
      string part = w.substr(b, e == string::npos ? string::npos : e - b);
      if (first)
        in.name = part, first = false;
      else if (!part.empty())
        in.mods.push_back(part);
      if (e == string::npos) break;
      b = e + 1;
    }
    if (in.name == "call") {
      vector<Op> rets, args;
      if (eat('(')) {
        do rets.push_back(operand());
        while (eat(','));
        need(')');
        need(',');
      }
      Op callee = operand();
      if (callee.k != FUNC) fail("indirect calls");
      in.func = callee.r;
      if (eat(',')) {
        if (eat('(')) {
          if (!peek(')')) do
              args.push_back(operand());
            while (eat(','));
          need(')');
        }
        if (eat(',')) operand();
      }
      Op r, a;
      r.k = a.k = VEC;
      r.v = rets;
      a.v = args;
      in.o = {r, a};
      need(';');
      f->code.push_back(in);
      return;
    }
    if (!peek(';')) do {
        Op o = operand();
        if (eat('|')) {
          Op q = operand();
          Op pair;
          pair.k = VEC;
          pair.v = {o, q};
          in.o.push_back(pair);
        } else
          in.o.push_back(o);
      } while (eat(','));
    need(';');
    f->code.push_back(in);
  }

  void module() {
    size_t b = 0;
    while (b <= s.size()) {
      size_t e = s.find('\n', b);
      m.lines.push_back(s.substr(b, e == string::npos ? string::npos : e - b));
      if (e == string::npos) break;
      b = e + 1;
    }
    m.funcs.reserve(4096);
    bool external = false;
    for (;;) {
      blank();
      if (p >= s.size()) break;
      if (s[p] == ';') {
        p++;
        continue;
      }
      string w = word();
      if (w == ".version" || w == ".target" || w == ".address_size") {
        while (p < s.size() && s[p] != '\n') p++;
      } else if (w == ".file") {
        while (p < s.size() && s[p] != '\n') p++;
      } else if (w == ".visible" || w == ".weak" || w == ".common") {
      } else if (w == ".extern")
        external = true;
      else if (w == ".entry") {
        function(true);
        external = false;
      } else if (w == ".func") {
        if (peek('.')) word();
        function(false);
        external = false;
      } else if (w == ".global" || w == ".const") {
        variable_declaration(w == ".global" ? GLOBAL : CONST, external, false);
        external = false;
      } else if (w == ".shared") {
        variable_declaration(SHARED, external, false);
        external = false;
      } else if (w == ".section") {
        while (p < s.size() && s[p] != '{') p++;
        int d = 0;
        do {
          if (s[p] == '{') d++;
          if (s[p] == '}') d--;
          if (s[p] == '\n') line++;
          p++;
        } while (p < s.size() && d);
      } else if (w == ".pragma" || w == ".alias") {
        while (s[p] != ';') p++;
        p++;
      } else
        fail("directive " + w);
    }
    m.total_regs = entry_regs + device_regs;
    std::function<void(Op&)> shift = [&](Op& o) {
      if (o.k == REG) o.r += entry_regs;
      for (auto& v : o.v) shift(v);
    };
    for (auto& g : m.funcs)
      if (!g.entry) {
        g.regs0 += entry_regs;
        for (auto& in : g.code) {
          for (auto& o : in.o) shift(o);
          if (in.pred >= 0) in.pred += entry_regs;
        }
      }
  }
};

}  // namespace ptxrun
