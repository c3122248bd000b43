// Loads, stores and atomics. Loads and stores are counted in sectors of global memory and passes over the banks of
// shared memory, atomics are not.
#pragma once

#include "convert.h"

namespace ptxrun {

// Passes over the 32 banks that an access needs; `size` bytes per lane.
static u64 wavefronts(u32 m, const u32* off, u32 size) {
  u32 group = size <= 4 ? 32 : size == 8 ? 16 : 8;
  u64 total = 0;
  for (u32 g = 0; g < 32; g += group) {
    u32 words[32][8];
    u8 n[32] = {};
    u32 most = 0;
    for (u32 l = g; l < g + group; l++)
      if (m >> l & 1)
        for (u32 b = off[l] & ~3u; b < off[l] + size; b += 4) {
          u32 k = b / 4, bank = k & 31;
          bool seen = false;
          for (u32 i = 0; i < n[bank] && i < 8; i++) seen |= words[bank][i] == k;
          if (!seen) {
            if (n[bank] < 8) words[bank][n[bank]] = k;
            n[bank]++;
            most = std::max<u32>(most, n[bank]);
          }
        }
    total += most;
  }
  return total;
}

static u64 sectors(u32 m, const u64* a, u32 size) {
  u64 s[128];
  int n = 0;
  lanes(m, [&](int l) {
    for (u64 k = a[l] / 32; k <= (a[l] + size - 1) / 32 && n < 128; k++) {
      bool seen = false;
      for (int i = n; i-- && !seen;) seen = s[i] == k;
      if (!seen) s[n++] = k;
    }
  });
  return n;
}

static void tally(Machine& x, const Inst& in, u32 m, const u64* a, const u32* off, bool shared, u32 size) {
  u64 bytes = (u64)std::popcount(m) * size, units = shared ? wavefronts(m, off, size) : sectors(m, a, size);
  // Lanes that read the same address need fewer units than their bytes.
  x.count(in, units, std::min(units, shared ? (bytes + 127) / 128 : (bytes + 31) / 32), bytes);
}

static const u8* param_bank(Machine& x, Warp& w, const Inst& in, u64 a, u32 size) {
  if (a + size > (u64)x.kernel.param_bytes) x.fault(w, in, "reads beyond the parameters");
  return x.params + a;
}

HANDLER(mem_ld) {
  u64 a[32];
  u32 off[32];
  x.address(w, in, in.o[1], m, a);
  const Op& d = in.o[0];
  int n = d.k == VEC ? (int)d.v.size() : 1;
  u32 each = bits_of(in.t) / 8, size = each * n;
  bool sg = is_signed(in.t);
  u64 r[8][32];
  Space s = in.space;
  bool bank = s == PARAM && in.o[1].space != LOCAL;
  if (s == PARAM && !bank) s = LOCAL;
  bool shared = false, sync = in.a, any_global = false;
  lanes(m, [&](int l) {
    const u8* p;
    if (bank)
      p = param_bank(x, w, in, a[l], size);
    else {
      auto q = x.place(w, in, l, s, a[l], size, false, sync);
      p = q.p;
      off[l] = q.off;
      if (q.space == SHARED) {
        shared = true;
        x.shared_read(w, in, q.cta, q.off, size, l, sync);
      } else
        any_global |= q.space == GLOBAL;
    }
    for (int i = 0; i < n; i++) {
      u64 v = 0;
      memcpy(&v, p + i * each, each);
      if (sg && each < 8) v = (u64)((i64)(v << (64 - 8 * each)) >> (64 - 8 * each));
      r[i][l] = v;
    }
  });
  if (sync) {
    lanes(m, [&](int l) {
      auto k = x.sync.find(shared ? off[l] : a[l]);
      if (k != x.sync.end()) x.acquire(w, k->second.first, k->second.second);
    });
    if (!shared) w.cta->synced_global = true;
  }
  if (shared || any_global) tally(x, in, m, a, off, shared, size);
  for (int i = 0; i < n; i++) {
    const Op& e = d.k == VEC ? d.v[i] : d;
    u64* t = x.wr(w, in, e, m);
    u64 keep = e.width >= 64 || !e.width ? ~0ull : (1ull << e.width) - 1;
    lanes(m, [&](int l) { t[l] = r[i][l] & keep; });
  }
}

HANDLER(mem_st) {
  u64 a[32];
  u32 off[32];
  x.address(w, in, in.o[0], m, a);
  const Op& d = in.o[1];
  int n = d.k == VEC ? (int)d.v.size() : 1;
  u32 each = bits_of(in.t) / 8, size = each * n;
  const u64* v[8];
  u64 hold[8][32];
  for (int i = 0; i < n; i++) {
    v[i] = x.rd(w, in, d.k == VEC ? d.v[i] : d, m);
    memcpy(hold[i], v[i], sizeof hold[i]);
  }
  Space s = in.space;
  if (s == PARAM) s = LOCAL;
  bool shared = false, any_global = false;
  if (in.a)
    lanes(m, [&](int l) {
      auto& k = x.sync[(in.space == SHARED ? (u32)a[l] & 0xffffff : a[l])];
      x.release(w, k.first, k.second);
    });
  lanes(m, [&](int l) {
    auto q = x.place(w, in, l, s, a[l], size, true, in.a);
    off[l] = q.off;
    u8 data[64];
    for (int i = 0; i < n; i++) memcpy(data + i * each, &hold[i][l], each);
    if (q.space == SHARED) {
      shared = true;
      if (in.a)
        memset(&q.cta->init[q.off], 1, size);
      else
        x.shared_write(w, in, q.cta, q.off, size, l, data);
    } else
      any_global |= q.space == GLOBAL;
    memcpy(q.p, data, size);
  });
  if (shared || any_global) tally(x, in, m, a, off, shared, size);
}

HANDLER(mem_nop) {}

HANDLER(mem_policy) {
  u64* d = x.wr(w, in, 0, m);
  lanes(m, [&](int l) { d[l] = 0; });
}

enum Atom : u8 { A_ADD, A_MIN, A_MAX, A_INC, A_DEC, A_CAS, A_EXCH, A_AND, A_OR, A_XOR };

static u64 atom_value(int op, T t, u64 old, u64 b, u64 c) {
  if (t == F32 && op == A_ADD) return f32_bits(as_f32(old) + as_f32(b));
  if (t == F64 && op == A_ADD) return f64_bits(as_f64(old) + as_f64(b));
  if (t == F16 || t == BF16 || t == F16X2 || t == BF16X2) {
    u64 r = 0;
    for (int h = 0; h < (t == F16X2 || t == BF16X2 ? 32 : 16); h += 16) {
      double p = decode(old >> h & 0xffff, t), q = decode(b >> h & 0xffff, t);
      double v = op == A_ADD ? add_odd(p, q) : op == A_MIN ? std::fmin(p, q) : std::fmax(p, q);
      r |= (u64)encode(v, t) << h;
    }
    return r;
  }
  switch (op) {
    case A_ADD: return old + b;
    case A_EXCH: return b;
    case A_CAS: return old == b ? c : old;
    case A_AND: return old & b;
    case A_OR: return old | b;
    case A_XOR: return old ^ b;
    case A_INC: return (u32)old >= (u32)b ? 0 : old + 1;
    case A_DEC: return (u32)old == 0 || (u32)old > (u32)b ? b : old - 1;
    default: {
      bool less = t == S32               ? (i32)old < (i32)b
                  : t == S64             ? (i64)old < (i64)b
                  : t == U32 || t == B32 ? (u32)old < (u32)b
                                         : old < b;
      return less == (op == A_MIN) ? old : b;
    }
  }
}

HANDLER(mem_atom) {  // in.b: 1 with a result
  u64 a[32];
  const Op& at = in.o[in.b];
  x.address(w, in, at, m, a);
  const Op& src = in.o[in.b + 1];
  int n = src.k == VEC ? (int)src.v.size() : 1;
  u32 size = bits_of(in.t) / 8;
  u64 keep = size == 8 ? ~0ull : (1ull << 8 * size) - 1;
  vector<std::array<u64, 32>> v(n), old(n);
  for (int i = 0; i < n; i++) {
    const u64* s = x.rd(w, in, src.k == VEC ? src.v[i] : src, m);
    memcpy(v[i].data(), s, 256);
  }
  const u64* c = in.a == A_CAS ? x.rd(w, in, in.b + 2, m) : nullptr;
  std::lock_guard<std::mutex> lock(*x.atomics);
  bool backwards = x.rng() & 1;
  if ((in.space == GLOBAL || in.space == GENERIC)) w.cta->synced_global = true;
  for (int k = 0; k < 32; k++) {
    int l = backwards ? 31 - k : k;
    if (!(m >> l & 1)) continue;
    if (n > 1 && a[l] % (size * n)) x.fault(w, in, "misaligned vector atomic", l);
    for (int i = 0; i < n; i++) {
      auto q = x.place(w, in, l, in.space, a[l] + i * size, size, true, true);
      if (q.space == LOCAL) x.fault(w, in, "atomic on local memory", l);
      auto& y = x.sync[q.space == SHARED ? q.off : a[l]];
      x.acquire(w, y.first, y.second);
      x.release(w, y.first, y.second);
      if (q.space == SHARED) {
        x.shared_read(w, in, q.cta, q.off, size, l, true);
        if (x.c.races) {
          auto& e = q.cta->we[q.off / 4];
          if (e.clock && !x.before(w.vc, e.clock, e.agent))
            x.race(w, in, q.cta, q.off, "updates", "write", e.line, e.agent, l);
        }
      }
      u64 o = 0;
      memcpy(&o, q.p, size);
      old[i][l] = o;
      u64 r = atom_value(in.a, in.t, o, v[i][l] & keep, c ? c[l] & keep : 0);
      memcpy(q.p, &r, size);
    }
  }
  if (in.b)
    for (int i = 0; i < n; i++) {
      u64* d = x.wr(w, in, in.o[0].k == VEC ? in.o[0].v[i] : in.o[0], m);
      lanes(m, [&](int l) { d[l] = old[i][l]; });
    }
}

}  // namespace ptxrun
