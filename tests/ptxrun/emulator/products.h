// mma.sync, and wgmma: descriptors, swizzles, products that are done at the issue or at the wait.
#pragma once

#include "warps.h"

namespace ptxrun {

// Sum of products and an addend. Option mma 0: in double, then rounded to float32. 1: as publications say Hopper does
// it: addends are cut to 25 bits below the largest exponent, the sum is cut to float32.
static float dot(Machine& x, const double* a, const double* b, int k, double c) {
  double p[65], sum = c;
  int top = -1000;
  for (int i = 0; i < k; i++) sum += p[i] = a[i] * b[i];
  if (!x.c.mma || !std::isfinite(sum)) return (float)sum;
  p[k] = c;
  for (int i = 0; i <= k; i++)
    if (p[i] != 0) top = std::max(top, std::ilogb(p[i]));
  if (top == -1000) return 0;
  i64 s = 0;
  for (int i = 0; i <= k; i++) s += (i64)std::ldexp(p[i], 25 - top);
  return as_f32(encode_small(std::ldexp((double)s, top - 25), 8, 23, RZ));
}

static const Op& part_of(const Op& o, int i) { return o.k == VEC ? o.v[i] : o; }

// The 16 rows of A that a warp has in four registers of pairs.
static void pairs_of_a(const u64* v, int i, T t, double (*out)[64]) {
  for (int l = 0; l < 32; l++)
    for (int h = 0; h < 2; h++)
      out[(l >> 2) + 8 * (i & 1)][2 * (l & 3) + (i >> 1) * 8 + h] = decode(v[l] >> (16 * h) & 0xffff, t);
}

static void single_of_a(const u64* v, int i, double (*out)[64]) {
  for (int l = 0; l < 32; l++) out[(l >> 2) + 8 * (i & 1)][(l & 3) + 4 * (i >> 1)] = decode(v[l], TF32);
}

HANDLER(mma_sync) {  // m16n8k16, in.t the operands' type, float32 results
  if (m != ~0u) x.fault(w, in, "mma.sync needs all lanes");
  static double A[16][64], B[8][64];
  int depth = in.t == TF32 ? 8 : 16;
  if (in.t == TF32) {
    for (int i = 0; i < 4; i++) single_of_a(x.rd(w, in, in.o[1].v[i], m), i, A);
    for (int i = 0; i < 2; i++) {
      const u64* v = x.rd(w, in, in.o[2].v[i], m);
      for (int l = 0; l < 32; l++) B[l >> 2][(l & 3) + 4 * i] = decode(v[l], TF32);
    }
  } else {
  for (int i = 0; i < 4; i++) pairs_of_a(x.rd(w, in, in.o[1].v[i], m), i, in.t, A);
  for (int i = 0; i < 2; i++) {
    const u64* v = x.rd(w, in, in.o[2].v[i], m);
    for (int l = 0; l < 32; l++)
      for (int h = 0; h < 2; h++) B[l >> 2][2 * (l & 3) + i * 8 + h] = decode(v[l] >> (16 * h) & 0xffff, in.t);
  }
  }
  u64 r[4][32];
  for (int i = 0; i < 4; i++) {
    const u64* v = x.rd(w, in, in.o[3].v[i], m);
    for (int l = 0; l < 32; l++)
      r[i][l] = f32_bits(dot(x, A[(l >> 2) + 8 * (i >> 1)], B[2 * (l & 3) + (i & 1)], depth, as_f32(v[l])));
  }
  for (int i = 0; i < 4; i++) memcpy(x.wr(w, in, in.o[0].v[i], m), r[i], sizeof r[i]);
  x.stats.units[in.uid] += 2 * 16 * 8 * 16;
}

// ---------------------------------------------------------------------------------------------------- wgmma
// Below, `in` is a wgmma of k16: in.t is the operands' type, in.a is N; operands: D, A, B, scale-d, ...

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
static void fetch_operand(Machine& x, Warp& w, const WgOp& g, u64 raw, bool mn_major, int first, int count,
                          double (*out)[64]) {
  const Inst& in = *g.in;
  Descriptor d = descriptor(raw);
  static const u32 pitches[] = {16, 128, 64, 32};
  u32 pitch = pitches[d.swizzle];
  if (d.base && d.swizzle > 1)
    x.fault(w, in,
            "a descriptor with a base offset and a swizzle of 32 or 64 bytes");  // without swizzle it has no meaning
  auto granule = [&](u32 a, auto put) {
    u32 off = x.shared(w, in, swizzled(a, d) & 0x3ffff, 16, -1, "wgmma operand");
    x.async_read(w, in, off, 16, g.clock, g.vc, g.pvc);
    if (in.t == TF32) {
      for (int e = 0; e < 4; e++) {
        u32 v;
        memcpy(&v, &x.cta.smem[off + 4 * e], 4);
        put(e, decode(v, TF32));
      }
      return;
    }
    for (int e = 0; e < 8; e++) {
      u16 v;
      memcpy(&v, &x.cta.smem[off + 2 * e], 2);
      put(e, decode(v, in.t));
    }
  };
  if (!mn_major) {
    for (int r = 0; r < count; r++)
      for (int j = 0; j < 2; j++) {
        int i = first + r;
        granule(d.start + (i % 8) * pitch + (i / 8) * d.stride + (d.swizzle ? j * 16 : j * d.lead),
                [&](int e, double v) { out[r][j * (in.t == TF32 ? 4 : 8) + e] = v; });
      }
  } else {
    if (in.t == TF32) x.fault(w, in, "a transposed operand of tf32");
    int chunks = pitch / 16;
    for (int r = 0; r < count; r += 8)
      for (int k = 0; k < 16; k++) {
        int c = (first + r) / 8;
        granule(d.start + (k % 8) * pitch +
                    (d.swizzle ? (c % chunks) * 16 + (c / chunks) * d.lead + (k / 8) * d.stride
                               : c * d.stride + (k / 8) * d.lead),
                [&](int e, double v) { out[r + e][k] = v; });
      }
  }
}

void Machine::compute_wgmma(Warp& w, WgOp& g) {
  if (g.done) return;
  g.done = true;
  const Inst& in = *g.in;
  static double A[16][64], B[256][64];
  bool regs = in.o[1].k == VEC, tf = in.t == TF32;
  bool ta = !tf && !regs && in.o[6].off, tb = !tf && in.o[regs ? 6 : 7].off;
  if (in.o[4].off != 1 || in.o[5].off != 1) fault(w, in, "a wgmma with a factor other than 1");
  if (regs)
    for (int i = 0; i < 4; i++) {
      const u64* v = &w.reg[(size_t)in.o[1].v[i].r * 32];
      tf ? single_of_a(v, i, A) : pairs_of_a(v, i, in.t, A);
    }
  else
    fetch_operand(*this, w, g, g.a, ta, 16 * (w.id % 4), 16, A);
  fetch_operand(*this, w, g, g.b, tb, 0, in.a, B);
  for (int i = 0; i < in.a / 2; i++) {
    u64* d = &w.reg[(size_t)part_of(in.o[0], i).r * 32];
    for (int l = 0; l < 32; l++) {
      int r = (l >> 2) + 8 * (i >> 1 & 1), c = 8 * (i >> 2) + 2 * (l & 3) + (i & 1);
      d[l] = f32_bits(dot(*this, A[r], B[c], tf ? 8 : 16, g.scale_d ? (double)as_f32(d[l]) : 0.0));
    }
  }
}

static void mark_flight(Warp& w) {
  std::fill(w.infl.begin(), w.infl.end(), 0);
  w.n_infl = (int)w.wg.size();
  for (auto& g : w.wg) {
    for (auto& o : g.in->o[0].v) w.infl[o.r] |= 1, w.def[o.r] = 0;
    if (g.in->o[1].k == VEC)
      for (auto& o : g.in->o[1].v) w.infl[o.r] |= 2;
  }
}

HANDLER(wg_mma) {
  if (m != ~0u) x.fault(w, in, "wgmma needs all lanes");
  if (x.warps % 4) x.fault(w, in, "wgmma needs whole warp groups");
  WgOp g{&in, 0, 0, true, w.wg_group, ++w.wg_clock, false, w.vc, w.pvc};
  bool regs = in.o[1].k == VEC;
  if (!regs) g.a = x.uniform(w, in, in.o[1], m, "a matrix descriptor");
  g.b = x.uniform(w, in, in.o[2], m, "a matrix descriptor");
  g.scale_d = x.uniform(w, in, in.o[3], m, "scale-d") & 1;
  if ((int)in.o[0].v.size() != in.a / 2)
    x.fault(w, in, fmt("wgmma with %zu accumulators instead of %d", in.o[0].v.size(), in.a / 2));
  for (auto& o : in.o[0].v) {
    if (!(w.infl[o.r] & 1) && g.scale_d) x.rd(w, in, o, m);
    if (w.infl[o.r] & 2) x.fault(w, in, "an accumulator that a wgmma in flight reads as A");
  }
  if (regs)
    for (auto& o : in.o[1].v) {
      if (w.infl[o.r] & 1) x.fault(w, in, "A is an accumulator in flight");
      x.rd(w, in, o, m);
    }
  if (!w.fenced) x.report("wgmma", w, in, "wgmma without wgmma.fence before", 0);
  bool late = x.c.timing && x.rng() & 1;
  for (auto& o : w.wg) late |= !o.done;
  w.wg.push_back(g);
  if (!late) x.compute_wgmma(w, w.wg.back());
  mark_flight(w);
  x.stats.units[in.uid] += 2ull * 16 * in.a * 16;
}

HANDLER(wg_fence) { w.fenced = true; }

HANDLER(wg_commit) { w.wg_group++; }

HANDLER(wg_wait) {
  while (!w.wg.empty() && w.wg.front().group + in.o[0].off + 1 <= w.wg_group) {
    x.compute_wgmma(w, w.wg.front());
    w.vc[x.agent(WGMMA, w)] = w.wg.front().clock;
    for (auto& o : w.wg.front().in->o[0].v) w.def[o.r] = ~0u;
    w.wg.pop_front();
  }
  mark_flight(w);
}

}  // namespace ptxrun
