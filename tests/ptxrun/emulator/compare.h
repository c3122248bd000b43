// Comparisons and selections, moves and address spaces.
#pragma once

#include "floating.h"

namespace ptxrun {

enum Cmp : u8 { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NANC };

static bool compare_float(double a, double b, int c) {
  bool un = a != a || b != b;
  switch (c) {
    case EQ: return !un && a == b;
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

static u32 compare(Machine& x, Warp& w, const Inst& in, u32 m, int half = 0) {
  const u64 *a = x.rd(w, in, 1, m), *b = x.rd(w, in, 2, m);
  u32 r = 0;
  if (in.t == F32)
    lanes(m, [&](int l) {
      float p = as_f32(a[l]), q = as_f32(b[l]);
      if (in.ftz) p = flush(p), q = flush(q);
      r |= (u32)compare_float(p, q, in.a) << l;
    });
  else if (in.t == F64)
    lanes(m, [&](int l) { r |= (u32)compare_float(as_f64(a[l]), as_f64(b[l]), in.a) << l; });
  else if (is_float(in.t) || in.t == F16X2 || in.t == BF16X2)
    lanes(m, [&](int l) {
      r |= (u32)compare_float(decode(a[l] >> (16 * half) & 0xffff, in.t), decode(b[l] >> (16 * half) & 0xffff, in.t),
                              in.a)
           << l;
    });
  else
    by_int(in.t, [&](auto z) {
      using Ty = decltype(z);
      lanes(m, [&](int l) {
        Ty p = (Ty)a[l], q = (Ty)b[l];
        bool v = in.a == EQ   ? p == q
                 : in.a == NE ? p != q
                 : in.a == LT ? p < q
                 : in.a == LE ? p <= q
                 : in.a == GT ? p > q
                              : p >= q;
        r |= (u32)v << l;
      });
    });
  return r;
}

// in.a comparison; in.b boolean operation (1 and, 2 or, 3 xor) with operand 3
static u32 combine(Machine& x, Warp& w, const Inst& in, u32 m, u32 r, bool inverse) {
  if (inverse) r = ~r;
  if (!in.b) return r;
  const u64* c = x.rd(w, in, 3, m);
  u32 k = 0;
  lanes(m, [&](int l) { k |= (u32)(c[l] & 1) << l; });
  return in.b == 1 ? r & k : in.b == 2 ? r | k : r ^ k;
}

HANDLER(c_setp) {
  u32 r = compare(x, w, in, m);
  bool pair = in.o[0].k == VEC;
  u32 p, q = 0;
  if (in.t == F16X2 || in.t == BF16X2) {
    p = combine(x, w, in, m, r, false);
    q = combine(x, w, in, m, compare(x, w, in, m, 1), false);
  } else {
    p = combine(x, w, in, m, r, false);
    if (pair) q = combine(x, w, in, m, r, true);
  }
  u64* d = x.wr(w, in, pair ? in.o[0].v[0] : in.o[0], m);
  lanes(m, [&](int l) { d[l] = p >> l & 1; });
  if (pair) {
    u64* e = x.wr(w, in, in.o[0].v[1], m);
    lanes(m, [&](int l) { e[l] = q >> l & 1; });
  }
}

HANDLER(c_set) {
  u32 r = combine(x, w, in, m, compare(x, w, in, m), false), r2 = 0;
  bool two = in.t == F16X2 || in.t == BF16X2;
  if (two) r2 = combine(x, w, in, m, compare(x, w, in, m, 1), false);
  u64* d = x.wr(w, in, 0, m);
  lanes(m, [&](int l) {
    bool v = r >> l & 1;
    if (two) {
      u32 one = in.t2 == F16X2 ? 0x3c00 : in.t2 == BF16X2 ? 0x3f80 : 0xffff;
      d[l] = (v ? one : 0) | ((r2 >> l & 1 ? one : 0) << 16);
    } else
      d[l] = !v ? 0 : in.t2 == F32 ? 0x3f800000u : in.t2 == F16 ? 0x3c00 : in.t2 == BF16 ? 0x3f80 : 0xffffffffu;
  });
}

HANDLER(c_selp) {
  const u64* p = x.rd(w, in, 3, m);
  u32 k = 0;
  lanes(m, [&](int l) { k |= (u32)(p[l] & 1) << l; });
  const u64 *a = x.rd(w, in, 1, m & k), *b = x.rd(w, in, 2, m & ~k);
  u64* d = x.wr(w, in, 0, m);
  u64 keep = bits_of(in.t) == 16 ? 0xffff : bits_of(in.t) == 32 ? 0xffffffff : ~0ull;
  lanes(m, [&](int l) { d[l] = (k >> l & 1 ? a[l] : b[l]) & keep; });
}

HANDLER(c_slct) {
  const u64* c = x.rd(w, in, 3, m);
  u32 k = 0;
  lanes(m, [&](int l) { k |= (u32)(in.t2 == F32 ? as_f32(c[l]) >= 0 : (i32)c[l] >= 0) << l; });
  const u64 *a = x.rd(w, in, 1, m & k), *b = x.rd(w, in, 2, m & ~k);
  u64* d = x.wr(w, in, 0, m);
  u64 keep = bits_of(in.t) == 16 ? 0xffff : bits_of(in.t) == 32 ? 0xffffffff : ~0ull;
  lanes(m, [&](int l) { d[l] = (k >> l & 1 ? a[l] : b[l]) & keep; });
}

HANDLER(c_testp) {
  const u64* a = x.rd(w, in, 1, m);
  u64* d = x.wr(w, in, 0, m);
  lanes(m, [&](int l) {
    int k = in.t == F32 ? std::fpclassify(as_f32(a[l])) : std::fpclassify(as_f64(a[l]));
    d[l] = in.a == 0   ? k != FP_INFINITE && k != FP_NAN
           : in.a == 1 ? k == FP_INFINITE
           : in.a == 2 ? k != FP_NAN
           : in.a == 3 ? k == FP_NAN
           : in.a == 4 ? k == FP_NORMAL || k == FP_ZERO
                       : k == FP_SUBNORMAL;
  });
}

HANDLER(m_mov) {
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
  } else {
    const u64* a;
    if (s.k == REG && (m & ~w.def[s.r]) && !w.infl[s.r] && !s.neg) {  // copies of what was never written stay unwritten
      u32 known = m & w.def[s.r];
      u64* e = x.wr(w, in, d, known);
      if (d.k == REG) w.def[d.r] &= ~(m & ~known);
      const u64* b = &w.reg[(size_t)s.r * 32];
      lanes(m, [&](int l) { e[l] = b[l]; });
      return;
    }
    a = x.rd(w, in, s, m);
    u64* e = x.wr(w, in, d, m);
    u64 keep = in.t == PRED ? 1 : bits_of(in.t) == 16 ? 0xffff : bits_of(in.t) == 32 ? 0xffffffff : ~0ull;
    lanes(m, [&](int l) { e[l] = a[l] & keep; });
  }
}

HANDLER(m_cvta) {  // in.a: to the space
  const u64* a = x.rd(w, in, 1, m);
  u64* d = x.wr(w, in, 0, m);
  u64 tag = in.space == SHARED ? GENERIC_SHARED : in.space == LOCAL ? GENERIC_LOCAL : 0;
  lanes(m, [&](int l) {
    if (in.a) {
      if (tag && (a[l] & WINDOW_MASK) != tag)
        x.fault(w, in, fmt("generic address 0x%llx is not in this space", (unsigned long long)a[l]), l);
      d[l] = a[l] & ~(tag ? WINDOW_MASK : 0);
    } else
      d[l] = a[l] | tag;
  });
}

HANDLER(m_isspacep) {
  const u64* a = x.rd(w, in, 1, m);
  u64* d = x.wr(w, in, 0, m);
  lanes(m, [&](int l) {
    u64 t = a[l] & WINDOW_MASK;
    d[l] = in.space == SHARED  ? t == GENERIC_SHARED && (in.a || !((a[l] >> 24) & 0xff))
           : in.space == LOCAL ? t == GENERIC_LOCAL
                               : t == 0;
  });
}

}  // namespace ptxrun
