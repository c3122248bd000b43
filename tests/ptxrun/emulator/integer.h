// Integer arithmetic, logic, shifts and permutations.
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
    each_lane(m, [&](int l) { d[l] = zext<Ty>((Ty)f((Ty)a[l])); });
  });
}

template <class F>
inline void int2(Machine& x, Warp& w, const Inst& in, u32 m, F f) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m);
  u64* d = x.wr(w, in, 0, m);
  by_int(in.t, [&](auto z) {
    using Ty = decltype(z);
    each_lane(m, [&](int l) { d[l] = zext<Ty>((Ty)f((Ty)a[l], (Ty)b[l])); });
  });
}

HANDLER(i_add) {
  int2(x, w, in, m, [](auto a, auto b) { return (u64)a + (u64)b; });
}

HANDLER(i_sub) {
  int2(x, w, in, m, [](auto a, auto b) { return (u64)a - (u64)b; });
}

HANDLER(i_mul) {
  int2(x, w, in, m, [](auto a, auto b) { return (u64)a * (u64)b; });
}

HANDLER(i_mulhi) {
  int2(x, w, in, m, [](auto a, auto b) {
    using Wide = std::conditional_t<std::is_signed_v<decltype(a)>, __int128, unsigned __int128>;
    return (u64)(((Wide)a * b) >> (8 * sizeof a));
  });
}

// mul.wide, mad.wide: in.a 1 if there is an addend
HANDLER(i_wide) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m), *c = in.a ? x.rd(w, in, 3, m) : nullptr;
  u64* d = x.wr(w, in, 0, m);
  u64 keep = in.t == U16 || in.t == S16 ? 0xffffffffull : ~0ull;
  by_int(in.t, [&](auto z) {
    using Ty = decltype(z);
    each_lane(m, [&](int l) { d[l] = ((u64)((i64)(Ty)a[l] * (i64)(Ty)b[l]) + (c ? c[l] : 0)) & keep; });
  });
}

HANDLER(i_mad) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m), *c = x.rd(w, in, 3, m);
  u64* d = x.wr(w, in, 0, m);
  by_int(in.t, [&](auto z) {
    using Ty = decltype(z);
    each_lane(m, [&](int l) { d[l] = zext<Ty>((Ty)((u64)(Ty)a[l] * (u64)(Ty)b[l] + c[l])); });
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

HANDLER(i_extreme) {  // in.a: 0 min, 1 max; in.b: at least 0
  int2(x, w, in, m, [&](auto a, auto b) {
    auto r = (a < b) == !in.a ? a : b;
    return in.b && r < 0 ? decltype(a)(0) : r;
  });
}

HANDLER(i_neg) {
  int1(x, w, in, m, [](auto a) { return 0 - (u64)a; });
}

// ---------------------------------------------------------------------------------------------- logic
HANDLER(l_bits) {  // in.a: 0 and, 1 or, 2 xor
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m);
  u64* d = x.wr(w, in, 0, m);
  u64 k = ~0ull >> (64 - bits_of(in.t));
  each_lane(m, [&](int l) { d[l] = (in.a == 0 ? a[l] & b[l] : in.a == 1 ? a[l] | b[l] : a[l] ^ b[l]) & k; });
}

HANDLER(l_not) {
  const u64* a = x.rd(w, in, 1, m);
  u64* d = x.wr(w, in, 0, m);
  u64 k = ~0ull >> (64 - bits_of(in.t));
  each_lane(m, [&](int l) { d[l] = ~a[l] & k; });
}

HANDLER(l_shl) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m);
  u64* d = x.wr(w, in, 0, m);
  u32 n = bits_of(in.t);
  u64 k = ~0ull >> (64 - n);
  each_lane(m, [&](int l) { d[l] = (u32)b[l] >= n ? 0 : (a[l] << b[l]) & k; });
}

HANDLER(l_shr) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m);
  u64* d = x.wr(w, in, 0, m);
  u32 n = bits_of(in.t);
  by_int(in.t, [&](auto z) {
    using Ty = decltype(z);
    each_lane(m, [&](int l) {
      u32 s = (u32)b[l];
      if (s >= n)
        d[l] = std::is_signed_v<Ty> ? zext<Ty>((Ty)((Ty)a[l] < 0 ? -1 : 0)) : 0;
      else
        d[l] = zext<Ty>((Ty)((Ty)a[l] >> s));
    });
  });
}

HANDLER(l_prmt) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m), *c = x.rd(w, in, 3, m);
  u64* d = x.wr(w, in, 0, m);
  each_lane(m, [&](int l) {
    u64 v = (b[l] << 32) | (u32)a[l];
    u32 r = 0;
    for (int i = 0; i < 32; i += 8) {
      u32 k = (u32)c[l] >> (i / 2) & 15, byte = v >> (8 * (k & 7)) & 0xff;
      r |= (k & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << i;
    }
    d[l] = r;
  });
}

HANDLER(l_bfe) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m), *c = x.rd(w, in, 3, m);
  u64* d = x.wr(w, in, 0, m);
  u32 n = bits_of(in.t);
  each_lane(m, [&](int l) {
    u32 pos = b[l] & 0xff, len = c[l] & 0xff, have = pos < n ? std::min(len, n - pos) : 0;
    u64 keep = have < 64 ? (1ull << have) - 1 : ~0ull, r = have ? a[l] >> pos & keep : 0;
    if (is_signed(in.t) && len && a[l] >> std::min(pos + len - 1, n - 1) & 1) r |= ~keep;
    d[l] = n == 64 ? r : (u32)r;
  });
}

}  // namespace ptxrun
