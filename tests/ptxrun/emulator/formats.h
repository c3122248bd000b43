// Number formats: bits to doubles, which hold all of them but 64-bit integers, and back, rounded once.
#pragma once

#include "types.h"

namespace ptxrun {

inline float as_f32(u64 b) { return std::bit_cast<float>((u32)b); }

inline u32 f32_bits(float x) { return x != x ? 0x7fffffffu : std::bit_cast<u32>(x); }

inline float flush(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x; }

enum Round : u8 { RN, RZ };

// Rounds once; `x` is exact or was rounded to odd. e4m3 has no infinities, and what is too large becomes its largest.
inline u32 encode_small(double x, int ebits, int mbits, Round rm, bool is_e4m3 = false) {
  const u32 sign = std::signbit(x) ? 1u << (ebits + mbits) : 0;
  const int bias = (1 << (ebits - 1)) - 1, top = (1 << ebits) - 1;
  if (x != x) return is_e4m3 ? 0x7f : (1u << (ebits + mbits)) - 1;
  const u32 largest = is_e4m3 ? 0x7e : ((u32)(top - 1) << mbits) | ((1u << mbits) - 1);
  const u32 infinity = is_e4m3 ? largest : (u32)top << mbits;
  double a = std::fabs(x);
  if (a == 0) return sign;
  if (std::isinf(a)) return sign | infinity;
  int ex;
  std::frexp(a, &ex);
  int e = std::max(ex - 1, 1 - bias);
  double q = std::ldexp(a, mbits - e), r = std::floor(q), rest = q - r;
  bool up = rm == RN && (rest > 0.5 || (rest == 0.5 && std::fmod(r, 2) == 1));
  u64 code = (u64)r + up;  // with the hidden bit for normal numbers
  u64 field = code >= (1ull << mbits) ? code + ((u64)(e + bias - 1) << mbits) : code;
  return sign | (field <= largest ? (u32)field : rm == RZ ? largest : infinity);
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

inline u32 encode(double x, T t) {
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

// a + b, rounded to odd: a later rounding to fewer bits is then right.
inline double add_odd(double a, double b) {
  double s = a + b;
  if (!std::isfinite(s)) return s;
  double bb = s - a, err = (a - (s - bb)) + (b - bb);
  if (err != 0 && !(std::bit_cast<u64>(s) & 1)) s = std::nextafter(s, err > 0 ? INFINITY : -INFINITY);
  return s;
}

}  // namespace ptxrun
