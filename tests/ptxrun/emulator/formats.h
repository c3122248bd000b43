// Number formats: bits to doubles, which hold all of them but 64-bit integers, and back, rounded once.
#pragma once

#include "types.h"

namespace ptxrun {

inline float as_f32(u64 b) { return std::bit_cast<float>((u32)b); }

inline u32 f32_bits(float x) { return x != x ? 0x7fffffffu : std::bit_cast<u32>(x); }

inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }

enum Round : u8 { RN, RZ };

// Rounds once; `x` is exact or was rounded to odd. e4m3 has no infinities, and what is too large becomes its largest.
[[gnu::always_inline]] inline u32 encode_small(double x, int ebits, int mbits, Round rm, bool is_e4m3 = false) {
  const int bias = (1 << (ebits - 1)) - 1, top = (1 << ebits) - 1;
  const u64 largest = is_e4m3 ? 0x7e : ((top - 1) << mbits) | ((1 << mbits) - 1);
  const u64 infinity = is_e4m3 ? largest : top << mbits, nan = is_e4m3 ? 0x7f : (1 << (ebits + mbits)) - 1;
  const u64 bits = std::bit_cast<u64>(x), a = bits & ~0ull >> 1, inf = 0x7ffull << 52;
  const i64 ex = (i64)(a >> 52) - 1023, e = std::max<i64>(ex, 1 - bias);
  // The hidden bit is set for zero and subnormal doubles too, which have none: there the shift drops it.
  const u64 m = (a & ((1ull << 52) - 1)) | 1ull << 52, s = std::min<i64>(51 - mbits + e - ex, 62);
  const u64 twice = m >> s, half = twice >> 1;
  const u64 field = half + (twice & (half | (twice << s != m)) & (rm == RN)) + ((u64)(e + bias - 1) << mbits);
  const u64 beyond = rm == RZ && a != inf ? largest : infinity, r = field <= largest ? field : beyond;
  return (u32)(a > inf ? nan : r | bits >> 63 << (ebits + mbits));
}

inline double decode_small(u32 b, int ebits, int mbits, bool is_e4m3 = false) {
  int bias = (1 << (ebits - 1)) - 1, e = (b >> mbits) & ((1 << ebits) - 1), m = b & ((1 << mbits) - 1);
  double s = (b >> (ebits + mbits)) & 1 ? -1 : 1;
  if (is_e4m3 ? (b & 0x7f) == 0x7f : e == (1 << ebits) - 1 && m) return NAN;
  if (!is_e4m3 && e == (1 << ebits) - 1) return s * INFINITY;
  return s * (e ? std::ldexp(1.0 + std::ldexp(m, -mbits), e - bias) : std::ldexp(m, 1 - bias - mbits));
}

struct Tables {
  float f16[65536], e4m3[256];

  Tables() {
    for (int i = 0; i < 65536; i++) f16[i] = (float)decode_small(i, 5, 10);
    for (int i = 0; i < 256; i++) e4m3[i] = (float)decode_small(i, 4, 3, true);
  }
};

inline const Tables tables;

[[gnu::always_inline]] inline u32 encode(double x, T t) {
  switch (t) {
    case F16:
    case F16X2: return encode_small(x, 5, 10, RN);
    case BF16:
    case BF16X2: return encode_small(x, 8, 7, RN);
    case E4M3X2: return encode_small(x, 4, 3, RN, true);
    case TF32: return x != x ? 0x7fffffffu : (std::bit_cast<u32>((float)x) + 0x1000u) & ~0x1fffu;
    default: return x != x ? 0x7fffffffu : encode_small(x, 8, 23, RN);
  }
}

inline double decode(u64 b, T t) {
  switch (t) {
    case F16:
    case F16X2: return tables.f16[b & 0xffff];
    case BF16:
    case BF16X2: return as_f32((b & 0xffff) << 16);
    case E4M3X2: return tables.e4m3[b & 0xff];
    case TF32: return as_f32(b & ~0x1fffull);
    default: return as_f32(b);
  }
}

// Calls f with a constant in place of the type of floating-point numbers, of which two may be in a register.
template <class F>
inline void by_float(T t, F f) {
  switch (t) {
    case F16:
    case F16X2: return f(std::integral_constant<T, F16>{});
    case BF16:
    case BF16X2: return f(std::integral_constant<T, BF16>{});
    case E4M3X2: return f(std::integral_constant<T, E4M3X2>{});
    case TF32: return f(std::integral_constant<T, TF32>{});
    default: return f(std::integral_constant<T, F32>{});
  }
}

// a + b, rounded to odd: a later rounding to fewer bits is then right.
inline double add_odd(double a, double b) {
  double s = a + b, bb = s - a, err = (a - (s - bb)) + (b - bb);
  u64 bits = std::bit_cast<u64>(s);
  // Away from zero if the error has the sum's sign.
  u64 away = (std::bit_cast<u64>(err) ^ bits) >> 63 ^ 1, moved = (err != 0) & (std::fabs(s) < INFINITY) & ~bits;
  return std::bit_cast<double>(bits + (moved & 1) * (2 * away - 1));
}

}  // namespace ptxrun
