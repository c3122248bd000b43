// Warps take turns at random; the seed determines the order.
#pragma once

#include "select.h"

namespace ptxrun {

void Machine::step(Warp& w) {
  Entry& e = w.top();
  const Inst& in = m.funcs[e.func].code[e.pc];
  u32 mask = e.mask;
  current = &w;
  now = &in;
  if (in.pred >= 0) {
    if (mask & ~w.def[in.pred]) {
      Op o;
      o.k = REG;
      o.r = in.pred;
      if (c.uninit_regs) bad_read(w, in, o, mask);
    }
    const u64* p = &w.reg[(size_t)in.pred * 32];
    u32 k = 0;
    lanes(mask, [&](int l) { k |= (u32)(p[l] & 1) << l; });
    mask &= in.pneg ? ~k : k;
  }
  e.pc++;
  w.ic++;
  steps++;
  w.ntmp = 0;
  if (mask) {
    if (!in.fn) fault(w, in, "this instruction is not implemented");
    stats.n[in.uid]++;
    stats.lanes[in.uid] += std::popcount(mask);
    stats.warp_class[w.id & 63][in.cls]++;
    in.fn(*this, w, in, mask);
  }
  while (!w.st.empty() && (w.top().mask == 0 || w.top().pc == w.top().rpc)) w.st.pop_back();
  if (w.st.empty()) {
    w.status = DONE;
    w.cta->live--;
    for (auto& b : w.cta->bars)
      if (!b.second.waiting.empty() && !b.second.expected) wake_barrier(*w.cta, b.first);
    int live = 0;
    for (auto* q : ctas) live += q->live;
    if (live && cluster_bar.arrived == live) {
      cluster_bar.arrived = 0;
      cluster_bar.pop++;
      for (auto* q : ctas)
        for (auto& o : q->warps)
          if (o.status == AT_CLUSTER) o.status = RUN;
    }
  }
}

void Machine::run_cluster(const u32* first) {
  int n = cluster[0] * cluster[1] * cluster[2], threads_ = block[0] * block[1] * block[2], NW = (threads_ + 31) / 32;
  TW = NW * n;
  u64 lin0 = first[0] + (u64)grid[0] * (first[1] + (u64)grid[1] * first[2]);
  rng = Rng(c.seed * 1000003 + lin0);
  sync.clear();
  cluster_bar = Barrier();
  std::list<Pending> list;
  pending = &list;
  steps = 0;
  for (int k = 0; k < n; k++) {
    Cta& t = *ctas[k];
    t.rank = k;
    t.id[0] = first[0] + k % cluster[0];
    t.id[1] = first[1] + k / cluster[0] % cluster[1];
    t.id[2] = first[2] + k / (cluster[0] * cluster[1]);
    t.linear = t.id[0] + (u64)grid[0] * (t.id[1] + (u64)grid[1] * t.id[2]);
    size_t bytes = (shared_limit + 31) / 16 * 16;
    t.smem.resize(bytes);
    for (auto& b : t.smem) b = (u8)(0xA5 ^ c.seed);
    t.init.assign(bytes, 0);
    t.bars.clear();
    t.mbars.clear();
    t.synced_global = false;
    if (c.races) {
      t.we.assign(bytes / 4, {});
      t.re.assign(bytes / 4 * TW, {});
      t.are.assign(bytes / 16 * 2 * TW, {});
    }
    t.live = NW;
    t.warps.resize(NW);
    for (int i = 0; i < NW; i++) {
      Warp& w = t.warps[i];
      w.cta = &t;
      w.id = i;
      w.gid = k * NW + i;
      int have = std::min(32, threads_ - 32 * i);
      w.alive = have == 32 ? ~0u : (1u << have) - 1;
      w.st.assign(1, {0, -1, w.alive, (int)(&kernel - m.funcs.data()), 0});
      w.status = RUN;
      w.reg.resize((size_t)m.total_regs * 32);
      w.def.assign(m.total_regs, 0);
      w.stamp.assign(m.total_regs, 0);
      w.infl.assign(m.total_regs, 0);
      w.n_infl = 0;
      w.local.resize((size_t)32 * m.total_local);
      w.cc = 0;
      w.vc.assign(4 * TW, 0);
      w.pvc.assign(4 * TW, 0);
      w.vc[w.gid] = 1;
      w.ic = 0;
      w.fence_stamp = 0;
      w.barrier = -1;
      w.resumed = false;
      w.copies.clear();
      w.wg.clear();
      w.wg_group = w.wg_clock = 0;
      w.wg_count = 0;
      w.cp_clock = w.bulk_clock = 0;
      memset(w.group, 0, sizeof w.group);
      memset(w.bulk_group, 0, sizeof w.bulk_group);
      for (int l = 0; l < 32; l++) {
        u32 id = i * 32 + l;
        w.tidx[l] = id % block[0];
        w.tidy[l] = id / block[0] % block[1];
        w.tidz[l] = id / (block[0] * block[1]);
      }
    }
  }
  vector<Warp*> ready;
  u64 limit = c.limit ? c.limit : 200000000ull;
  for (;;) {
    ready.clear();
    bool any = false;
    for (int k = 0; k < n; k++)
      for (auto& w : ctas[k]->warps) {
        any |= w.status != DONE;
        if (w.status == RUN) ready.push_back(&w);
      }
    if (!any) break;
    if (!list.empty() && (ready.empty() || rng() % 4 == 0)) {
      land_one();
      continue;
    }
    if (ready.empty()) {
      string s = "deadlock: ";
      for (int k = 0; k < n; k++)
        for (auto& w : ctas[k]->warps)
          if (w.status != DONE) {
            const Inst& in = m.funcs[w.top().func].code[w.top().pc];
            s += fmt("\n  CTA (%u,%u,%u) warp %d waits at PTX line %u: ", w.cta->id[0], w.cta->id[1], w.cta->id[2],
                     w.id, in.line) +
                 m.lines[in.line - 1];
            if (w.status == AT_MBARRIER) {
              auto& b = w.wait_cta->mbars[w.wait_mbar];
              s += fmt(" (mbarrier 0x%x: phase %llu, %u of %u arrivals missing, tx %lld)", w.wait_mbar,
                       (unsigned long long)b.phase, b.pending, b.expected, (long long)b.tx);
            }
          }
      throw Fault("kernel " + kernel.name + ": " + s);
    }
    Warp& w = *ready[rng.below((u32)ready.size())];
    int q = 1 + rng.below(c.quantum);
    while (q-- && w.status == RUN) {
      step(w);
      if (w.resumed && w.barrier < 0) {
        w.resumed = false;
        break;
      }
    }
    if (steps > limit) {
      const Inst& in = m.funcs[w.st.empty() ? 0 : w.top().func].code[w.st.empty() ? 0 : w.top().pc];
      fault(w, in, "more instructions than the limit: an endless loop?");
    }
  }
  while (!list.empty()) land_one();
  u64 wg0 = 0;
  for (int k = 0; k < n; k++)
    for (auto& w : ctas[k]->warps)
      if (w.id % 4) {
        if (w.wg_count != wg0)
          throw Fault(fmt("kernel %s: warps of a warp group executed different numbers of wgmma (%llu, %llu)",
                          kernel.name.c_str(), (unsigned long long)wg0, (unsigned long long)w.wg_count));
      } else
        wg0 = w.wg_count;
  stats.instructions += steps;
}

}  // namespace ptxrun
