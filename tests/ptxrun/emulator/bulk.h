// Bulk copies and st.async, and the moments at which asynchronous work lands.
#pragma once

#include "async.h"

namespace ptxrun {

static void bulk_check(Machine& x, Warp& w, const Inst& in, int l, u64 d, u64 s, u64 n) {
  if (n % 16 || d % 16 || s % 16)
    x.fault(w, in,
            fmt("bulk copy of %llu bytes from 0x%llx to 0x%llx: all must be multiples of 16", (unsigned long long)n,
                (unsigned long long)s, (unsigned long long)d),
            l);
}

static u8* global_range(Machine& x, Warp& w, const Inst& in, int l, u64 a, u64 n, bool write) {
  if (n) {
    x.global(w, in, l, a, 16, write);
    if (!x.region(a, (u32)n)) x.global(w, in, l, a + n - 16, 16, write);
    if (!x.region(a, (u32)n)) x.fault(w, in, "bulk copy across the end of a region", l);
    for (u64 i = 16; i < n && x.c.global_races; i += 16) x.global(w, in, l, a + i, 16, write);
  }
  return (u8*)a;
}

HANDLER(bulk_copy) {  // in.a: 0 global -> shared, 1 shared -> global, 2 shared -> shared of the cluster
  u64 d[32], s[32];
  x.address(w, in, in.o[0], m, d);
  x.address(w, in, in.o[1], m, s);
  const u64* n = x.rd(w, in, 2, m);
  u64 b[32];
  if (in.a != 1) x.address(w, in, in.o[3], m, b);
  Machine* xx = &x;
  Warp* ww = &w;
  const Inst* ii = &in;
  if (in.has("multicast::cluster")) x.fault(w, in, "multicast is not implemented");
  lanes(m, [&](int l) {
    u64 bytes = n[l];
    bulk_check(x, w, in, l, d[l], s[l], bytes);
    if (!bytes) return;
    u32 clock = ++w.bulk_clock;
    if (in.a == 1) {
      u32 off;
      Cta* t = x.owner(w, in, s[l], (u32)bytes, l, off, "bulk read");
      x.async_read(w, in, t, off, (u32)bytes, 3, clock, w.vc, w.pvc);
      u8* g = global_range(x, w, in, l, d[l], bytes, true);
      x.pending->push_back({[=] { memcpy(g, &t->smem[off], bytes); }, 1, w.gid, l, w.bulk_group[l]});
    } else {
      u32 off;
      Cta* t = x.owner(w, in, d[l], (u32)bytes, l, off, "bulk write");
      Cta* bt;
      u32 boff;
      mbar_at(x, w, in, l, b[l], bt, boff);
      const u8* from;
      if (in.a == 0)
        from = global_range(x, w, in, l, s[l], bytes, false);
      else {
        u32 so;
        Cta* st = x.owner(w, in, s[l], (u32)bytes, l, so, "bulk read");
        x.async_read(w, in, st, so, (u32)bytes, 3, clock, w.vc, w.pvc);
        from = &st->smem[so];
      }
      x.mark_write(w, in, t, off, (u32)bytes, l, x.agent(3, w), clock, true);
      u32 me = x.agent(3, w);
      x.pending->push_back({[=] {
                              memcpy(&t->smem[off], from, bytes);
                              auto q = bt->mbars.find(boff);
                              if (q == bt->mbars.end())
                                xx->fault(*ww, *ii, "bulk copy completes on an mbarrier that is gone");
                              q->second.vc[me] = std::max(q->second.vc[me], clock);
                              q->second.pvc[me] = std::max(q->second.pvc[me], clock);
                              xx->arrive(ww, bt, boff, 0, -(i64)bytes, *ii, *ww);
                            },
                            0, w.gid, l, 0});
    }
    x.count(in, bytes / 32, bytes / 32, bytes);
  });
}

HANDLER(bulk_commit) {
  lanes(m, [&](int l) { w.bulk_group[l]++; });
}

HANDLER(bulk_wait) {
  for (auto i = x.pending->begin(); i != x.pending->end();)
    if (i->kind == 1 && i->gid == w.gid && (m >> i->lane & 1) && i->group + in.a + 1 <= w.bulk_group[i->lane]) {
      i->land();
      i = x.pending->erase(i);
    } else
      ++i;
  bool left = false;
  for (auto& p : *x.pending) left |= p.kind == 1 && p.gid == w.gid;
  if (!left) w.vc[x.agent(3, w)] = std::max(w.vc[x.agent(3, w)], w.bulk_clock);
}

HANDLER(st_async) {
  u64 a[32], b[32];
  x.address(w, in, in.o[0], m, a);
  x.address(w, in, in.o[2], m, b);
  const Op& src = in.o[1];
  int n = src.k == VEC ? (int)src.v.size() : 1;
  u32 each = bits_of(in.t) / 8, size = n * each;
  vector<std::array<u8, 16>> data(32);
  for (int i = 0; i < n; i++) {
    const u64* v = x.rd(w, in, src.k == VEC ? src.v[i] : src, m);
    lanes(m, [&](int l) { memcpy(&data[l][i * each], &v[l], each); });
  }
  Machine* xx = &x;
  Warp* ww = &w;
  const Inst* ii = &in;
  Clock vc = w.vc;
  lanes(m, [&](int l) {
    u32 off, boff;
    Cta *t = x.owner_aligned(w, in, a[l], size, l, off, "st.async"), *bt;
    mbar_at(x, w, in, l, b[l], bt, boff);
    u32 clock = ++w.bulk_clock, me = x.agent(3, w);
    x.mark_write(w, in, t, off, size, l, me, clock, true);
    auto bytes = data[l];
    x.pending->push_back({[=] {
                            memcpy(&t->smem[off], bytes.data(), size);
                            auto q = bt->mbars.find(boff);
                            if (q != bt->mbars.end()) {
                              join(q->second.vc, vc);
                              q->second.vc[me] = std::max(q->second.vc[me], clock);
                            }
                            xx->arrive(ww, bt, boff, 0, -(i64)size, *ii, *ww);
                          },
                          0, w.gid, l, 0});
  });
  w.vc[w.gid]++;
}

void Machine::land_one() {
  if (pending->empty()) return;
  auto i = pending->begin();
  std::advance(i, rng.below((u32)pending->size()));
  if (i->kind == 2)
    for (auto k = pending->begin(); k != i; ++k)
      if (k->kind == 2 && k->gid == i->gid) {
        i = k;
        break;
      }  // arrivals of a warp in order
  auto p = std::move(*i);
  pending->erase(i);
  p.land();
}

}  // namespace ptxrun
