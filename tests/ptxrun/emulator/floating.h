// Floating-point arithmetic.
#pragma once

#include "logic.h"

namespace ptxrun {

// Operations of the handlers. 16-bit operands are doubles in between: sums and products are exact or rounded to odd,
// so that encoding rounds them once.
enum FOp : u8 {
  FADD,
  FSUB,
  FMUL,
  FFMA,
  FMIN,
  FMAX,
  FNEG,
  FABS,
  FDIV,
  FSQRT,
  FRCP,
  FRSQRT,
  FEX2,
  FLG2,
  FSIN,
  FCOS,
  FTANH,
  FCOPYSIGN
};

static inline double extreme(const Inst& in, double a, double b, bool least) {
  if (in.c & 1) {
    if (a != a || b != b) return NAN;
  }  // .NaN
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return least ? (std::signbit(a) ? a : b) : (std::signbit(a) ? b : a);
  return least ? (a < b ? a : b) : (a > b ? a : b);
}

static double half_op(const Inst& in, double a, double b, double c) {
  switch (in.a) {
    case FADD: return add_odd(a, b);
    case FSUB: return add_odd(a, -b);
    case FMUL: return a * b;
    case FFMA: return add_odd(a * b, c);
    case FMIN: return extreme(in, a, b, true);
    case FMAX: return extreme(in, a, b, false);
    case FNEG: return -a;
    case FABS: return std::fabs(a);
    case FEX2: return std::exp2(a);
    case FTANH: return std::tanh(a);
    case FDIV: return a / b;
    default: throw Fault("half operation");
  }
}

HANDLER(half_arith) {
  int n = in.a == FFMA ? 3 : (in.a == FNEG || in.a == FABS || in.a == FEX2 || in.a == FTANH) ? 1 : 2;
  bool two = in.t == F16X2 || in.t == BF16X2;
  const u64* s[3];
  for (int i = 0; i < n; i++) s[i] = x.rd(w, in, 1 + i, m);
  u64* d = x.wr(w, in, 0, m);
  u16 sign = 0x8000;
  lanes(m, [&](int l) {
    u32 out = 0;
    for (int h = 0; h <= two; h++) {
      double v[3] = {0, 0, 0};
      for (int i = 0; i < n; i++) v[i] = decode(s[i][l] >> (16 * h) & 0xffff, in.t);
      if (in.ftz && in.t != BF16 && in.t != BF16X2)
        for (auto& y : v)
          if (std::fabs(y) < 0x1p-14) y = std::copysign(0.0, y);
      u32 r;
      if (in.a == FNEG)
        r = (u32)(s[0][l] >> (16 * h) & 0xffff) ^ sign;
      else if (in.a == FABS)
        r = (u32)(s[0][l] >> (16 * h) & 0x7fff);
      else {
        double y = half_op(in, v[0], v[1], v[2]);
        if (in.sat) y = y != y ? 0 : std::min(std::max(y, 0.0), 1.0);
        if (in.relu) y = y != y ? NAN : std::max(y, 0.0);
        r = encode(y, in.t, in.rm);
        if (in.ftz && (r & 0x7c00) == 0 && (in.t == F16 || in.t == F16X2)) r &= 0x8000;
      }
      out |= (r & 0xffff) << (16 * h);
    }
    d[l] = out;
  });
}

static float round_f32(double y, Round rm) { return rm == RN ? (float)y : as_f32(encode_small(y, 8, 23, rm, false)); }

static inline float ulps(Machine& x, float v) {  // approximate functions: moved by up to one unit in the last place
  if (!x.c.approx || !std::isfinite(v) || v == 0) return v;
  int k = (int)((std::bit_cast<u32>(v) * 0x9E3779B1u ^ (u32)x.c.seed * 0x85EBCA6Bu) >> 16) % 3 - 1;
  for (; k > 0; k--) v = std::nextafter(v, INFINITY);
  for (; k < 0; k++) v = std::nextafter(v, -INFINITY);
  return v;
}

template <class F>
inline void f32_map(Machine& x, Warp& w, const Inst& in, u32 m, int n, F f) {
  const u64* s[3];
  for (int i = 0; i < n; i++) s[i] = x.rd(w, in, 1 + i, m);
  u64* d = x.wr(w, in, 0, m);
  if (!in.ftz && !in.sat && !in.relu) {
    lanes(m, [&](int l) {
      d[l] = f32_bits(f(as_f32(s[0][l]), n > 1 ? as_f32(s[1][l]) : 0.f, n > 2 ? as_f32(s[2][l]) : 0.f));
    });
    return;
  }
  lanes(m, [&](int l) {
    float v[3] = {0, 0, 0};
    for (int i = 0; i < n; i++) {
      v[i] = as_f32(s[i][l]);
      if (in.ftz) v[i] = flush(v[i]);
    }
    float r = f(v[0], v[1], v[2]);
    if (in.ftz) r = flush(r);
    if (in.sat) r = r != r ? 0 : std::min(std::max(r, 0.f), 1.f);
    if (in.relu) r = r != r ? r : std::max(r, 0.f);
    d[l] = f32_bits(r);
  });
}

HANDLER(f32_arith) {
  switch (in.a) {
    case FADD:
    case FSUB: {
      float sg = in.a == FSUB ? -1.f : 1.f;
      if (in.rm == RN)
        f32_map(x, w, in, m, 2, [&](float a, float b, float) { return a + sg * b; });
      else
        f32_map(x, w, in, m, 2, [&](float a, float b, float) { return round_f32(add_odd(a, (double)sg * b), in.rm); });
      break;
    }
    case FMUL:
      if (in.rm == RN)
        f32_map(x, w, in, m, 2, [](float a, float b, float) { return a * b; });
      else
        f32_map(x, w, in, m, 2, [&](float a, float b, float) { return round_f32((double)a * b, in.rm); });
      break;
    case FFMA:
      if (in.rm == RN)
        f32_map(x, w, in, m, 3, [](float a, float b, float c) { return std::fma(a, b, c); });
      else
        f32_map(x, w, in, m, 3, [&](float a, float b, float c) { return round_f32(add_odd((double)a * b, c), in.rm); });
      break;
    case FMIN: f32_map(x, w, in, m, 2, [&](float a, float b, float) { return (float)extreme(in, a, b, true); }); break;
    case FMAX: f32_map(x, w, in, m, 2, [&](float a, float b, float) { return (float)extreme(in, a, b, false); }); break;
    case FDIV:
      if (in.b)
        f32_map(x, w, in, m, 2, [&](float a, float b, float) { return ulps(x, a / b); });
      else
        f32_map(x, w, in, m, 2, [&](float a, float b, float) {
          if (in.rm == RN) return a / b;
          double q = (double)a / b;
          double e = std::fma(-q, (double)b, (double)a);
          if (e != 0 && std::isfinite(q) && !(std::bit_cast<u64>(q) & 1))
            q = std::nextafter(q, (e > 0) == (b > 0) ? INFINITY : -INFINITY);
          return round_f32(q, in.rm);
        });
      break;
    case FSQRT:
      f32_map(x, w, in, m, 1, [&](float a, float, float) {
        float r = std::sqrt(a);
        return in.b ? ulps(x, r) : r;
      });
      break;
    case FRCP:
      f32_map(x, w, in, m, 1, [&](float a, float, float) {
        float r = 1.f / a;
        return in.b ? ulps(x, r) : r;
      });
      break;
    case FRSQRT:
      f32_map(x, w, in, m, 1, [&](float a, float, float) { return ulps(x, (float)(1 / std::sqrt((double)a))); });
      break;
    case FEX2:
      f32_map(x, w, in, m, 1, [&](float a, float, float) { return ulps(x, (float)std::exp2((double)a)); });
      break;
    case FLG2:
      f32_map(x, w, in, m, 1, [&](float a, float, float) { return ulps(x, (float)std::log2((double)a)); });
      break;
    case FSIN:
      f32_map(x, w, in, m, 1, [&](float a, float, float) { return ulps(x, (float)std::sin((double)a)); });
      break;
    case FCOS:
      f32_map(x, w, in, m, 1, [&](float a, float, float) { return ulps(x, (float)std::cos((double)a)); });
      break;
    case FTANH:
      f32_map(x, w, in, m, 1, [&](float a, float, float) { return ulps(x, (float)std::tanh((double)a)); });
      break;
    case FNEG: {
      const u64* a = x.rd(w, in, 1, m);
      u64* d = x.wr(w, in, 0, m);
      lanes(m, [&](int l) {
        d[l] = (u32)a[l] ^ 0x80000000u;
        if (in.ftz) d[l] = std::bit_cast<u32>(flush(as_f32(d[l])));
      });
      break;
    }
    case FABS: {
      const u64* a = x.rd(w, in, 1, m);
      u64* d = x.wr(w, in, 0, m);
      lanes(m, [&](int l) {
        d[l] = (u32)a[l] & 0x7fffffffu;
        if (in.ftz) d[l] = std::bit_cast<u32>(flush(as_f32(d[l])));
      });
      break;
    }
    case FCOPYSIGN: {
      const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m);
      u64* d = x.wr(w, in, 0, m);
      lanes(m, [&](int l) { d[l] = ((u32)b[l] & 0x7fffffffu) | ((u32)a[l] & 0x80000000u); });
      break;
    }
  }
}

HANDLER(f64_arith) {
  int n = in.a == FFMA ? 3 : in.a <= FMAX || in.a == FDIV || in.a == FCOPYSIGN ? 2 : 1;
  const u64* s[3];
  for (int i = 0; i < n; i++) s[i] = x.rd(w, in, 1 + i, m);
  u64* d = x.wr(w, in, 0, m);
  static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD, FE_TONEAREST};
  if (in.rm != RN) fesetround(modes[in.rm]);
  lanes(m, [&](int l) {
    volatile double a = as_f64(s[0][l]), b = n > 1 ? as_f64(s[1][l]) : 0, c = n > 2 ? as_f64(s[2][l]) : 0, r = 0;
    switch (in.a) {
      case FADD: r = a + b; break;
      case FSUB: r = a - b; break;
      case FMUL: r = a * b; break;
      case FFMA: r = std::fma((double)a, (double)b, (double)c); break;
      case FMIN: r = extreme(in, a, b, true); break;
      case FMAX: r = extreme(in, a, b, false); break;
      case FDIV: r = a / b; break;
      case FSQRT: r = std::sqrt((double)a); break;
      case FRCP: r = 1 / a; break;
      case FRSQRT: r = 1 / std::sqrt((double)a); break;
      case FNEG: d[l] = s[0][l] ^ (1ull << 63); return;
      case FABS: d[l] = s[0][l] & ~(1ull << 63); return;
      case FCOPYSIGN: r = std::copysign((double)b, (double)a); break;
      default: fesetround(FE_TONEAREST); throw Fault("f64 operation");
    }
    d[l] = f64_bits(r);
  });
  if (in.rm != RN) fesetround(FE_TONEAREST);
}

}  // namespace ptxrun
