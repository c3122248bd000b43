// Copies by cp.async, and mbarriers.
#pragma once

#include "loads.h"

namespace ptxrun {

void Machine::land(Warp& w, Copy& k) {
  if (k.landed) return;
  k.landed = true;
  u8 data[16] = {};
  if (k.from_src) memcpy(data, (void*)k.src, k.from_src);
  memcpy(&w.cta->smem[k.dst], data, k.bytes);
}

void Machine::land_copies(Warp& w, u32 which, u32 keep, bool all) {
  for (auto& k : w.copies)
    if (which >> k.lane & 1 && (all || k.group + keep + 1 <= w.group[k.lane])) land(w, k), k.bytes = 0;
  std::erase_if(w.copies, [](Copy& k) { return k.bytes == 0; });
  u32 done = w.cp_clock;
  for (auto& k : w.copies) done = std::min(done, k.clock - 1);
  u32& v = w.vc[agent(1, w)];
  v = std::max(v, done);
}

HANDLER(cp_async) {
  u64 d[32], s[32];
  u32 off[32];
  x.address(w, in, in.o[0], m, d);
  x.address(w, in, in.o[1], m, s);
  u32 bytes = (u32)in.o[2].off;
  if (bytes != 4 && bytes != 8 && bytes != 16) x.fault(w, in, "cp.async of this size");
  if (in.a && bytes != 16) x.fault(w, in, "cp.async.cg copies 16 bytes");
  const u64* part = nullptr;
  bool ignore = false;
  if (in.o.size() > 3 && !(in.o[3].k == REG && in.o[3].width == 64)) {
    part = x.rd(w, in, 3, m);
    ignore = in.o[3].k == REG && in.o[3].width == 1;
  }
  u32 clock = ++w.cp_clock;
  bool now = !x.c.timing_random || x.rng() & 1;
  u32 reads = 0;
  lanes(m, [&](int l) {
    u32 n = !part ? bytes : ignore ? (part[l] ? 0 : bytes) : (u32)part[l];
    if (n > bytes) x.fault(w, in, "cp.async with a source larger than the copy", l);
    Cta* t = x.owner_aligned(w, in, d[l], bytes, l, off[l], "cp.async write");
    if (t != w.cta) x.fault(w, in, "cp.async to another CTA", l);
    if (s[l] % bytes) x.fault(w, in, fmt("misaligned cp.async source 0x%llx", (unsigned long long)s[l]), l);
    if (n) {
      reads |= 1u << l;
      for (u32 i = 0; i < n; i += std::min(n, 4u))
        if (n == bytes) {
          x.global(w, in, l, s[l], bytes, false);
          break;
        } else
          x.global(w, in, l, s[l] + i, 1, false);
    }
    x.mark_write(w, in, t, off[l], bytes, l, x.agent(1, w), clock, false);
    w.copies.push_back({l, w.group[l], clock, off[l], s[l], (u8)bytes, (u8)n, in.line, false, &in});
    if (now) x.land(w, w.copies.back());
  });
  if (reads)
    x.count(in, sectors(reads, s, bytes), ((u64)std::popcount(reads) * bytes + 31) / 32,
            (u64)std::popcount(reads) * bytes);
}

HANDLER(cp_commit) {
  lanes(m, [&](int l) { w.group[l]++; });
}

HANDLER(cp_wait) { x.land_copies(w, m, in.a, in.b); }  // in.b: wait_all

static MBar& mbar_at(Machine& x, Warp& w, const Inst& in, int lane, u64 a, Cta*& t, u32& off, bool check = true) {
  if (in.space == GENERIC) {
    if ((a & WINDOW_MASK) != GENERIC_SHARED) x.fault(w, in, "an mbarrier outside of shared memory", lane);
    a &= ~WINDOW_MASK;
  }
  t = x.owner_aligned(w, in, a, 8, lane, off, "mbarrier operation");
  auto k = t->mbars.find(off);
  if (k == t->mbars.end()) x.fault(w, in, fmt("no mbarrier was initialised at shared 0x%x", off), lane);
  if (check && x.c.races) {
    auto& e = t->we[off / 4];
    if (e.clock && !x.before(w.vc, e.clock, e.agent))
      x.race(w, in, t, off, "uses the mbarrier at", "initialisation", e.line, e.agent, lane);
  }
  return k->second;
}

void Machine::wake_mbar(Cta* t, u32 off) {
  for (auto* c2 : ctas)
    for (auto& w : c2->warps)
      if (w.status == AT_MBARRIER && w.wait_cta == t && w.wait_mbar == off) w.status = RUN;
}

void Machine::complete_if_ready(MBar& b) {
  if (b.pending == 0 && b.tx == 0) {
    b.phase++;
    b.pending = b.expected;
    b.done_vc = b.vc;
    b.done_pvc = b.pvc;
  }
}

void Machine::arrive(Warp*, Cta* t, u32 off, u32 n, i64 tx, const Inst& in, const Warp& by) {
  auto k = t->mbars.find(off);
  if (k == t->mbars.end()) fault(by, in, "completion on an mbarrier that is gone");
  MBar& b = k->second;
  b.tx += tx;
  if (n > b.pending)
    fault(by, in, fmt("more arrivals at the mbarrier at shared 0x%x than the %u it expects", off, b.expected));
  b.pending -= n;
  u64 before_phase = b.phase;
  complete_if_ready(b);
  if (b.phase != before_phase) wake_mbar(t, off);
}

enum MOp : u8 { M_INIT, M_INVAL, M_ARRIVE, M_EXPECT, M_COMPLETE, M_TEST, M_TRY, M_COUNT };

HANDLER(mbarrier) {  // in.a the operation; in.b 1: arrive.expect_tx; in.c 1: drop; in.d 1: parity
  int at = in.a == M_ARRIVE ? (in.o[0].k == MEM ? 0 : 1) : in.a == M_TEST || in.a == M_TRY ? 1 : 0;
  if (in.a == M_COUNT) {
    const u64* s = x.rd(w, in, 1, m);
    u64* d = x.wr(w, in, 0, m);
    lanes(m, [&](int l) { d[l] = s[l] >> 32; });
    return;
  }
  u64 a[32];
  x.address(w, in, in.o[at], m, a);
  const u64* v = (int)in.o.size() > at + 1 && in.o[at + 1].k != NONE ? x.rd(w, in, at + 1, m) : nullptr;
  Cta* t;
  u32 off;
  switch (in.a) {
    case M_INIT:
      lanes(m, [&](int l) {
        u64 q = a[l];
        if (in.space == GENERIC) q &= ~WINDOW_MASK;
        t = x.owner_aligned(w, in, q, 8, l, off, "mbarrier.init");
        if (t->mbars.count(off))
          x.report("mbarrier", w, in, fmt("initialises the mbarrier at shared 0x%x again, which is still valid", off),
                   t->mbars[off].line, l),
              t->mbars.erase(off);
        x.shared_write(w, in, t, off, 8, l);
        MBar b;
        b.expected = b.pending = (u32)v[l];
        if (!b.expected || b.expected >= 1u << 20) x.fault(w, in, "mbarrier.init with this count", l);
        b.line = in.line;
        b.vc.resize(4 * x.TW);
        b.pvc = b.done_vc = b.done_pvc = b.vc;
        t->mbars[off] = b;
      });
      break;
    case M_INVAL:
      lanes(m, [&](int l) {
        mbar_at(x, w, in, l, a[l], t, off);
        t->mbars.erase(off);
        x.shared_write(w, in, t, off, 8, l);
        memset(&t->init[off], 0, 8);
      });
      break;
    case M_ARRIVE: {
      u64 state[32];
      Warp* ww = &w;
      lanes(m, [&](int l) {
        MBar& b = mbar_at(x, w, in, l, a[l], t, off);
        state[l] = b.phase;
        u32 n = in.b ? 1 : v ? (u32)v[l] : 1;
        if (in.b) b.tx += v[l];
        join(b.vc, w.vc);
        join(b.pvc, w.pvc);
        if (in.c) b.expected -= n;
        x.arrive(ww, t, off, n, 0, in, w);
      });
      w.vc[w.gid]++;
      if (at == 1) {
        u64* d = x.wr(w, in, 0, m);
        lanes(m, [&](int l) { d[l] = state[l]; });
      }
      break;
    }
    case M_EXPECT: lanes(m, [&](int l) { mbar_at(x, w, in, l, a[l], t, off).tx += v[l]; }); break;
    case M_COMPLETE:
      lanes(m, [&](int l) {
        mbar_at(x, w, in, l, a[l], t, off);
        x.arrive(&w, t, off, 0, -(i64)v[l], in, w);
      });
      break;
    case M_TEST:
    case M_TRY: {
      u32 yes = 0;
      u64 vv[32];
      memcpy(vv, v, sizeof vv);
      lanes(m, [&](int l) {
        MBar& b = mbar_at(x, w, in, l, a[l], t, off);
        bool done = in.d ? (b.phase & 1) != (vv[l] & 1) : b.phase != vv[l];
        if (done) {
          yes |= 1u << l;
          x.acquire(w, b.done_vc, b.done_pvc);
        }
      });
      if (!yes && in.a == M_TRY && x.rng() % 4) {
        w.status = AT_MBARRIER;
        w.wait_mbar = off;
        w.wait_cta = t;
        w.top().pc--;
        return;
      }
      u64* d = x.wr(w, in, 0, m);
      lanes(m, [&](int l) { d[l] = yes >> l & 1; });
      if (!yes) w.resumed = true;  // let others run
      break;
    }
  }
}

// cp.async.mbarrier.arrive: it arrives at some later moment, when the copies before it have landed.
HANDLER(cp_arrive) {
  u64 a[32];
  x.address(w, in, in.o[0], m, a);
  Clock vc = w.vc, pvc = w.pvc;
  u32 clock = w.cp_clock;
  vc[x.agent(1, w)] = clock;
  Warp* ww = &w;
  const Inst* ii = &in;
  Machine* xx = &x;

  struct Arrival {
    int lane;
    Cta* t;
    u32 off;
  };

  vector<Arrival> list;
  lanes(m, [&](int l) {
    Cta* t;
    u32 off;
    MBar& b = mbar_at(x, w, in, l, a[l], t, off);
    if (!in.a) b.pending++;
    list.push_back({l, t, off});
  });
  x.pending->push_back({[=] {
                          for (auto& r : list)
                            for (auto& k : ww->copies)
                              if (k.lane == r.lane && k.clock <= clock) xx->land(*ww, k);
                          for (auto& r : list) {
                            auto q = r.t->mbars.find(r.off);
                            if (q == r.t->mbars.end()) xx->fault(*ww, *ii, "arrival on an mbarrier that is gone");
                            join(q->second.vc, vc);
                            join(q->second.pvc, pvc);
                            xx->arrive(ww, r.t, r.off, 1, 0, *ii, *ww);
                          }
                        },
                        2, w.gid, 0, 0});
  w.vc[w.gid]++;
}

}  // namespace ptxrun
