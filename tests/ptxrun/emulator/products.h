// mma.sync, and wgmma: descriptors, swizzles, products that are done at the issue or at the wait.
#pragma once

#include "warps.h"

namespace ptxrun {

// Sum of products and an addend by option mma 1, as publications say Hopper does it: addends are cut to 25 bits below
// the largest exponent, the sum is cut to float32.
static float dot(const double* a, const double* b, int k, double c) {
  double p[17], sum = c;
  for (int i = 0; i < k; i++) p[i] = a[i] * b[i];
  p[k] = c;
  i64 top = 0, s = 0;  // the largest exponent as doubles have it, 0 of zeros only; none is subnormal
  for (int i = 0; i <= k; i++) top = std::max(top, (i64)(std::bit_cast<u64>(p[i]) >> 52 & 0x7ff));
  for (int i = 0; i < k && top == 0x7ff; i++) sum += p[i];
  if (!top || top == 0x7ff) return top ? (float)sum : 0;
  double scale = std::bit_cast<double>((u64)(1023 + 25 + 1023 - top) << 52);
  for (int i = 0; i <= k; i++) s += (i64)(p[i] * scale);
  return as_f32(encode_small(std::ldexp((double)s, (int)top - 1023 - 25), 8, 23, RZ));
}

static const Op& part_of(const Op& o, int i) { return o.k == VEC ? o.v[i] : o; }

// Operands of a product as its lanes take them. Lane l of a register of D has row l / 4, of the upper 8 if the
// register's bit 1 is set, and column 2 * (l % 4) + bit 0 of 8 columns for each four registers.
alignas(64) static double A[2][16][32];  // by half of the rows, k, lane
alignas(64) static double B[64][16][8];  // by eight columns, bit 0; k; lane, twice
typedef double Octet __attribute__((vector_size(64), may_alias));

constexpr auto put_a = [](int row, int k, double v) {
  for (int l = 0; l < 4; l++) A[row >> 3][k][4 * (row & 7) + l] = v;
};

constexpr auto put_b = [](int column, int k, double v) {
  for (int l : {0, 4}) B[column >> 3 << 1 | (column & 1)][k][(column >> 1 & 3) + l] = v;
};

// Rows that a warp has in its register i of four, of pairs unless they are of tf32. B has two, as 0 and 2.
template <class F>
static void rows_of(const u64* v, int i, T t, F put) {
  for (int l = 0; l < 32; l++)
    if (t == TF32)
      put((l >> 2) + 8 * (i & 1), (l & 3) + 4 * (i >> 1), decode(v[l], t));
    else
      for (int h = 0; h < 2; h++)
        put((l >> 2) + 8 * (i & 1), 2 * (l & 3) + (i >> 1) * 8 + h, decode(v[l] >> (16 * h), t));
}

// Of D's registers i and i + 2, where bit 1 of i is 0; from `c` (null: zeros) to `d`. Option mma 0: sums in double,
// then rounded to float32.
static void product(Machine& x, int depth, int i, const u64* const* c, u64* const* d) {
  alignas(64) double s[2][32];
  auto& b = B[i >> 2 << 1 | (i & 1)];
  for (int h = 0; h < 2; h++)
    for (int l = 0; l < 32; l++) s[h][l] = c ? as_f32(c[h][l]) : 0.0;
  for (int l = 0; l < 64 && x.c.mma; l++) {
    double p[16], q[16];
    for (int k = 0; k < depth; k++) p[k] = A[l >> 5][k][l & 31], q[k] = b[k][l & 3];
    s[l >> 5][l & 31] = dot(p, q, depth, s[l >> 5][l & 31]);
  }
  if (!x.c.mma) {
    Octet sum[8];
    memcpy(sum, s, sizeof s);
    for (int k = 0; k < depth; k++)
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) sum[j] += *(Octet*)&A[j >> 2][k][8 * (j & 3)] * *(Octet*)b[k];
    memcpy(s, sum, sizeof s);
  }
  for (int h = 0; h < 2; h++)
    for (int l = 0; l < 32; l++) d[h][l] = f32_bits((float)s[h][l]);
}

HANDLER(mma_sync) {  // m16n8k16, in.t the operands' type, float32 results
  if (m != ~0u) x.fault(w, in, "mma.sync needs all lanes");
  for (int i = 0; i < 4; i++) rows_of(x.rd(w, in, in.o[1].v[i], m), i, in.t, put_a);
  for (int i = 0; i < 2; i++) rows_of(x.rd(w, in, in.o[2].v[i], m), 2 * i, in.t, put_b);
  u64 r[4][32];
  const u64* c[4];
  for (int i = 0; i < 4; i++) c[i] = x.rd(w, in, in.o[3].v[i], m);
  for (int i = 0; i < 2; i++) {
    const u64* from[] = {c[i], c[i + 2]};
    u64* to[] = {r[i], r[i + 2]};
    product(x, in.t == TF32 ? 8 : 16, i, from, to);
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

// Rows [first, first + count) of an operand: put(row, k, value).
template <class F>
static void fetch_operand(Machine& x, Warp& w, const WgOp& g, u64 raw, bool mn_major, int first, int count, F put) {
  const Inst& in = *g.in;
  Descriptor d = descriptor(raw);
  static const u32 pitches[] = {16, 128, 64, 32};
  u32 pitch = pitches[d.swizzle];
  if (d.base && d.swizzle > 1)
    x.fault(w, in,
            "a descriptor with a base offset and a swizzle of 32 or 64 bytes");  // without swizzle it has no meaning
  auto granule = [&](u32 a, auto put) {
    u32 off = x.shared(w, in, swizzled(a, d) & 0x3ffff, 16, -1, "wgmma operand");
    x.async_read(w, in, off, g.clock, g.vc, g.pvc);
    by_float(in.t, [&](auto t) {
      std::conditional_t<t == TF32, u32, u16> v[16 / (t == TF32 ? 4 : 2)];
      memcpy(v, &x.cta.smem[off], 16);
      for (u32 e = 0; e < sizeof v / sizeof *v; e++) put(e, decode(v[e], t));
    });
  };
  if (!mn_major) {
    for (int r = 0; r < count; r++)
      for (int j = 0; j < 2; j++) {
        int i = first + r;
        granule(d.start + (i % 8) * pitch + (i / 8) * d.stride + (d.swizzle ? j * 16 : j * d.lead),
                [&](int e, double v) { put(r, j * (in.t == TF32 ? 4 : 8) + e, v); });
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
                [&](int e, double v) { put(r + e, k, v); });
      }
  }
}

void Machine::compute_wgmma(Warp& w, WgOp& g) {
  if (g.done) return;
  g.done = true;
  const Inst& in = *g.in;
  bool regs = in.o[1].k == VEC, tf = in.t == TF32;
  bool ta = !tf && !regs && in.o[6].off, tb = !tf && in.o[regs ? 6 : 7].off;
  if (in.o[4].off != 1 || in.o[5].off != 1) fault(w, in, "a wgmma with a factor other than 1");
  if (regs)
    for (int i = 0; i < 4; i++) rows_of(&w.reg[(size_t)in.o[1].v[i].r * 32], i, in.t, put_a);
  else
    fetch_operand(*this, w, g, g.a, ta, 16 * (w.id % 4), 16, put_a);
  fetch_operand(*this, w, g, g.b, tb, 0, in.a, put_b);
  for (int i = 0; i < in.a / 2; i += i & 1 ? 3 : 1) {
    u64* d[] = {&w.reg[(size_t)part_of(in.o[0], i).r * 32], &w.reg[(size_t)part_of(in.o[0], i + 2).r * 32]};
    product(*this, tf ? 8 : 16, i, g.scale_d ? d : nullptr, d);
  }
}

// Marks the registers of a wgmma in flight, or that it no longer is.
static void mark_flight(Warp& w, const WgOp& g, bool on) {
  for (auto& o : g.in->o[0].v) w.infl[o.r] = on, w.def[o.r] = on ? 0 : ~0u;
  if (g.in->o[1].k == VEC)
    for (auto& o : g.in->o[1].v) w.infl[o.r] = on ? w.infl[o.r] | 2 : 0;
  w.n_infl = (int)w.wg.size();
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
  w.wg.push_back(std::move(g));
  if (!late) x.compute_wgmma(w, w.wg.back());
  mark_flight(w, w.wg.back(), true);
  x.stats.units[in.uid] += 2ull * 16 * in.a * 16;
}

HANDLER(wg_fence) { w.fenced = true; }

HANDLER(wg_commit) { w.wg_group++; }

HANDLER(wg_wait) {
  while (!w.wg.empty() && w.wg.front().group + in.o[0].off + 1 <= w.wg_group) {
    x.compute_wgmma(w, w.wg.front());
    w.vc[x.agent(WGMMA, w)] = w.wg.front().clock;
    mark_flight(w, w.wg.front(), false);
    w.wg.pop_front();
  }
  w.n_infl = (int)w.wg.size();
  for (auto& g : w.wg) mark_flight(w, g, true);
}

}  // namespace ptxrun
