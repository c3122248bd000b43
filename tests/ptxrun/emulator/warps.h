// Barriers, collectives of a warp, control flow.
#pragma once

#include "bulk.h"

namespace ptxrun {

// ------------------------------------------------------------------------------------------ barriers
void Machine::wake_barrier(Cta& t, int id) {
  Barrier& b = t.bars[id];
  int need = b.expected ? b.expected : t.live * 32;
  if (b.arrived < need || !b.arrived) return;
  if (b.arrived > need)
    throw Fault(fmt("barrier %d: %d threads arrived, %d expected (PTX line %u, kernel %s)", id, b.arrived, need, b.line,
                    kernel.name.c_str()));
  Barrier done = b;
  b = Barrier();
  for (int g : done.waiting) {
    Warp& w = t.warps[g];
    acquire(w, done.vc, done.pvc);
    w.status = RUN;
    w.resumed = true;
    w.bar_pop = done.pop;
    w.bar_and = done.all_and;
    w.bar_or = done.any;
  }
}

HANDLER(bar_cta) {  // in.a: 0 sync, 1 arrive, 2 red (in.b: 0 popc, 1 and, 2 or); in.c: aligned; in.d: index of the
                    // first operand
  if (w.resumed && w.barrier >= 0) {
    w.resumed = false;
    w.barrier = -1;
    if (in.a == 2) {
      u64* d = x.wr(w, in, 0, m);
      lanes(m, [&](int l) { d[l] = in.b == 0 ? w.bar_pop : in.b == 1 ? w.bar_and : w.bar_or; });
    }
    return;
  }
  if (m != w.alive)
    x.fault(w, in,
            in.c ? fmt("an aligned barrier with lanes 0x%x of 0x%x", m, w.alive)
                 : "a barrier in divergent code is not implemented");
  int first = in.d;
  int id = in.o.size() > (size_t)first ? (int)x.uniform(w, in, in.o[first], m, "the barrier") : 0;
  if (id > 15) x.fault(w, in, fmt("barrier %d", id));
  int count = 0;
  const Op* pr = nullptr;
  if (in.a == 2) {
    pr = &in.o.back();
    if (in.o.size() - first == 3) count = (int)x.uniform(w, in, in.o[first + 1], m, "the count");
  } else if (in.o.size() > (size_t)first + 1)
    count = (int)x.uniform(w, in, in.o[first + 1], m, "the count");
  if (count % 32) x.fault(w, in, fmt("a barrier of %d threads", count));
  Barrier& b = w.cta->bars[id];
  if (b.arrived && b.expected != count)
    x.fault(w, in, fmt("barrier %d with %d threads, others gave %d (PTX line %u)", id, count, b.expected, b.line));
  for (int g : b.waiting)
    if (g == w.id) x.fault(w, in, "a warp arrives twice");
  b.expected = count;
  b.arrived += 32;
  b.line = in.line;
  x.release(w, b.vc, b.pvc);
  if (pr) {
    const u64* p = x.rd(w, in, *pr, m);
    lanes(m, [&](int l) {
      b.pop += p[l] & 1;
      b.all_and &= p[l] & 1;
      b.any |= p[l] & 1;
    });
  }
  if (in.a != 1) {
    b.waiting.push_back(w.id);
    w.status = AT_BARRIER;
    w.barrier = id;
    w.resumed = false;
    w.top().pc--;
  }
  x.wake_barrier(*w.cta, id);
}

HANDLER(bar_warp) {
  u32 mask = (u32)x.uniform(w, in, in.o[0], m, "the mask");
  if ((mask & w.alive) != m)
    x.fault(w, in, fmt("bar.warp.sync 0x%x executed by lanes 0x%x (lanes apart are not implemented)", mask, m));
}

HANDLER(bar_cluster) {  // in.a: 0 arrive, 1 wait
  Barrier& b = x.cluster_bar;
  int live = 0;
  for (auto* c : x.ctas) live += c->live;
  if (in.a == 0) {
    x.release(w, b.vc, b.pvc);
    w.bar_pop = b.pop;
    if (++b.arrived == live) {
      b.arrived = 0;
      b.pop++;
      for (auto* c : x.ctas)
        for (auto& o : c->warps)
          if (o.status == AT_CLUSTER) o.status = RUN;
    }
    return;
  }
  if (w.bar_pop == b.pop) {
    w.status = AT_CLUSTER;
    w.top().pc--;
    return;
  }
  x.acquire(w, b.vc, b.pvc);
}

HANDLER(fence_proxy) {
  join(w.pvc, w.vc);
  w.vc[w.gid]++;
}

// --------------------------------------------------------------------------------- warp collectives
static u32 members(Machine& x, Warp& w, const Inst& in, const Op& o, u32 m) {
  const u64* a = x.rd(w, in, o, m);
  lanes(m, [&](int l) {
    u32 k = (u32)a[l];
    if (!(k >> l & 1)) x.fault(w, in, fmt("membermask 0x%x without the lane itself", k), l);
    if ((k & w.alive) & ~m) x.fault(w, in, fmt("membermask 0x%x, executed by lanes 0x%x only", k, m), l);
  });
  return (u32)a[std::countr_zero(m)];
}

HANDLER(w_shfl) {  // in.a 0 up 1 down 2 bfly 3 idx
  const Op& dst = in.o[0].k == VEC ? in.o[0].v[0] : in.o[0];
  members(x, w, in, in.o[4], m);
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m), *c = x.rd(w, in, 3, m);
  u64 r[32], p[32];
  lanes(m, [&](int l) {
    int seg = c[l] >> 8 & 31, cl = c[l] & 31, bv = b[l] & 31, most = (l & seg) | (cl & ~seg), least = l & seg, j;
    bool ok;
    switch (in.a) {
      case 0:
        j = l - bv;
        ok = j >= most;
        break;
      case 1:
        j = l + bv;
        ok = j <= most;
        break;
      case 2:
        j = l ^ bv;
        ok = j <= most;
        break;
      default: j = least | (bv & ~seg); ok = j <= most;
    }
    if (!ok) j = l;
    if (!(m >> j & 1)) x.fault(w, in, fmt("shuffles from lane %d, which does not take part", j), l);
    r[l] = (u32)a[j];
    p[l] = ok;
  });
  u64* d = x.wr(w, in, dst, m);
  lanes(m, [&](int l) { d[l] = r[l]; });
  if (in.o[0].k == VEC) {
    u64* e = x.wr(w, in, in.o[0].v[1], m);
    lanes(m, [&](int l) { e[l] = p[l]; });
  }
}

HANDLER(w_vote) {  // in.a 0 all 1 any 2 uni 3 ballot
  members(x, w, in, in.o[2], m);
  const u64* p = x.rd(w, in, 1, m);
  u32 k = 0;
  lanes(m, [&](int l) { k |= (u32)(p[l] & 1) << l; });
  u64 v = in.a == 0 ? k == m : in.a == 1 ? k != 0 : in.a == 2 ? k == 0 || k == m : k;
  u64* d = x.wr(w, in, 0, m);
  lanes(m, [&](int l) { d[l] = v; });
}

HANDLER(w_match) {
  const Op& dst = in.o[0].k == VEC ? in.o[0].v[0] : in.o[0];
  members(x, w, in, in.o[2], m);
  const u64* a = x.rd(w, in, 1, m);
  u64 r[32], k = in.t == B64 ? ~0ull : 0xffffffff;
  bool all = true;
  int f = std::countr_zero(m);
  lanes(m, [&](int l) {
    u32 q = 0;
    lanes(m, [&](int j) { q |= (u32)((a[j] & k) == (a[l] & k)) << j; });
    r[l] = q;
    all &= (a[l] & k) == (a[f] & k);
  });
  u64* d = x.wr(w, in, dst, m);
  lanes(m, [&](int l) { d[l] = in.a ? (all ? m : 0) : r[l]; });
  if (in.o[0].k == VEC) {
    u64* e = x.wr(w, in, in.o[0].v[1], m);
    lanes(m, [&](int l) { e[l] = all; });
  }
}

HANDLER(w_redux) {
  members(x, w, in, in.o[2], m);
  const u64* a = x.rd(w, in, 1, m);
  bool first = true;
  u32 r = 0;
  lanes(m, [&](int l) {
    u32 v = (u32)a[l];
    if (first)
      r = v, first = false;
    else
      r = (u32)atom_value(in.a, in.t, r, v, 0);
  });
  u64* d = x.wr(w, in, 0, m);
  lanes(m, [&](int l) { d[l] = r; });
}

HANDLER(w_activemask) {
  u64* d = x.wr(w, in, 0, m);
  lanes(m, [&](int l) { d[l] = m; });
}

HANDLER(w_elect) {
  members(x, w, in, in.o[1], m);
  int f = std::countr_zero(m);
  const Op& o = in.o[0];
  const Op* d = o.k == VEC ? &o.v[0] : &o;
  u64* e = x.wr(w, in, *d, m);
  lanes(m, [&](int l) { e[l] = f; });
  if (o.k == VEC) {
    u64* p = x.wr(w, in, o.v[1], m);
    lanes(m, [&](int l) { p[l] = l == f; });
  }
}

// ------------------------------------------------------------------------------------ control flow
HANDLER(j_bra) {
  Entry e = w.top();
  if (m == e.mask) {
    w.top().pc = in.target;
    return;
  }
  int end = (int)x.m.funcs[e.func].code.size();
  Entry t{in.target, in.rpc, m, e.func, e.frame}, n{e.pc, in.rpc, e.mask & ~m, e.func, e.frame};
  if (in.rpc == e.rpc || in.rpc == end) {
    w.st.pop_back();
    t.rpc = n.rpc = e.rpc == in.rpc ? in.rpc : e.rpc;
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

void Machine::retire(Warp& w, u32 mask) {
  w.alive &= ~mask;
  for (auto& e : w.st) e.mask &= ~mask;
  for (int l = 0; l < 32; l++)
    if (mask >> l & 1)
      for (auto& k : w.copies)
        if (k.lane == l) land(w, k);
}

HANDLER(j_exit) {
  if (!w.wg.empty()) x.report("wgmma", w, in, "exits with a wgmma in flight", w.wg.front().in->line);
  x.retire(w, m);
}

static vector<const Inst*>& call_sites(Warp& w) {
  static thread_local std::unordered_map<Warp*, vector<const Inst*>> s;
  return s[&w];
}

HANDLER(j_call) {
  Func& g = x.m.funcs[in.func];
  if (g.declared_only) {
    if (g.name == "__assertfail") x.fault(w, in, "a device assertion failed", std::countr_zero(m));
    if (g.name == "vprintf") {
      if (!in.o[0].v.empty())
        lanes(m, [&](int l) { memset(&w.local[(size_t)l * x.m.total_local + in.o[0].v[0].off], 0, 4); });
      return;
    }
    x.fault(w, in, "calls " + g.name + ", which has no body");
  }
  lanes(m, [&](int l) {
    u8* b = &w.local[(size_t)l * x.m.total_local];
    for (size_t i = 0; i < g.params.size() && i < in.o[1].v.size(); i++)
      memcpy(b + g.params[i].offset, b + in.o[1].v[i].off, g.params[i].size);
  });
  int frame = w.top().frame + 1;
  auto& s = call_sites(w);
  s.resize(frame + 1);
  s[frame] = &in;
  w.st.push_back({0, -1, m, in.func, frame});
}

HANDLER(j_ret) {
  int frame = w.top().frame;
  if (!frame) {
    j_exit(x, w, in, m);
    return;
  }
  const Inst& c = *call_sites(w)[frame];
  Func& g = x.m.funcs[c.func];
  lanes(m, [&](int l) {
    u8* b = &w.local[(size_t)l * x.m.total_local];
    for (size_t i = 0; i < g.rets.size() && i < c.o[0].v.size(); i++)
      memcpy(b + c.o[0].v[i].off, b + g.rets[i].offset, g.rets[i].size);
  });
  for (auto& e : w.st)
    if (e.frame >= frame) e.mask &= ~m;
}

HANDLER(j_trap) { x.fault(w, in, "trap", std::countr_zero(m)); }

HANDLER(j_setmaxnreg) {
  int n = (int)in.o[0].off;
  if (n < 24 || n > 256 || n % 8) x.fault(w, in, "setmaxnreg of this number");
  if (m != w.alive) x.fault(w, in, "setmaxnreg in divergent code");
}

HANDLER(c_mapa) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m);
  u64* d = x.wr(w, in, 0, m);
  lanes(m, [&](int l) {
    if (b[l] >= x.ctas.size())
      x.fault(w, in, fmt("mapa of CTA %llu of a cluster of %zu", (unsigned long long)b[l], x.ctas.size()), l);
    d[l] = (a[l] & ~0xff000000ull) | (u64)(b[l] + 1) << 24;
  });
}

HANDLER(c_ctarank) {
  const u64* a = x.rd(w, in, 1, m);
  u64* d = x.wr(w, in, 0, m);
  lanes(m, [&](int l) {
    u32 r = a[l] >> 24 & 0xff;
    d[l] = r ? r - 1 : w.cta->rank;
  });
}

}  // namespace ptxrun
