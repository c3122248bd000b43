// ldmatrix, stmatrix and mma.sync.
#pragma once

#include "warps.h"

namespace ptxrun {

HANDLER(ld_matrix) {  // in.a: matrices; in.b: transposed
  u64 a[32];
  x.address(w, in, in.o[1], m, a);
  if (m != ~0u) x.fault(w, in, "ldmatrix needs all lanes");
  const Op& d = in.o[0];
  u16 e[4][8][8];
  u64 waves = 0;
  for (int i = 0; i < in.a; i++) {
    u32 rows[32] = {};
    for (int r = 0; r < 8; r++) {
      int l = 8 * i + r;
      auto q = x.place(w, in, l, in.space, a[l], 16, false);
      if (q.space != SHARED) x.fault(w, in, "ldmatrix outside of shared memory", l);
      rows[r] = q.off;
      x.shared_read(w, in, q.cta, q.off, 16, l);
      memcpy(e[i][r], q.p, 16);
    }
    waves += wavefronts(0xff, rows, 16);
  }
  x.count(in, waves, in.a, in.a * 128);
  for (int i = 0; i < in.a; i++) {
    u64* t = x.wr(w, in, d.k == VEC ? d.v[i] : d, m);
    for (int l = 0; l < 32; l++)
      t[l] = in.b ? e[i][2 * (l & 3)][l >> 2] | (u32)e[i][2 * (l & 3) + 1][l >> 2] << 16
                  : e[i][l >> 2][2 * (l & 3)] | (u32)e[i][l >> 2][2 * (l & 3) + 1] << 16;
  }
}

HANDLER(st_matrix) {
  u64 a[32];
  x.address(w, in, in.o[0], m, a);
  if (m != ~0u) x.fault(w, in, "stmatrix needs all lanes");
  const Op& s = in.o[1];
  u16 e[4][8][8];
  u64 waves = 0;
  for (int i = 0; i < in.a; i++) {
    const u64* t = x.rd(w, in, s.k == VEC ? s.v[i] : s, m);
    for (int l = 0; l < 32; l++)
      for (int h = 0; h < 2; h++) {
        u16 v = t[l] >> (16 * h);
        if (in.b)
          e[i][2 * (l & 3) + h][l >> 2] = v;
        else
          e[i][l >> 2][2 * (l & 3) + h] = v;
      }
  }
  for (int i = 0; i < in.a; i++) {
    u32 rows[32] = {};
    for (int r = 0; r < 8; r++) {
      int l = 8 * i + r;
      auto q = x.place(w, in, l, in.space, a[l], 16, true);
      if (q.space != SHARED) x.fault(w, in, "stmatrix outside of shared memory", l);
      rows[r] = q.off;
      x.shared_write(w, in, q.cta, q.off, 16, l, (const u8*)e[i][r]);
      memcpy(q.p, e[i][r], 16);
    }
    waves += wavefronts(0xff, rows, 16);
  }
  x.count(in, waves, in.a, in.a * 128);
}

// Sum of products and an addend. Mode 0: in double, then rounded to float32. Mode 1: as publications say Hopper does
// it: addends are cut to 25 bits below the largest exponent (13 for 8-bit floats), the sum is cut to float32.
static float dot(Machine& x, T t, const double* a, const double* b, int k, double c) {
  if (!x.c.mma) {
    double s = c;
    for (int i = 0; i < k; i++) s += a[i] * b[i];
    return (float)s;
  }
  double p[65];
  int top = -1000;
  bool finite = true;
  for (int i = 0; i <= k; i++) {
    p[i] = i < k ? a[i] * b[i] : c;
    finite &= std::isfinite(p[i]);
    if (p[i] != 0 && finite) top = std::max(top, std::ilogb(p[i]));
  }
  if (!finite) {
    double s = c;
    for (int i = 0; i < k; i++) s += p[i];
    return (float)s;
  }
  if (top == -1000) return 0;
  int shift = (t == E4M3 || t == E5M2 ? 13 : 25) - top;
  i64 s = 0;
  for (int i = 0; i <= k; i++) s += (i64)std::ldexp(p[i], shift);
  return as_f32(encode_small(std::ldexp((double)s, -shift), 8, 23, RZ, false));
}

static double element(u64 v, T t) {
  switch (t) {
    case S8: return (i8)v;
    case U8: return (u8)v;
    case TF32: return as_f32((u32)v & 0xffffe000u);
    case F64: return as_f64(v);
    default: return decode(v & (bits_of(t) == 8 ? 0xff : 0xffff), t);
  }
}

HANDLER(mma_sync) {  // in.t A's type, in.t2 B's; in.a m, in.b n, in.c k; in.d D's type
  if (m != ~0u) x.fault(w, in, "mma.sync needs all lanes");
  int M = in.a, N = in.b, K = in.c, es = in.t == TF32 ? 32 : bits_of(in.t), E = es == 64 ? 1 : 32 / es;
  T dt = (T)in.d;
  static thread_local double A[16][64], B[16][64];
  auto part = [&](const Op& o, int i) { return x.rd(w, in, o.k == VEC ? o.v[i] : o, m); };
  auto size = [](const Op& o) { return o.k == VEC ? (int)o.v.size() : 1; };
  u64 keep = es == 64 ? ~0ull : es == 32 ? 0xffffffff : (1ull << es) - 1;
  for (int i = 0; i < size(in.o[1]); i++) {
    const u64* v = part(in.o[1], i);
    for (int l = 0; l < 32; l++)
      for (int e = 0; e < E; e++)
        A[(l >> 2) + (M == 16 ? 8 * (i & 1) : 0)][E * (l & 3) + (M == 16 ? i >> 1 : i) * 4 * E + e] =
            element(v[l] >> (es * e) & keep, in.t);
  }
  for (int i = 0; i < size(in.o[2]); i++) {
    const u64* v = part(in.o[2], i);
    for (int l = 0; l < 32; l++)
      for (int e = 0; e < E; e++) B[l >> 2][E * (l & 3) + i * 4 * E + e] = element(v[l] >> (es * e) & keep, in.t2);
  }
  bool packed = dt == F16;
  int n = size(in.o[3]);
  vector<std::array<u64, 32>> r(n);
  for (int i = 0; i < n; i++) {
    const u64* v = part(in.o[3], i);
    for (int l = 0; l < 32; l++) {
      auto one = [&](int row, int col, double c) -> double {
        if (dt == S32) {
          i64 s = (i64)c;
          for (int k = 0; k < K; k++) s += (i64)(A[row][k] * B[col][k]);
          return (double)s;
        }
        if (dt == F64) {
          double s = c;
          for (int k = 0; k < K; k++) s = std::fma(A[row][k], B[col][k], s);
          return s;
        }
        return dot(x, in.t, A[row], B[col], K, c);
      };
      int row = l >> 2;
      if (packed) {
        u64 out = 0;
        for (int h = 0; h < 2; h++)
          out |= (u64)encode(one(row + 8 * i, 2 * (l & 3) + h, decode(v[l] >> (16 * h) & 0xffff, F16)), F16)
                 << (16 * h);
        r[i][l] = out;
      } else {
        double c = dt == S32 ? (double)(i32)v[l] : dt == F64 ? as_f64(v[l]) : as_f32(v[l]);
        double y = one(row + 8 * (i >> 1), 2 * (l & 3) + (i & 1), c);
        r[i][l] = dt == S32 ? (u32)(i64)y : dt == F64 ? f64_bits(y) : f32_bits((float)y);
      }
    }
  }
  for (int i = 0; i < n; i++) {
    u64* d = x.wr(w, in, in.o[0].k == VEC ? in.o[0].v[i] : in.o[0], m);
    memcpy(d, r[i].data(), 256);
  }
  x.stats.units[in.uid] += 2ull * M * N * K;
}

}  // namespace ptxrun
