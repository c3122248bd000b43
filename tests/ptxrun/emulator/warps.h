// Barriers and mbarriers, collectives of a warp, control flow.
#pragma once

#include "loads.h"

namespace ptxrun {

// ------------------------------------------------------------------------------------------------ barriers
void Machine::wake_barrier(int id) {
  Barrier& b = cta.bars[id];
  int need = b.expected ? b.expected : cta.live * 32;
  if (b.arrived < need || !b.arrived) return;
  if (b.arrived > need)
    throw Fault(fmt("barrier %d: %d threads arrived, %d expected (PTX line %u, kernel %s)", id, b.arrived, need, b.line,
                    kernel.name.c_str()));
  Barrier done = std::exchange(b, {});
  for (int g : done.waiting) {
    Warp& w = cta.warps[g];
    acquire(w, done.vc, done.pvc);
    w.status = RUN;
    w.resumed = true;
  }
}

HANDLER(bar_cta) {  // in.a: aligned
  if (w.resumed && w.at_barrier) {
    w.resumed = w.at_barrier = false;
    return;
  }
  if (m != w.alive)
    x.fault(w, in,
            in.a ? fmt("an aligned barrier with lanes 0x%x of 0x%x", m, w.alive)
                 : "a barrier in divergent code is not implemented");
  int id = in.o.empty() ? 0 : (int)x.uniform(w, in, in.o[0], m, "the barrier");
  int count = in.o.size() > 1 ? (int)x.uniform(w, in, in.o[1], m, "the count") : 0;
  if (id > 15) x.fault(w, in, fmt("barrier %d", id));
  if (count % 32) x.fault(w, in, fmt("a barrier of %d threads", count));
  Barrier& b = x.cta.bars[id];
  if (b.arrived && b.expected != count)
    x.fault(w, in, fmt("barrier %d with %d threads, others gave %d (PTX line %u)", id, count, b.expected, b.line));
  b.expected = count;
  b.arrived += 32;
  b.line = in.line;
  x.release(w, b.vc, b.pvc);
  b.waiting.push_back(w.id);
  w.status = AT_BARRIER;
  w.at_barrier = true;
  w.resumed = false;
  w.top().pc--;
  x.wake_barrier(id);
}

HANDLER(bar_warp) {
  u32 mask = (u32)x.uniform(w, in, in.o[0], m, "the mask");
  if ((mask & w.alive) != m)
    x.fault(w, in, fmt("bar.warp.sync 0x%x executed by lanes 0x%x (lanes apart are not implemented)", mask, m));
}

HANDLER(fence_proxy) {
  join(w.pvc, w.vc);
  w.vc[w.id]++;
}

enum MOp : u8 { M_INIT, M_ARRIVE, M_TRY };

HANDLER(mbarrier) {  // in.a: the operation
  int at = in.a == M_INIT ? 0 : 1;
  u64 a[32], v[32] = {};
  x.address(w, in, in.o[at], m, a);
  if ((int)in.o.size() > at + 1) memcpy(v, x.rd(w, in, at + 1, m), sizeof v);
  u32 off = 0;
  auto of_lane = [&](int l) -> MBar& {
    off = x.shared(w, in, a[l], 8, l, "mbarrier operation");
    auto k = x.cta.mbars.find(off);
    if (k == x.cta.mbars.end()) x.fault(w, in, fmt("no mbarrier was initialised at shared 0x%x", off), l);
    auto& e = x.cta.we[off / 4];
    if (x.c.races && e.clock && !x.before(w.vc, e.clock, e.agent))
      x.race(w, in, off, "uses the mbarrier at", "initialisation", e.line, e.agent, l);
    return k->second;
  };
  if (in.a == M_INIT) {
    lanes(m, [&](int l) {
      off = x.shared(w, in, a[l], 8, l, "mbarrier.init");
      if (x.cta.mbars.count(off)) {
        x.report("mbarrier", w, in, fmt("initialises the mbarrier at shared 0x%x again, which is still valid", off),
                 x.cta.mbars[off].line, l);
        x.cta.mbars.erase(off);
      }
      x.shared_write(w, in, off, 8, l);
      MBar b;
      b.expected = b.pending = (u32)v[l];
      if (!b.expected || b.expected >= 1u << 20) x.fault(w, in, "mbarrier.init with this count", l);
      b.line = in.line;
      b.vc.resize(AGENTS * x.warps);
      b.pvc = b.done_vc = b.done_pvc = b.vc;
      x.cta.mbars[off] = b;
    });
  } else if (in.a == M_ARRIVE) {
    lanes(m, [&](int l) {
      MBar& b = of_lane(l);
      join(b.vc, w.vc);
      join(b.pvc, w.pvc);
      if (--b.pending) return;
      b.phase++;
      b.pending = b.expected;
      b.done_vc = b.vc;
      b.done_pvc = b.pvc;
      for (auto& o : x.cta.warps)
        if (o.status == AT_MBARRIER && o.wait_mbar == off) o.status = RUN;
    });
    w.vc[w.id]++;
  } else {
    u32 yes = 0;
    lanes(m, [&](int l) {
      MBar& b = of_lane(l);
      if ((b.phase & 1) == (v[l] & 1)) return;
      yes |= 1u << l;
      x.acquire(w, b.done_vc, b.done_pvc);
    });
    if (!yes && x.rng() % 4) {
      w.status = AT_MBARRIER;
      w.wait_mbar = off;
      w.top().pc--;
      return;
    }
    u64* d = x.wr(w, in, 0, m);
    lanes(m, [&](int l) { d[l] = yes >> l & 1; });
    if (!yes) w.resumed = true;  // let others run
  }
}

// --------------------------------------------------------------------------------------- warp collectives
static void members(Machine& x, Warp& w, const Inst& in, const Op& o, u32 m) {
  const u64* a = x.rd(w, in, o, m);
  lanes(m, [&](int l) {
    u32 k = (u32)a[l];
    if (!(k >> l & 1)) x.fault(w, in, fmt("membermask 0x%x without the lane itself", k), l);
    if ((k & w.alive) & ~m) x.fault(w, in, fmt("membermask 0x%x, executed by lanes 0x%x only", k, m), l);
  });
}

HANDLER(w_shfl) {  // in.a: 0 idx, 1 bfly, 2 up, 3 down
  bool pair = in.o[0].k == VEC;
  members(x, w, in, in.o[4], m);
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m), *c = x.rd(w, in, 3, m);
  u64 r[32], p[32];
  lanes(m, [&](int l) {
    int seg = c[l] >> 8 & 31, bv = b[l] & 31, most = (l & seg) | ((int)c[l] & 31 & ~seg);
    int j = in.a == 1 ? l ^ bv : in.a == 2 ? l - bv : in.a == 3 ? l + bv : (l & seg) | (bv & ~seg);
    p[l] = in.a == 2 ? j >= most : j <= most;
    if (!p[l]) j = l;
    if (!(m >> j & 1)) x.fault(w, in, fmt("shuffles from lane %d, which does not take part", j), l);
    r[l] = (u32)a[j];
  });
  u64* d = x.wr(w, in, pair ? in.o[0].v[0] : in.o[0], m);
  lanes(m, [&](int l) { d[l] = r[l]; });
  if (pair) {
    u64* e = x.wr(w, in, in.o[0].v[1], m);
    lanes(m, [&](int l) { e[l] = p[l]; });
  }
}

HANDLER(w_redux) {
  members(x, w, in, in.o[2], m);
  const u64 *a = x.rd(w, in, 1, m), *k = x.rd(w, in, 2, m);
  u64 r[32] = {};
  lanes(m, [&](int l) { lanes((u32)k[l] & m, [&](int j) { r[l] = (u32)(r[l] + a[j]); }); });
  u64* d = x.wr(w, in, 0, m);
  lanes(m, [&](int l) { d[l] = r[l]; });
}

HANDLER(w_elect) {
  members(x, w, in, in.o[1], m);
  int f = std::countr_zero(m);
  u64* e = x.wr(w, in, in.o[0].v[0], m);
  lanes(m, [&](int l) { e[l] = f; });
  u64* p = x.wr(w, in, in.o[0].v[1], m);
  lanes(m, [&](int l) { p[l] = l == f; });
}

// ------------------------------------------------------------------------------------------ control flow
HANDLER(j_bra) {
  Entry e = w.top();
  if (m == e.mask) {
    w.top().pc = in.target;
    return;
  }
  Entry t{in.target, in.rpc, m}, n{e.pc, in.rpc, e.mask & ~m};
  if (in.rpc == e.rpc || in.rpc == (int)x.kernel.code.size()) {
    w.st.pop_back();
    t.rpc = n.rpc = e.rpc;
  } else
    w.top().pc = in.rpc;
  if (x.rng() & 1) std::swap(t, n);
  w.st.push_back(n);
  w.st.push_back(t);
}

HANDLER(j_brx) {
  u64 i = x.uniform(w, in, in.o[0], m, "brx.idx");
  if (m != w.top().mask || i + 2 >= in.o.size()) x.fault(w, in, "brx.idx in divergent code or beyond its targets");
  w.top().pc = in.o[2 + i].r;
}

HANDLER(j_exit) {
  if (!w.wg.empty()) x.report("wgmma", w, in, "exits with a wgmma in flight", w.wg.front().in->line);
  w.alive &= ~m;
  for (auto& e : w.st) e.mask &= ~m;
  for (auto& k : w.copies)
    if (m >> k.lane & 1) x.land(w, k);
}

HANDLER(j_nothing) {}

HANDLER(j_setmaxnreg) {
  i64 n = in.o[0].off;
  if (n < 24 || n > 256 || n % 8) x.fault(w, in, "setmaxnreg of this number");
  if (m != w.alive) x.fault(w, in, "setmaxnreg in divergent code");
}

}  // namespace ptxrun
