// wgmma: descriptors, swizzles, products that are done at the issue or at the wait.
#pragma once

#include "matrix.h"

namespace ptxrun {

// Below, `in` is a wgmma: in.t is A's type, in.t2 B's, in.d D's; in.b is N, in.c K; operands: D, A, B, scale-d, ...

struct Descriptor {
  u32 start, lead, stride, base;
  int swizzle;
};

static Descriptor descriptor(u64 d) {
  return {(u32)(d & 0x3fff) << 4, (u32)(d >> 16 & 0x3fff) << 4, (u32)(d >> 32 & 0x3fff) << 4, (u32)(d >> 49 & 7),
          (int)(d >> 62)};
}

static u32 swizzled(u32 a, const Descriptor& d) {
  switch (d.swizzle) {
    case 1: return a ^ ((((a >> 7) - d.base) & 7) << 4);
    case 2: return a ^ ((a >> 7 & 3) << 4);
    case 3: return a ^ ((a >> 7 & 1) << 4);
    default: return a;
  }
}

// Rows [first, first + count) of an operand, [row][k].
static void fetch_operand(Machine& x, Warp& w, const Inst& in, u32 clock, const Clock& vc, const Clock& pvc, u64 raw, T t,
                          bool mn_major, int first, int count, int K, double (*out)[64]) {
  Descriptor d = descriptor(raw);
  int es = t == TF32 ? 4 : bits_of(t) / 8, per = 16 / es;
  static const u32 pitches[] = {16, 128, 64, 32};
  u32 pitch = pitches[d.swizzle];
  if (d.base && d.swizzle > 1)
    x.fault(w, in,
            "a descriptor with a base offset and a swizzle of 32 or 64 bytes");  // without swizzle it has no meaning
  auto granule = [&](u32 a) -> const u8* {
    a = swizzled(a, d);
    u32 off;
    Cta* c = x.owner(w, in, a & 0x3ffff, 16, -1, off, "wgmma operand");
    x.async_read(w, in, c, off, 16, 2, clock, vc, pvc);
    return &c->smem[off];
  };
  auto value = [&](const u8* p) {
    u64 v = 0;
    memcpy(&v, p, es);
    return element(v, t);
  };
  if (!mn_major) {
    for (int r = 0; r < count; r++)
      for (int j = 0; j < K / per; j++) {
        int i = first + r;
        const u8* p = granule(d.start + (i % 8) * pitch + (i / 8) * d.stride + (d.swizzle ? j * 16 : j * d.lead));
        for (int e = 0; e < per; e++) out[r][j * per + e] = value(p + e * es);
      }
  } else {
    int chunks = pitch / 16;
    for (int r = 0; r < count; r += per)
      for (int k = 0; k < K; k++) {
        int c = (first + r) / per;
        u32 a = d.start + (k % 8) * pitch +
                (d.swizzle ? (c % chunks) * 16 + (c / chunks) * d.lead + (k / 8) * d.stride
                           : c * d.stride + (k / 8) * d.lead);
        const u8* p = granule(a);
        for (int e = 0; e < per; e++) out[r + e][k] = value(p + e * es);
      }
  }
}

static const Op& part_of(const Op& o, int i) { return o.k == VEC ? o.v[i] : o; }

void Machine::compute_wgmma(Warp& w, WgOp& g) {
  if (g.done) return;
  g.done = true;
  const Inst& in = *g.in;
  int N = in.b, K = in.c;
  T t = in.t, dt = (T)in.d;
  static thread_local double A[16][64], B[256][64];
  bool regs = in.o[1].k == VEC;
  size_t im = 4;
  double sa = 1, sb = 1;
  bool ta = false, tb = false;
  bool half = bits_of(t) == 16;
  if (dt != S32) {
    sa = (double)in.o[im].off;
    sb = (double)in.o[im + 1].off;
    im += 2;
    if (half) {
      if (!regs) ta = in.o[im++].off;
      tb = in.o[im].off;
    }
  }
  if ((sa != 1 && sa != -1) || (sb != 1 && sb != -1)) fault(w, in, "a wgmma with a factor other than 1 and -1");
  if (regs) {
    int es = t == TF32 ? 32 : bits_of(t), E = 32 / es;
    u64 keep = es == 32 ? 0xffffffff : (1ull << es) - 1;
    for (int i = 0; i < 4; i++) {
      const u64* v = &w.reg[(size_t)in.o[1].v[i].r * 32];
      for (int l = 0; l < 32; l++)
        for (int e = 0; e < E; e++)
          A[(l >> 2) + 8 * (i & 1)][E * (l & 3) + (i >> 1) * 4 * E + e] = element(v[l] >> (es * e) & keep, t);
    }
  } else
    fetch_operand(*this, w, in, g.clock, g.vc, g.pvc, g.a, t, ta, 16 * (w.id % 4), 16, K, A);
  fetch_operand(*this, w, in, g.clock, g.vc, g.pvc, g.b, in.t2, tb, 0, N, K, B);
  if (sa * sb < 0)
    for (int r = 0; r < 16; r++)
      for (int k = 0; k < K; k++) A[r][k] = -A[r][k];
  bool packed = dt == F16;
  int n = packed ? N / 4 : N / 2;
  for (int i = 0; i < n; i++) {
    u64* d = &w.reg[(size_t)part_of(in.o[0], i).r * 32];
    for (int l = 0; l < 32; l++) {
      int t4 = l & 3, row = l >> 2;
      if (packed) {
        u64 out = 0;
        for (int h = 0; h < 2; h++)
          out |= (u64)encode(dot(*this, t, A[row + 8 * (i & 1)], B[8 * (i >> 1) + 2 * t4 + h], K,
                                 g.scale_d ? decode(d[l] >> (16 * h) & 0xffff, F16) : 0),
                             F16)
                 << (16 * h);
        d[l] = out;
        continue;
      }
      int r = row + 8 * (i >> 1 & 1), c = 8 * (i >> 2) + 2 * t4 + (i & 1);
      if (dt == S32) {
        i64 s = g.scale_d ? (i32)d[l] : 0;
        for (int k = 0; k < K; k++) s += (i64)(A[r][k] * B[c][k]);
        d[l] = in.satfinite ? (u32)std::clamp<i64>(s, INT32_MIN, INT32_MAX) : (u32)s;
      } else
        d[l] = f32_bits(dot(*this, t, A[r], B[c], K, g.scale_d ? (double)as_f32(d[l]) : 0.0));
    }
  }
}

static void mark_flight(Warp& w) {
  std::fill(w.infl.begin(), w.infl.end(), 0);
  w.n_infl = 0;
  for (auto& g : w.wg) {
    for (auto& o : g.in->o[0].v) w.infl[o.r] |= 1, w.def[o.r] = 0;
    if (g.in->o[1].k == VEC)
      for (auto& o : g.in->o[1].v) w.infl[o.r] |= 2;
    w.n_infl++;
  }
}

HANDLER(wg_mma) {
  if (m != ~0u) x.fault(w, in, "wgmma needs all lanes");
  if (w.cta->warps.size() % 4) x.fault(w, in, "wgmma needs whole warp groups");
  WgOp g{&in, 0, 0, true, w.wg_group, ++w.wg_clock, false, w.vc, w.pvc};
  bool regs = in.o[1].k == VEC;
  if (!regs) g.a = x.uniform(w, in, in.o[1], m, "a matrix descriptor");
  g.b = x.uniform(w, in, in.o[2], m, "a matrix descriptor");
  g.scale_d = x.uniform(w, in, in.o[3], m, "scale-d") & 1;
  int n = in.d == F16 ? in.b / 4 : in.b / 2;
  if ((int)in.o[0].v.size() != n) x.fault(w, in, fmt("wgmma with %zu accumulators instead of %d", in.o[0].v.size(), n));
  for (auto& o : in.o[0].v) {
    if (!(w.infl[o.r] & 1)) {
      if (g.scale_d) x.rd(w, in, o, m);
      if (x.c.wgmma_registers && w.stamp[o.r] > w.fence_stamp)
        x.report("wgmma registers", w, in,
                 "the accumulator " + x.reg_name(o.r) + " was written since the last wgmma.fence", 0);
    }
    if (w.infl[o.r] & 2) x.fault(w, in, "an accumulator that a wgmma in flight reads as A");
  }
  if (regs)
    for (auto& o : in.o[1].v) {
      if (w.infl[o.r] & 1) x.fault(w, in, "A is an accumulator in flight");
      x.rd(w, in, o, m);
      if (x.c.wgmma_registers && w.stamp[o.r] > w.fence_stamp)
        x.report("wgmma registers", w, in,
                 "the register " + x.reg_name(o.r) + " of A was written since the last wgmma.fence", 0);
    }
  if (!w.fence_stamp) x.report("wgmma", w, in, "wgmma without wgmma.fence before", 0);
  bool late = x.c.timing_random && x.rng() & 1;
  for (auto& o : w.wg) late |= !o.done;
  w.wg.push_back(g);
  if (!late) x.compute_wgmma(w, w.wg.back());
  mark_flight(w);
  w.wg_count++;
  x.stats.units[in.uid] += 2ull * 16 * in.b * in.c;
}

HANDLER(wg_fence) { w.fence_stamp = w.ic; }

HANDLER(wg_commit) { w.wg_group++; }

void Machine::finish_wgmma(Warp& w, u32 keep) {
  while (!w.wg.empty() && w.wg.front().group + keep + 1 <= w.wg_group) {
    compute_wgmma(w, w.wg.front());
    w.vc[agent(2, w)] = w.wg.front().clock;
    for (auto& o : w.wg.front().in->o[0].v) w.def[o.r] = ~0u, w.stamp[o.r] = w.ic;
    w.wg.pop_front();
  }
  mark_flight(w);
}

HANDLER(wg_wait) { x.finish_wgmma(w, (u32)in.o[0].off); }

}  // namespace ptxrun
