// Integer arithmetic.
#pragma once

#include "shared_memory.h"

namespace ptxrun {

template <class F>
inline void by_int(T t, F f) {
  switch (t) {
    case U8:
    case B8: f(u8{}); break;
    case S8: f(i8{}); break;
    case U16:
    case B16: f(u16{}); break;
    case S16: f(i16{}); break;
    case U32:
    case B32: f(u32{}); break;
    case S32: f(i32{}); break;
    case U64:
    case B64: f(u64{}); break;
    case S64: f(i64{}); break;
    default: throw Fault("integer type expected");
  }
}

template <class Ty>
inline u64 zext(Ty v) {
  return (u64)(std::make_unsigned_t<Ty>)v;
}

template <class F>
inline void int1(Machine& x, Warp& w, const Inst& in, u32 m, F f) {
  const u64* a = x.rd(w, in, 1, m);
  u64* d = x.wr(w, in, 0, m);
  by_int(in.t, [&](auto z) {
    using Ty = decltype(z);
    lanes(m, [&](int l) { d[l] = zext<Ty>((Ty)f((Ty)a[l])); });
  });
}

template <class F>
inline void int2(Machine& x, Warp& w, const Inst& in, u32 m, F f) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m);
  u64* d = x.wr(w, in, 0, m);
  by_int(in.t, [&](auto z) {
    using Ty = decltype(z);
    lanes(m, [&](int l) { d[l] = zext<Ty>((Ty)f((Ty)a[l], (Ty)b[l])); });
  });
}

template <class Ty>
inline Ty clamp_add(Ty a, Ty b) {
  Ty r;
  if constexpr (std::is_signed_v<Ty>) {
    if (__builtin_add_overflow(a, b, &r)) r = a < 0 ? std::numeric_limits<Ty>::min() : std::numeric_limits<Ty>::max();
  } else
    r = a + b;
  return r;
}

template <class Ty>
inline Ty clamp_sub(Ty a, Ty b) {
  Ty r;
  if constexpr (std::is_signed_v<Ty>) {
    if (__builtin_sub_overflow(a, b, &r)) r = a < 0 ? std::numeric_limits<Ty>::min() : std::numeric_limits<Ty>::max();
  } else
    r = a - b;
  return r;
}

HANDLER(i_add) {
  if (in.sat)
    int2(x, w, in, m, [](auto a, auto b) { return clamp_add(a, b); });
  else
    int2(x, w, in, m, [](auto a, auto b) { return (u64)a + (u64)b; });
}

HANDLER(i_sub) {
  if (in.sat)
    int2(x, w, in, m, [](auto a, auto b) { return clamp_sub(a, b); });
  else
    int2(x, w, in, m, [](auto a, auto b) { return (u64)a - (u64)b; });
}

HANDLER(i_mul) {
  int2(x, w, in, m, [](auto a, auto b) { return (u64)a * (u64)b; });
}

template <class Ty>
inline u64 product_high(Ty a, Ty b) {
  if constexpr (sizeof(Ty) == 8) {
    if constexpr (std::is_signed_v<Ty>)
      return (u64)(((__int128)a * b) >> 64);
    else
      return (u64)(((unsigned __int128)a * b) >> 64);
  } else if constexpr (std::is_signed_v<Ty>)
    return (u64)(((i64)a * (i64)b) >> (8 * sizeof(Ty)));
  else
    return ((u64)a * (u64)b) >> (8 * sizeof(Ty));
}

HANDLER(i_mulhi) {
  int2(x, w, in, m, [](auto a, auto b) { return product_high(a, b); });
}

// mul.wide, mad.wide: in.a 1 if there is an addend
HANDLER(i_wide) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m), *c = in.a ? x.rd(w, in, 3, m) : nullptr;
  u64* d = x.wr(w, in, 0, m);
  u64 keep = in.t == U16 || in.t == S16 ? 0xffffffffull : ~0ull;
  by_int(in.t, [&](auto z) {
    using Ty = decltype(z);
    lanes(m, [&](int l) { d[l] = ((u64)((i64)(Ty)a[l] * (i64)(Ty)b[l]) + (c ? c[l] : 0)) & keep; });
  });
}

HANDLER(i_mad) {  // in.a: 0 lo, 1 hi
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m), *c = x.rd(w, in, 3, m);
  u64* d = x.wr(w, in, 0, m);
  by_int(in.t, [&](auto z) {
    using Ty = decltype(z);
    lanes(m, [&](int l) {
      d[l] = zext<Ty>((Ty)((in.a ? product_high((Ty)a[l], (Ty)b[l]) : (u64)(Ty)a[l] * (u64)(Ty)b[l]) + c[l]));
    });
  });
}

HANDLER(i_mul24) {  // in.a: 0 lo, 1 hi; in.b: addend
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m), *c = in.b ? x.rd(w, in, 3, m) : nullptr;
  u64* d = x.wr(w, in, 0, m);
  auto cut = [&](u64 v) { return in.t == S32 ? (i64)(i32)((u32)v << 8) >> 8 : (i64)(v & 0xffffff); };
  lanes(m, [&](int l) {
    i64 p = cut(a[l]) * cut(b[l]);
    d[l] = (u32)((in.a ? p >> 16 : p) + (c ? c[l] : 0));
  });
}

HANDLER(i_carry) {  // add.cc, addc, sub.cc, subc, mad.cc, madc: in.a 0 add, 1 sub, 2 mad.lo, 3 mad.hi; in.b reads, in.c
                    // writes the carry
  int k = in.a >= 2 ? 3 : 2;
  const u64* s[3];
  for (int i = 0; i < k; i++) s[i] = x.rd(w, in, 1 + i, m);
  u64* d = x.wr(w, in, 0, m);
  int bits = bits_of(in.t);
  u64 keep = bits == 64 ? ~0ull : 0xffffffffull;
  lanes(m, [&](int l) {
    unsigned __int128 r;
    bool carry = in.b && (w.cc >> l & 1);
    u64 a = s[0][l] & keep, b = s[1][l] & keep, p = a;
    if (k == 3) {
      by_int(in.t, [&](auto z) {
        using Ty = decltype(z);
        p = in.a == 3 ? zext<Ty>((Ty)product_high((Ty)a, (Ty)b)) : zext<Ty>((Ty)(a * b));
      });
      b = s[2][l] & keep;
    }
    if (in.a == 1) {
      r = (unsigned __int128)a - b - carry;
    } else
      r = (unsigned __int128)p + b + carry;
    d[l] = (u64)r & keep;
    if (in.c) w.cc = (w.cc & ~(1ull << l)) | ((u64)((r >> bits) & 1) << l);
  });
}

HANDLER(i_div) {
  int2(x, w, in, m, [](auto a, auto b) {
    using Ty = decltype(a);
    if (b == 0) return (Ty) ~(Ty)0;
    if constexpr (std::is_signed_v<Ty>)
      if (b == (Ty)-1) return (Ty)(0 - (std::make_unsigned_t<Ty>)a);
    return (Ty)(a / b);
  });
}

HANDLER(i_rem) {
  int2(x, w, in, m, [](auto a, auto b) {
    using Ty = decltype(a);
    if (b == 0) return a;
    if constexpr (std::is_signed_v<Ty>)
      if (b == (Ty)-1) return (Ty)0;
    return (Ty)(a % b);
  });
}

HANDLER(i_min) {
  if (in.relu)
    int2(x, w, in, m, [](auto a, auto b) {
      auto r = a < b ? a : b;
      return r < 0 ? decltype(a)(0) : r;
    });
  else
    int2(x, w, in, m, [](auto a, auto b) { return a < b ? a : b; });
}

HANDLER(i_max) {
  if (in.relu)
    int2(x, w, in, m, [](auto a, auto b) {
      auto r = a > b ? a : b;
      return r < 0 ? decltype(a)(0) : r;
    });
  else
    int2(x, w, in, m, [](auto a, auto b) { return a > b ? a : b; });
}

HANDLER(i_pair) {  // u16x2, s16x2: in.a 0 add, 1 min, 2 max
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m);
  u64* d = x.wr(w, in, 0, m);
  lanes(m, [&](int l) {
    u32 r = 0;
    for (int h = 0; h < 32; h += 16) {
      u16 p = a[l] >> h, q = b[l] >> h, y;
      if (in.a == 0)
        y = p + q;
      else {
        bool less = in.t == S16X2 ? (i16)p < (i16)q : p < q;
        y = less == (in.a == 1) ? p : q;
      }
      if (in.relu && in.t == S16X2 && (i16)y < 0) y = 0;
      r |= (u32)y << h;
    }
    d[l] = r;
  });
}

HANDLER(i_neg) {
  int1(x, w, in, m, [](auto a) { return 0 - (u64)a; });
}

HANDLER(i_abs) {
  int1(x, w, in, m, [](auto a) { return a < 0 ? 0 - (u64)a : (u64)a; });
}

HANDLER(i_sad) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m), *c = x.rd(w, in, 3, m);
  u64* d = x.wr(w, in, 0, m);
  by_int(in.t, [&](auto z) {
    using Ty = decltype(z);
    lanes(m, [&](int l) {
      Ty p = (Ty)a[l], q = (Ty)b[l];
      d[l] = zext<Ty>((Ty)(c[l] + (p < q ? (u64)q - (u64)p : (u64)p - (u64)q)));
    });
  });
}

HANDLER(i_dp) {  // dp4a (in.a 0), dp2a (1 lo, 2 hi)
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m), *c = x.rd(w, in, 3, m);
  u64* d = x.wr(w, in, 0, m);
  bool sa = in.t == S32, sb = in.t2 == S32;
  auto part = [](u64 v, int bits, int i, bool sg) {
    u32 p = v >> (bits * i) & ((1u << bits) - 1);
    return sg ? (i64)((i32)(p << (32 - bits)) >> (32 - bits)) : (i64)p;
  };
  lanes(m, [&](int l) {
    i64 r = (i32)c[l];
    if (in.a == 0)
      for (int i = 0; i < 4; i++) r += part(a[l], 8, i, sa) * part(b[l], 8, i, sb);
    else
      for (int i = 0; i < 2; i++) r += part(a[l], 16, i, sa) * part(b[l], 8, i + (in.a == 2 ? 2 : 0), sb);
    d[l] = (u32)r;
  });
}

}  // namespace ptxrun
