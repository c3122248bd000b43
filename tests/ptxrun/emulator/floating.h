// Floating-point arithmetic, comparisons, selections, moves and conversions.
#pragma once

#include <limits>

#include "integer.h"

namespace ptxrun {

enum FOp : u8 { FADD, FSUB, FMUL, FFMA, FMIN, FMAX, FDIV, FRCP, FEX2, FLG2, FSQRT, FRSQRT };

// The larger number, or the less. in.c: 1 NaN if either is (.NaN), 4 of magnitudes, with the sign of the product
// (.xorsign.abs).
static float extreme(const Inst& in, float a, float b, bool least) {
  if (in.c & 4) {
    float r = least ? std::fmin(std::fabs(a), std::fabs(b)) : std::fmax(std::fabs(a), std::fabs(b));
    return std::signbit(a) != std::signbit(b) ? -r : r;
  }
  if (in.c & 1 && (a != a || b != b)) return NAN;
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return std::signbit(a) == least ? a : b;
  return (a < b) == least ? a : b;
}

// 16-bit operands are doubles in between: sums and products are exact or rounded to odd, so that encoding rounds them
// once.
HANDLER(half_arith) {
  int n = in.a == FFMA ? 3 : 2;
  bool two = in.t == F16X2 || in.t == BF16X2;
  const u64* s[3];
  for (int i = 0; i < n; i++) s[i] = x.rd(w, in, 1 + i, m);
  u64* d = x.wr(w, in, 0, m);
  lanes(m, [&](int l) {
    u32 out = 0;
    for (int h = 0; h <= 16 * two; h += 16) {
      double v[3] = {0, 0, 0};
      for (int i = 0; i < n; i++) v[i] = decode(s[i][l] >> h & 0xffff, in.t);
      double y = in.a == FADD   ? add_odd(v[0], v[1])
                 : in.a == FSUB ? add_odd(v[0], -v[1])
                 : in.a == FMUL ? v[0] * v[1]
                                : add_odd(v[0] * v[1], v[2]);
      out |= encode(y, in.t) << h;
    }
    d[l] = out;
  });
}

static float ulps(Machine& x, float v) {  // approximate functions: moved by up to one unit in the last place
  if (!x.c.approx || !std::isfinite(v) || v == 0) return v;
  int k = (int)((std::bit_cast<u32>(v) * 0x9E3779B1u ^ (u32)x.c.seed * 0x85EBCA6Bu) >> 16) % 3 - 1;
  return k ? std::nextafter(v, k * INFINITY) : v;
}

HANDLER(f32_arith) {  // in.b: approximate; in.c: as `extreme`, 2 rounded down
  int n = in.a == FFMA ? 3 : in.a >= FRCP ? 1 : 2;
  const u64* s[3];
  for (int i = 0; i < n; i++) s[i] = x.rd(w, in, 1 + i, m);
  u64* d = x.wr(w, in, 0, m);
  lanes(m, [&](int l) {
    float v[3] = {0, 0, 0}, r;
    for (int i = 0; i < n; i++) {
      v[i] = as_f32(s[i][l]);
      if (in.ftz) v[i] = flush(v[i]);
    }
    switch (in.a) {
      case FADD: r = v[0] + v[1]; break;
      case FSUB: r = v[0] - v[1]; break;
      case FMUL: r = v[0] * v[1]; break;
      case FFMA: {
        r = std::fma(v[0], v[1], v[2]);
        if (in.c & 2 && r > add_odd((double)v[0] * v[1], v[2])) r = std::nextafter(r, -INFINITY);
        break;
      }
      case FMIN: r = extreme(in, v[0], v[1], true); break;
      case FMAX: r = extreme(in, v[0], v[1], false); break;
      case FDIV: r = v[0] / v[1]; break;
      case FRCP: r = 1.f / v[0]; break;
      case FLG2: r = (float)std::log2((double)v[0]); break;
      case FSQRT: r = std::sqrt(v[0]); break;
      case FRSQRT: r = (float)(1.0 / std::sqrt((double)v[0])); break;
      default: r = (float)std::exp2((double)v[0]);
    }
    if (in.b) r = ulps(x, r);
    d[l] = f32_bits(in.ftz ? flush(r) : r);
  });
}

HANDLER(half_sign) {  // in.a: 0 abs, 1 neg
  const u64* a = x.rd(w, in, 1, m);
  u64* d = x.wr(w, in, 0, m);
  u64 bits = in.t == F16X2 || in.t == BF16X2 ? 0x80008000u : 0x8000u;
  lanes(m, [&](int l) { d[l] = in.a ? a[l] ^ bits : a[l] & ~bits; });
}

HANDLER(f32_sign) {  // in.a: 0 abs, 1 neg
  const u64* a = x.rd(w, in, 1, m);
  u64* d = x.wr(w, in, 0, m);
  lanes(m, [&](int l) {
    u32 r = in.a ? (u32)a[l] ^ 0x80000000u : (u32)a[l] & 0x7fffffffu;
    d[l] = in.ftz ? std::bit_cast<u32>(flush(as_f32(r))) : r;
  });
}

// ------------------------------------------------------------------------------- comparisons and selections
enum Cmp : u8 { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NANC };

static bool compare_float(float a, float b, int c) {
  bool un = a != a || b != b;
  switch (c) {
    case EQ: return a == b;
    case NE: return !un && a != b;
    case LT: return a < b;
    case LE: return a <= b;
    case GT: return a > b;
    case GE: return a >= b;
    case EQU: return un || a == b;
    case NEU: return un || a != b;
    case LTU: return un || a < b;
    case LEU: return un || a <= b;
    case GTU: return un || a > b;
    case GEU: return un || a >= b;
    case NUM: return !un;
    default: return un;
  }
}

HANDLER(c_setp) {  // in.a: the comparison
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m);
  u64* d = x.wr(w, in, 0, m);
  if (in.t == F32) {
    lanes(m, [&](int l) {
      float p = as_f32(a[l]), q = as_f32(b[l]);
      d[l] = in.ftz ? compare_float(flush(p), flush(q), in.a) : compare_float(p, q, in.a);
    });
    return;
  }
  by_int(in.t, [&](auto z) {
    using Ty = decltype(z);
    lanes(m, [&](int l) {
      Ty p = (Ty)a[l], q = (Ty)b[l];
      d[l] = in.a == EQ   ? p == q
             : in.a == NE ? p != q
             : in.a == LT ? p < q
             : in.a == LE ? p <= q
             : in.a == GT ? p > q
                          : p >= q;
    });
  });
}

HANDLER(c_selp) {
  const u64* p = x.rd(w, in, 3, m);
  u32 k = 0;
  lanes(m, [&](int l) { k |= (u32)(p[l] & 1) << l; });
  const u64 *a = x.rd(w, in, 1, m & k), *b = x.rd(w, in, 2, m & ~k);
  u64* d = x.wr(w, in, 0, m);
  u64 keep = ~0ull >> (64 - bits_of(in.t));
  lanes(m, [&](int l) { d[l] = (k >> l & 1 ? a[l] : b[l]) & keep; });
}

HANDLER(m_mov) {  // cvta too: addresses of shared memory are the same in both spaces here
  const Op &d = in.o[0], &s = in.o[1];
  if (d.k == VEC) {  // unpack
    const u64* a = x.rd(w, in, s, m);
    int n = (int)d.v.size(), each = bits_of(in.t) / n;
    u64 keep = (1ull << each) - 1;
    u64 copy[32];
    memcpy(copy, a, sizeof copy);
    for (int i = 0; i < n; i++) {
      u64* e = x.wr(w, in, d.v[i], m);
      lanes(m, [&](int l) { e[l] = copy[l] >> (each * i) & keep; });
    }
  } else if (s.k == VEC) {
    int n = (int)s.v.size(), each = bits_of(in.t) / n;
    u64 keep = (1ull << each) - 1, r[32] = {};
    for (int i = 0; i < n; i++) {
      const u64* a = x.rd(w, in, s.v[i], m);
      lanes(m, [&](int l) { r[l] |= (a[l] & keep) << (each * i); });
    }
    u64* e = x.wr(w, in, d, m);
    lanes(m, [&](int l) { e[l] = r[l]; });
  } else if (s.k == REG && (m & ~w.def[s.r]) && !w.infl[s.r] && !s.neg) {
    // Copies of what was never written stay unwritten.
    u32 known = m & w.def[s.r];
    u64* e = x.wr(w, in, d, known);
    if (d.k == REG) w.def[d.r] &= ~(m & ~known);
    const u64* b = &w.reg[(size_t)s.r * 32];
    lanes(m, [&](int l) { e[l] = b[l]; });
  } else {
    const u64* a = x.rd(w, in, s, m);
    u64* e = x.wr(w, in, d, m);
    u64 keep = ~0ull >> (64 - bits_of(in.t));
    lanes(m, [&](int l) { e[l] = a[l] & keep; });
  }
}

// ---------------------------------------------------------------------------------------------- conversions
static double whole(double v, int mode) {  // 1 up, 2 down, 3 towards zero, 4 nearest even
  return mode == 1 ? std::ceil(v) : mode == 2 ? std::floor(v) : mode == 3 ? std::trunc(v) : mode == 4 ? std::nearbyint(v) : v;
}

HANDLER(v_cvt) {  // in.t destination, in.t2 source, in.b: saturated, in.c: as `whole`
  T dt = in.t, st = in.t2;
  const u64* a = x.rd(w, in, 1, m);
  u64 r[32];
  if (dt == F16X2 || dt == BF16X2 || dt == E4M3X2) {
    // Of two float32, a in the upper half, or of two e4m3.
    const u64* b = st == F32 ? x.rd(w, in, 2, m) : nullptr;
    int bits = bits_of(dt) / 2;
    lanes(m, [&](int l) {
      u64 low = b ? b[l] : a[l] & 0xff, high = b ? a[l] : a[l] >> 8;
      r[l] = encode(decode(low, st), dt) | encode(decode(high, st), dt) << bits;
    });
  } else if (is_float(st) && !is_float(dt))
    by_int(dt, [&](auto y) {
      using D = decltype(y);
      lanes(m, [&](int l) {
        double v = whole(in.ftz ? flush(as_f32(a[l])) : decode(a[l], st), in.c);
        double low = (double)std::numeric_limits<D>::lowest(), high = (double)std::numeric_limits<D>::max();
        D i = v != v      ? (D)(sizeof(D) == 8 ? 1ull << 63 : 0)
              : v <= low  ? std::numeric_limits<D>::lowest()
              : v >= high ? std::numeric_limits<D>::max()
                          : (D)v;
        r[l] = std::is_signed_v<D> ? (u64)(i64)i : zext<D>(i);
      });
    });
  else if (is_float(st))
    lanes(m, [&](int l) {
      double v = whole(in.ftz ? flush(as_f32(a[l])) : decode(a[l], st), in.c);
      if (in.b) v = v > 1 ? 1 : v > 0 ? v : 0;
      r[l] = dt == F32 ? f32_bits((float)v) : encode(v, dt);
    });
  else
    by_int(st, [&](auto z) {
      using S = decltype(z);
      if (dt == F32)
        lanes(m, [&](int l) { r[l] = f32_bits((float)(S)a[l]); });
      else
        by_int(dt, [&](auto y) {
          using D = decltype(y);
          lanes(m, [&](int l) { r[l] = std::is_signed_v<D> ? (u64)(i64)(D)(S)a[l] : zext<D>((D)(S)a[l]); });
        });
    });
  u64* d = x.wr(w, in, 0, m);
  u64 keep = ~0ull >> (64 - in.o[0].width);
  lanes(m, [&](int l) { d[l] = r[l] & keep; });
}

}  // namespace ptxrun
