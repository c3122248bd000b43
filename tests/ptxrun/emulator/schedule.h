// Warps take turns at random; the seed determines the order.
#pragma once

#include "select.h"

namespace ptxrun {

void Machine::step(Warp& w) {
  Entry& e = w.top();
  const Inst& in = kernel.code[e.pc];
  u32 mask = e.mask;
  current = &w;
  now = &in;
  if (in.pred >= 0) {
    if (mask & ~w.def[in.pred] && c.uninit_regs) {
      Op o;
      o.r = in.pred;
      bad_read(w, in, o, mask);
    }
    const u64* p = &w.reg[(size_t)in.pred * 32];
    u32 k = 0;
    lanes(mask, [&](int l) { k |= (u32)(p[l] & 1) << l; });
    mask &= in.pneg ? ~k : k;
  }
  e.pc++;
  steps++;
  w.ntmp = 0;
  if (mask) {
    if (!in.fn) fault(w, in, "this instruction is not implemented");
    stats.n[in.uid]++;
    stats.lanes[in.uid] += std::popcount(mask);
    in.fn(*this, w, in, mask);
  }
  while (!w.st.empty() && (w.top().mask == 0 || w.top().pc == w.top().rpc)) w.st.pop_back();
  if (w.st.empty()) {
    w.status = DONE;
    cta.live--;
    for (auto& b : cta.bars)
      if (!b.second.waiting.empty() && !b.second.expected) wake_barrier(b.first);
  }
}

void Machine::run_cta(u64 number) {
  warps = (threads + 31) / 32;
  rng = Rng(c.seed * 1000003 + number);
  steps = 0;
  cta.id[0] = number % grid[0];
  cta.id[1] = number / grid[0] % grid[1];
  cta.id[2] = number / ((u64)grid[0] * grid[1]);
  cta.linear = number;
  size_t bytes = (shared_limit + 31) / 16 * 16;
  cta.smem.assign(bytes, (u8)(0xA5 ^ c.seed));
  cta.init.assign(bytes, 0);
  cta.bars.clear();
  cta.mbars.clear();
  if (c.races) {
    cta.we.assign(bytes / 4, {});
    cta.re.assign(bytes / 4 * warps, {});
    cta.are.assign(bytes / 16 * warps, {});
  }
  cta.live = warps;
  cta.warps.resize(warps);
  for (int i = 0; i < warps; i++) {
    Warp& w = cta.warps[i];
    vector<u64> reg = std::move(w.reg);  // of a CTA before, reused as it is: clearing it takes milliseconds
    if (!number) reg.clear();
    w = Warp();
    w.reg = std::move(reg);
    int have = std::min(32, (int)threads - 32 * i);
    w.id = i;
    w.alive = ~0u >> (32 - have);
    w.st.assign(1, {0, -1, w.alive});
    w.reg.resize((size_t)kernel.nregs * 32);
    w.def.resize(kernel.nregs);
    w.infl.resize(kernel.nregs);
    w.vc.assign(AGENTS * warps, 0);
    w.pvc = w.vc;
    w.vc[i] = 1;
  }
  vector<Warp*> ready;
  u64 limit = c.limit ? c.limit : 200000000ull;
  for (;;) {
    ready.clear();
    for (auto& w : cta.warps)
      if (w.status == RUN) ready.push_back(&w);
    if (!cta.live) break;
    if (ready.empty()) {
      string s = "deadlock: ";
      for (auto& w : cta.warps)
        if (w.status != DONE) {
          const Inst& in = kernel.code[w.top().pc];
          s += fmt("\n  CTA (%u,%u,%u) warp %d waits at PTX line %u: ", cta.id[0], cta.id[1], cta.id[2], w.id, in.line) +
               m.lines[in.line - 1];
          if (w.status == AT_MBARRIER) {
            auto& b = cta.mbars[w.wait_mbar];
            s += fmt(" (mbarrier 0x%x: phase %llu, %u of %u arrivals missing)", w.wait_mbar,
                     (unsigned long long)b.phase, b.pending, b.expected);
          }
        }
      throw Fault("kernel " + kernel.name + ": " + s);
    }
    Warp& w = *ready[rng.below((u32)ready.size())];
    int q = 1 + rng.below(c.quantum);
    while (q-- && w.status == RUN) {
      step(w);
      if (w.resumed && !w.at_barrier) {
        w.resumed = false;
        break;
      }
    }
    if (steps > limit)
      fault(w, kernel.code[w.st.empty() ? 0 : w.top().pc], "more instructions than the limit: an endless loop?");
  }
  for (int i = 0; i < warps; i++)
    if (u32 first = cta.warps[i / 4 * 4].wg_clock, own = cta.warps[i].wg_clock; first != own)
      throw Fault(fmt("kernel %s: warps of a warp group executed different numbers of wgmma (%u, %u)",
                      kernel.name.c_str(), first, own));
  stats.instructions += steps;
}

}  // namespace ptxrun
