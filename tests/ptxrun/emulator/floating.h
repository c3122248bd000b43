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
  bool two = in.t == F16X2 || in.t == BF16X2;
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m), *c = in.a == FFMA ? x.rd(w, in, 3, m) : a;
  u64* d = x.wr(w, in, 0, m);
  by_float(in.t, [&](auto t) {
    auto with = [&](auto f) {
      auto half = [=](int l, int h) -> u64 {
        return encode(f(decode(a[l] >> h, t), decode(b[l] >> h, t), decode(c[l] >> h, t)), t);
      };
      each_lane(m, [=](int l) { d[l] = half(l, 0) | (two ? half(l, 16) << 16 : 0); });
    };
    if constexpr (t == F16 || t == BF16) switch (in.a) {
        case FADD: return with([](double p, double q, double) { return add_odd(p, q); });
        case FSUB: return with([](double p, double q, double) { return add_odd(p, -q); });
        case FMUL: return with([](double p, double q, double) { return p * q; });
        default: with([](double p, double q, double r) { return add_odd(p * q, r); });
      }
  });
}

static float ulps(Machine& x, float v) {  // approximate functions: moved by up to one unit in the last place
  if (!x.c.approx || !std::isfinite(v) || v == 0) return v;
  int k = (int)((std::bit_cast<u32>(v) * 0x9E3779B1u ^ (u32)x.c.seed * 0x85EBCA6Bu) >> 16) % 3 - 1;
  return k ? std::nextafter(v, k * INFINITY) : v;
}

HANDLER(f32_arith) {  // in.b: approximate; in.c: as `extreme`, 2 rounded down
  const u64 *a = x.rd(w, in, 1, m), *b = in.a >= FRCP ? a : x.rd(w, in, 2, m);
  const u64* c = in.a == FFMA ? x.rd(w, in, 3, m) : a;
  u64* d = x.wr(w, in, 0, m);
  auto with = [&](auto f) {
    auto flushed = [](u64 v) { return flush(as_f32(v)); };
    if (in.ftz)
      each_lane(m, [&](int l) { d[l] = f32_bits(flush(f(flushed(a[l]), flushed(b[l]), flushed(c[l])))); });
    else
      each_lane(m, [&](int l) { d[l] = f32_bits(f(as_f32(a[l]), as_f32(b[l]), as_f32(c[l]))); });
  };
  auto near = [&](auto f) { with([&](float p, float q, float) { return in.b ? ulps(x, f(p, q)) : f(p, q); }); };
  switch (in.a) {
    case FADD: return with([](float p, float q, float) { return p + q; });
    case FSUB: return with([](float p, float q, float) { return p - q; });
    case FMUL: return with([](float p, float q, float) { return p * q; });
    case FFMA:
      if (!(in.c & 2)) return with([](float p, float q, float r) { return std::fma(p, q, r); });
      return with([](float p, float q, float r) {
        float s = std::fma(p, q, r);
        return s > add_odd((double)p * q, r) ? std::nextafter(s, -INFINITY) : s;
      });
    case FMIN: return with([&](float p, float q, float) { return extreme(in, p, q, true); });
    case FMAX: return with([&](float p, float q, float) { return extreme(in, p, q, false); });
    case FDIV: return near([](float p, float q) { return p / q; });
    case FRCP: return near([](float p, float) { return 1.f / p; });
    case FLG2: return near([](float p, float) { return (float)std::log2((double)p); });
    case FSQRT: return near([](float p, float) { return std::sqrt(p); });
    case FRSQRT: return near([](float p, float) { return (float)(1.0 / std::sqrt((double)p)); });
    default: near([](float p, float) { return (float)std::exp2((double)p); });
  }
}

HANDLER(half_sign) {  // in.a: 0 abs, 1 neg
  const u64* a = x.rd(w, in, 1, m);
  u64* d = x.wr(w, in, 0, m);
  u64 bits = in.t == F16X2 || in.t == BF16X2 ? 0x80008000u : 0x8000u;
  each_lane(m, [&](int l) { d[l] = in.a ? a[l] ^ bits : a[l] & ~bits; });
}

HANDLER(f32_sign) {  // in.a: 0 abs, 1 neg
  const u64* a = x.rd(w, in, 1, m);
  u64* d = x.wr(w, in, 0, m);
  each_lane(m, [&](int l) {
    u32 r = in.a ? (u32)a[l] ^ 0x80000000u : (u32)a[l] & 0x7fffffffu;
    d[l] = in.ftz ? std::bit_cast<u32>(flush(as_f32(r))) : r;
  });
}

// ------------------------------------------------------------------------------- comparisons and selections
enum Cmp : u8 { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NANC };

HANDLER(c_setp) {  // in.a: the comparison
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m);
  u64* d = x.wr(w, in, 0, m);
  // For which results it is true: 1 less, 2 equal, 4 greater, 8 unordered.
  static const u8 sets[] = {2, 5, 1, 3, 4, 6, 10, 13, 9, 11, 12, 14, 7, 8};
  auto holds = [set = sets[in.a]](auto p, auto q) { return (set & (p < q ? 1 : p == q ? 2 : p > q ? 4 : 8)) != 0; };
  if (in.t == F32) {
    auto value = [ftz = in.ftz](u64 v) { return ftz ? flush(as_f32(v)) : as_f32(v); };
    each_lane(m, [=](int l) { d[l] = holds(value(a[l]), value(b[l])); });
    return;
  }
  by_int(in.t, [&](auto z) {
    using Ty = decltype(z);
    each_lane(m, [=](int l) { d[l] = holds((Ty)a[l], (Ty)b[l]); });
  });
}

HANDLER(c_selp) {
  const u64* p = x.rd(w, in, 3, m);
  u32 k = 0;
  lanes(m, [&](int l) { k |= (u32)(p[l] & 1) << l; });
  const u64 *a = x.rd(w, in, 1, m & k), *b = x.rd(w, in, 2, m & ~k);
  u64* d = x.wr(w, in, 0, m);
  u64 keep = ~0ull >> (64 - bits_of(in.t));
  each_lane(m, [&](int l) { d[l] = (k >> l & 1 ? a[l] : b[l]) & keep; });
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
      each_lane(m, [&](int l) { e[l] = copy[l] >> (each * i) & keep; });
    }
  } else if (s.k == VEC) {
    int n = (int)s.v.size(), each = bits_of(in.t) / n;
    u64 keep = (1ull << each) - 1, r[32] = {};
    for (int i = 0; i < n; i++) {
      const u64* a = x.rd(w, in, s.v[i], m);
      each_lane(m, [&](int l) { r[l] |= (a[l] & keep) << (each * i); });
    }
    u64* e = x.wr(w, in, d, m);
    each_lane(m, [&](int l) { e[l] = r[l]; });
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
    each_lane(m, [&](int l) { e[l] = a[l] & keep; });
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
    by_float(dt, [&](auto t) {
      auto pack = [=](double low, double high) { return encode(low, t) | encode(high, t) << bits; };
      if (b)
        each_lane(m, [&](int l) { r[l] = pack(as_f32(b[l]), as_f32(a[l])); });
      else
        each_lane(m, [&](int l) { r[l] = pack(decode(a[l], E4M3X2), decode(a[l] >> 8, E4M3X2)); });
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
  else if (is_float(st) && (st == F32 || dt == F32) && !in.b && !in.c && !in.ftz)
    by_float(dt == F32 ? st : dt, [&](auto t) {
      each_lane(m, [&](int l) { r[l] = dt == F32 ? f32_bits((float)decode(a[l], t)) : encode(as_f32(a[l]), t); });
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
        each_lane(m, [&](int l) { r[l] = f32_bits((float)(S)a[l]); });
      else
        by_int(dt, [&](auto y) {
          using D = decltype(y);
          each_lane(m, [&](int l) { r[l] = std::is_signed_v<D> ? (u64)(i64)(D)(S)a[l] : zext<D>((D)(S)a[l]); });
        });
    });
  u64* d = x.wr(w, in, 0, m);
  u64 keep = ~0ull >> (64 - in.o[0].width);
  each_lane(m, [&](int l) { d[l] = r[l] & keep; });
}

}  // namespace ptxrun
