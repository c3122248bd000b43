// Logic, shifts, bit fields and permutations.
#pragma once

#include "integer.h"

namespace ptxrun {

HANDLER(l_and) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m);
  u64* d = x.wr(w, in, 0, m);
  u64 k = in.t == PRED ? 1 : in.t == B16 ? 0xffff : in.t == B32 ? 0xffffffff : ~0ull;
  lanes(m, [&](int l) { d[l] = a[l] & b[l] & k; });
}

HANDLER(l_or) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m);
  u64* d = x.wr(w, in, 0, m);
  u64 k = in.t == PRED ? 1 : in.t == B16 ? 0xffff : in.t == B32 ? 0xffffffff : ~0ull;
  lanes(m, [&](int l) { d[l] = (a[l] | b[l]) & k; });
}

HANDLER(l_xor) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m);
  u64* d = x.wr(w, in, 0, m);
  u64 k = in.t == PRED ? 1 : in.t == B16 ? 0xffff : in.t == B32 ? 0xffffffff : ~0ull;
  lanes(m, [&](int l) { d[l] = (a[l] ^ b[l]) & k; });
}

HANDLER(l_not) {
  const u64* a = x.rd(w, in, 1, m);
  u64* d = x.wr(w, in, 0, m);
  u64 k = in.t == PRED ? 1 : in.t == B16 ? 0xffff : in.t == B32 ? 0xffffffff : ~0ull;
  lanes(m, [&](int l) { d[l] = ~a[l] & k; });
}

HANDLER(l_cnot) {
  int1(x, w, in, m, [](auto a) { return a == 0 ? 1 : 0; });
}

HANDLER(l_shl) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m);
  u64* d = x.wr(w, in, 0, m);
  u32 n = bits_of(in.t);
  u64 k = n == 64 ? ~0ull : (1ull << n) - 1;
  lanes(m, [&](int l) {
    u32 s = (u32)b[l];
    d[l] = s >= n ? 0 : (a[l] << s) & k;
  });
}

HANDLER(l_shr) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m);
  u64* d = x.wr(w, in, 0, m);
  u32 n = bits_of(in.t);
  by_int(in.t, [&](auto z) {
    using Ty = decltype(z);
    lanes(m, [&](int l) {
      u32 s = (u32)b[l];
      if (s >= n)
        d[l] = std::is_signed_v<Ty> ? zext<Ty>((Ty)((Ty)a[l] < 0 ? -1 : 0)) : 0;
      else
        d[l] = zext<Ty>((Ty)((Ty)a[l] >> s));
    });
  });
}

HANDLER(l_shf) {  // in.a 0 left, 1 right; in.b 1 wrap
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m), *c = x.rd(w, in, 3, m);
  u64* d = x.wr(w, in, 0, m);
  lanes(m, [&](int l) {
    u32 s = in.b ? c[l] & 31 : std::min<u32>((u32)c[l], 32);
    u64 v = (b[l] << 32) | (u32)a[l];
    d[l] = in.a ? (u32)(s == 32 ? b[l] : v >> s) : (u32)(s == 32 ? a[l] : (v << s) >> 32);
  });
}

HANDLER(l_lop3) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m), *c = x.rd(w, in, 3, m);
  u32 t = (u32)in.o[4].off;
  u64* d = x.wr(w, in, 0, m);
  lanes(m, [&](int l) {
    u32 A = a[l], B = b[l], C = c[l], r = 0;
    for (int i = 0; i < 8; i++)
      if (t >> i & 1) r |= (i & 4 ? A : ~A) & (i & 2 ? B : ~B) & (i & 1 ? C : ~C);
    d[l] = r;
  });
}

HANDLER(l_prmt) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m), *c = x.rd(w, in, 3, m);
  u64* d = x.wr(w, in, 0, m);
  lanes(m, [&](int l) {
    u64 v = (b[l] << 32) | (u32)a[l];
    u32 s = (u32)c[l], r = 0;
    for (int i = 0; i < 4; i++) {
      int k;
      bool sign = false;
      u32 q = s & 3;
      switch (in.a) {
        case 1: k = (q + i) & 7; break;
        case 2: k = (q + 8 - i) & 7; break;
        case 3: k = q; break;
        case 4: k = std::max<int>(i, q); break;
        case 5: k = std::min<int>(i, q); break;
        case 6: k = (s & 1) * 2 + (i & 1); break;
        default: k = s >> (4 * i) & 7; sign = s >> (4 * i) & 8;
      }
      u32 byte = v >> (8 * k) & 0xff;
      if (sign) byte = byte & 0x80 ? 0xff : 0;
      r |= byte << (8 * i);
    }
    d[l] = r;
  });
}

HANDLER(l_bfe) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m), *c = x.rd(w, in, 3, m);
  u64* d = x.wr(w, in, 0, m);
  u32 n = bits_of(in.t);
  lanes(m, [&](int l) {
    u32 pos = b[l] & 0xff, len = c[l] & 0xff;
    u64 v = a[l];
    bool sg = is_signed(in.t);
    u64 top = len ? (v >> std::min(pos + len - 1, n - 1)) & 1 : 0;
    u64 r = 0;
    if (pos < n) r = v >> pos;
    u32 have = pos < n ? std::min(len, n - pos) : 0;
    r = have == 0 ? 0 : have >= 64 ? r : r & ((1ull << have) - 1);
    if (sg && top && len) {
      if (have < 64) r |= ~0ull << have;
    }
    d[l] = n == 64 ? r : (u32)r;
  });
}

HANDLER(l_bfi) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m), *c = x.rd(w, in, 3, m), *e = x.rd(w, in, 4, m);
  u64* d = x.wr(w, in, 0, m);
  u32 n = bits_of(in.t);
  lanes(m, [&](int l) {
    u32 pos = c[l] & 0xff, len = e[l] & 0xff;
    u64 k = pos >= n || !len ? 0 : ((len >= 64 ? ~0ull : (1ull << len) - 1) << pos);
    u64 r = (b[l] & ~k) | ((pos < 64 ? a[l] << pos : 0) & k);
    d[l] = n == 64 ? r : (u32)r;
  });
}

HANDLER(l_bmsk) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m);
  u64* d = x.wr(w, in, 0, m);
  lanes(m, [&](int l) {
    u32 p = in.a ? a[l] & 31 : a[l], n = in.a ? b[l] & 31 : b[l];
    d[l] = p >= 32 ? 0 : (u32)((n >= 32 ? ~0u : (1u << n) - 1) << p);
  });
}

HANDLER(l_szext) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m);
  u64* d = x.wr(w, in, 0, m);
  lanes(m, [&](int l) {
    u32 n = in.a ? b[l] & 31 : b[l];
    u32 v = a[l];
    if (n < 32) {
      v &= n ? (1u << n) - 1 : 0;
      if (in.t == S32 && n && (v >> (n - 1) & 1)) v |= ~0u << n;
    }
    d[l] = v;
  });
}

HANDLER(l_popc) {
  const u64* a = x.rd(w, in, 1, m);
  u64* d = x.wr(w, in, 0, m);
  lanes(m, [&](int l) { d[l] = std::popcount(in.t == B64 ? a[l] : (u32)a[l]); });
}

HANDLER(l_clz) {
  const u64* a = x.rd(w, in, 1, m);
  u64* d = x.wr(w, in, 0, m);
  lanes(m, [&](int l) { d[l] = in.t == B64 ? std::countl_zero(a[l]) : std::countl_zero((u32)a[l]); });
}

HANDLER(l_brev) {
  const u64* a = x.rd(w, in, 1, m);
  u64* d = x.wr(w, in, 0, m);
  int n = bits_of(in.t);
  lanes(m, [&](int l) {
    u64 r = 0;
    for (int i = 0; i < n; i++) r |= (a[l] >> i & 1) << (n - 1 - i);
    d[l] = r;
  });
}

HANDLER(l_bfind) {
  const u64* a = x.rd(w, in, 1, m);
  u64* d = x.wr(w, in, 0, m);
  int n = bits_of(in.t);
  lanes(m, [&](int l) {
    u64 v = a[l];
    if (is_signed(in.t) && (v >> (n - 1) & 1)) v = ~v;
    if (n == 32) v = (u32)v;
    d[l] = v ? (in.a ? n - 1 - (63 - std::countl_zero(v)) : 63 - std::countl_zero(v)) : 0xffffffffu;
  });
}

HANDLER(l_fns) { x.fault(w, in, "fns"); }

}  // namespace ptxrun
