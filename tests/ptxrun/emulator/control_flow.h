// Where divergent lanes meet again: the immediate post-dominator of every branch.
#pragma once

#include "module.h"

namespace ptxrun {

// Sets `rpc` of each branch to the start of the immediate post-dominator of its basic block.
inline void set_reconvergence(vector<Inst>& code) {
  int n = (int)code.size();
  vector<u8> leader(n + 1, 0);
  leader[0] = 1;
  auto ends = [&](const Inst& in) {
    return in.name == "bra" || in.name == "brx" || in.name == "ret" || in.name == "exit";
  };
  for (int i = 0; i < n; i++)
    if (ends(code[i])) {
      if (i + 1 < n) leader[i + 1] = 1;
      if (code[i].target >= 0) leader[code[i].target] = 1;
      if (code[i].name == "brx")
        for (size_t k = 2; k < code[i].o.size(); k++) leader[code[i].o[k].r] = 1;
    }
  vector<int> start, of(n);
  for (int i = 0; i < n; i++) {
    if (leader[i]) start.push_back(i);
    of[i] = (int)start.size() - 1;
  }
  int nb = (int)start.size(), exit = nb;
  vector<vector<int>> succ(nb + 1), pred(nb + 1);
  for (int b = 0; b < nb; b++) {
    int last = (b + 1 < nb ? start[b + 1] : n) - 1;
    auto& in = code[last];
    if (in.name == "bra") {
      succ[b].push_back(of[in.target]);
      if (in.pred >= 0 && last + 1 < n) succ[b].push_back(of[last + 1]);
    } else if (in.name == "brx")
      for (size_t k = 2; k < in.o.size(); k++) succ[b].push_back(of[in.o[k].r]);
    else if (in.name == "ret" || in.name == "exit") {
      succ[b].push_back(exit);
      if (in.pred >= 0 && last + 1 < n) succ[b].push_back(of[last + 1]);
    } else
      succ[b].push_back(last + 1 < n ? of[last + 1] : exit);
    for (int x : succ[b]) pred[x].push_back(b);
  }
  vector<int> order, state(nb + 1, 0), idom(nb + 1, -1), num(nb + 1, -1);
  vector<std::pair<int, size_t>> st{{exit, 0}};
  state[exit] = 1;
  while (!st.empty()) {
    auto& [b, i] = st.back();
    if (i < pred[b].size()) {
      int x = pred[b][i++];
      if (!state[x]) state[x] = 1, st.push_back({x, 0});
    } else {
      num[b] = (int)order.size();
      order.push_back(b);
      st.pop_back();
    }
  }
  idom[exit] = exit;
  bool changed = true;
  while (changed) {
    changed = false;
    for (size_t k = order.size(); k--;) {
      int b = order[k];
      if (b == exit) continue;
      int d = -1;
      for (int x : succ[b])
        if (idom[x] >= 0) {
          if (d < 0)
            d = x;
          else {
            int a = x, c = d;
            while (a != c) {
              while (num[a] < num[c]) a = idom[a];
              while (num[c] < num[a]) c = idom[c];
            }
            d = a;
          }
        }
      if (d >= 0 && idom[b] != d) idom[b] = d, changed = true;
    }
  }
  for (int i = 0; i < n; i++)
    if (code[i].name == "bra" || code[i].name == "brx") {
      int d = idom[of[i]];
      code[i].rpc = d < 0 || d == exit ? n : start[d];
    }
}

}  // namespace ptxrun
