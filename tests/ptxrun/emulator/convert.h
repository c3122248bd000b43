// Conversions.
#pragma once

#include "compare.h"

namespace ptxrun {

static double round_integral(double v, int mode) {
  switch (mode) {
    case RN: return std::nearbyint(v);
    case RZ: return std::trunc(v);
    case RM: return std::floor(v);
    default: return std::ceil(v);
  }
}

// in.t destination, in.t2 source; in.a: rounds to an integer, in.b: its rounding mode
HANDLER(v_cvt) {
  T dt = in.t, st = in.t2;
  const u64* a = x.rd(w, in, 1, m);
  u64 r[32];
  // a in the upper half, b in the lower
  if ((dt == F16X2 || dt == BF16X2 || dt == E4M3X2 || dt == E5M2X2) && st == F32) {
    const u64* b = x.rd(w, in, 2, m);
    int bits = bits_of(dt) / 2;
    u64* d = x.wr(w, in, 0, m);
    lanes(m, [&](int l) {
      u64 out = 0;
      for (int h = 0; h < 2; h++) {
        float v = as_f32(h ? a[l] : b[l]);
        if (in.relu && !(v > 0) && v == v) v = 0;
        out |= (u64)encode(v, dt, in.rm, in.satfinite) << (bits * h);
      }
      d[l] = out;
    });
    return;
  }
  if (dt == E4M3X2 || dt == E5M2X2 || st == E4M3X2 || st == E5M2X2) {
    int db = bits_of(dt) / 2, sb = bits_of(st) / 2;
    u64* d = x.wr(w, in, 0, m);
    lanes(m, [&](int l) {
      u64 out = 0;
      for (int h = 0; h < 2; h++) {
        double v = decode(a[l] >> (sb * h) & ((1u << sb) - 1), st);
        if (in.relu && v == v) v = std::max(v, 0.0);
        out |= (u64)encode(v, dt, in.rm, in.satfinite) << (db * h);
      }
      d[l] = out;
    });
    return;
  }
  int width = in.o[0].width;
  if (!is_float(dt) && !is_float(st)) {
    by_int(st, [&](auto z) {
      using S = decltype(z);
      by_int(dt, [&](auto y) {
        using D = decltype(y);
        lanes(m, [&](int l) {
          S v = (S)a[l];
          if (in.sat) {
            __int128 q = v, lo = std::numeric_limits<D>::min(), hi = std::numeric_limits<D>::max();
            q = q < lo ? lo : q > hi ? hi : q;
            r[l] = std::is_signed_v<D> ? (u64)(i64)(D)q : zext<D>((D)q);
          } else
            r[l] = std::is_signed_v<D> ? (u64)(i64)(D)v : zext<D>((D)v);
        });
      });
    });
  } else if (!is_float(dt)) {
    by_int(dt, [&](auto y) {
      using D = decltype(y);
      lanes(m, [&](int l) {
        double v = decode(a[l], st);
        if (in.ftz && st == F32) v = flush((float)v);
        if (v != v) {
          r[l] = sizeof(D) == 8 ? 0x8000000000000000ull : 0;
          return;
        }
        v = round_integral(v, in.b);
        double lo = (double)std::numeric_limits<D>::min(), hi = (double)std::numeric_limits<D>::max();
        D q = v <= lo ? std::numeric_limits<D>::min() : v >= hi ? std::numeric_limits<D>::max() : (D)v;
        r[l] = std::is_signed_v<D> ? (u64)(i64)q : zext<D>(q);
      });
    });
  } else if (!is_float(st)) {
    by_int(st, [&](auto z) {
      using S = decltype(z);
      lanes(m, [&](int l) {
        S v = (S)a[l];
        if (dt == F64) {
          static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD, 0};
          fesetround(modes[in.rm]);
          volatile S vv = v;
          volatile double q = (double)vv;
          fesetround(FE_TONEAREST);
          r[l] = f64_bits(q);
          return;
        }
        double q = (double)v;  // 64-bit integers are rounded to odd
        if constexpr (sizeof(S) == 8) {
          __int128 back = (__int128)q, me = v;
          if (back != me && !(std::bit_cast<u64>(q) & 1)) q = std::nextafter(q, back < me ? INFINITY : -INFINITY);
        }
        if (dt == F32 && in.rm == RN && sizeof(S) < 8)
          r[l] = f32_bits((float)q);
        else
          r[l] = encode(q, dt, in.rm);
      });
    });
  } else {
    lanes(m, [&](int l) {
      double v = decode(a[l], st);
      if (in.ftz && (st == F32)) v = flush((float)v);
      if (in.a) v = round_integral(v, in.b);
      if (in.sat) v = v != v ? 0 : std::min(std::max(v, 0.0), 1.0);
      if (in.relu && v == v) v = std::max(v, 0.0);
      if (dt == F64) {
        r[l] = f64_bits(v);
        return;
      }
      if (dt == F32 && in.rm == RN) {
        float q = (float)v;
        if (in.ftz) q = flush(q);
        r[l] = f32_bits(q);
        return;
      }
      r[l] = encode(v, dt, in.rm, in.satfinite);
      if (in.ftz && dt == F32) r[l] = std::bit_cast<u32>(flush(as_f32(r[l])));
    });
  }
  u64* d = x.wr(w, in, 0, m);
  u64 keep = width >= 64 ? ~0ull : (1ull << width) - 1;
  lanes(m, [&](int l) { d[l] = r[l] & keep; });
}

HANDLER(v_cvtpack) {  // cvt.pack.sat.t.s32{.b32} d, a, b{, c}
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m), *c = in.o.size() > 3 ? x.rd(w, in, 3, m) : nullptr;
  u64* d = x.wr(w, in, 0, m);
  int n = in.a;
  i64 lo = is_signed(in.t) ? -(1ll << (n - 1)) : 0, hi = is_signed(in.t) ? (1ll << (n - 1)) - 1 : (1ll << n) - 1;
  u32 k = (1u << n) - 1;
  lanes(m, [&](int l) {
    u32 p = (u32)std::clamp<i64>((i32)a[l], lo, hi) & k, q = (u32)std::clamp<i64>((i32)b[l], lo, hi) & k;
    d[l] = (u32)((c ? (u64)c[l] << (2 * n) : 0) | (p << n) | q);
  });
}

}  // namespace ptxrun
