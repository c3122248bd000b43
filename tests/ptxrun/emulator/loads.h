// Loads and stores, cp.async, ldmatrix and stmatrix: counted in sectors of global memory and passes over the banks of
// shared memory.
#pragma once

#include "floating.h"

namespace ptxrun {

// Passes over the 32 banks that an access needs; `size` bytes per lane.
static u64 wavefronts(u32 m, const u64* off, u32 size) {
  u32 group = size <= 4 ? 32 : size == 8 ? 16 : 8;
  u64 total = 0;
  for (u32 g = 0; g < 32; g += group) {
    u32 banks = 0, conflict = 0;
    for (u32 l = g; l < g + group; l++) {
      u32 own = m >> l & 1 ? std::rotl((1u << (size + 3) / 4) - 1, off[l] / 4 & 31) : 0;
      conflict |= banks & own;
      banks |= own;
    }
    u32 words[32][8];
    u8 n[32] = {};
    u32 most = !conflict && banks;
    for (u32 l = g; conflict && l < g + group; l++)
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
  u64 s[128], last = 0;
  int n = 0;
  lanes(m, [&](int l) {
    for (u64 k = a[l] / 32; k <= (a[l] + size - 1) / 32 && n < 128; k++) {
      bool seen = false;
      for (int i = k > last ? 0 : n; i-- && !seen;) seen = s[i] == k;
      if (!seen) s[n++] = k;
      last = std::max(last, k);
    }
  });
  return n;
}

static void tally(Machine& x, const Inst& in, u32 m, const u64* a, u32 size) {
  bool shared = in.space == SHARED;
  u64 bytes = (u64)std::popcount(m) * size, units = shared ? wavefronts(m, a, size) : sectors(m, a, size);
  // Lanes that read the same address need fewer units than their bytes.
  x.count(in, units, std::min(units, shared ? (bytes + 127) / 128 : (bytes + 31) / 32), bytes);
}

HANDLER(mem_ld) {
  u64 a[32];
  x.address(w, in, in.o[1], m, a);
  const Op& d = in.o[0];
  int n = d.k == VEC ? (int)d.v.size() : 1;
  u32 each = bits_of(in.t) / 8, size = each * n;
  const u8* p[32];
  lanes(m, [&](int l) {
    if (in.space == PARAM) {
      if (a[l] + size > (u64)x.kernel.param_bytes) x.fault(w, in, "reads beyond the parameters");
      p[l] = x.params + a[l];
    } else if (in.space == SHARED) {
      u32 off = x.shared(w, in, a[l], size, l, "read");
      x.shared_read(w, in, off, size, l);
      p[l] = &x.cta.smem[off];
    } else
      p[l] = x.global(w, in, l, a[l], size, false);
  });
  if (in.space != PARAM) tally(x, in, m, a, size);
  for (int i = 0; i < n; i++) {
    const Op& e = d.k == VEC ? d.v[i] : d;
    u64* t = x.wr(w, in, e, m);
    u64 keep = e.width ? ~0ull >> (64 - e.width) : ~0ull;
    int up = is_signed(in.t) ? 64 - 8 * each : 0;
    by_size(each, [&](auto z) {
      lanes(m, [&](int l) {
        memcpy(&z, p[l] + i * sizeof z, sizeof z);
        t[l] = (u64)((i64)((u64)z << up) >> up) & keep;
      });
    });
  }
}

HANDLER(mem_st) {
  u64 a[32];
  x.address(w, in, in.o[0], m, a);
  const Op& d = in.o[1];
  int n = d.k == VEC ? (int)d.v.size() : 1;
  u32 each = bits_of(in.t) / 8, size = each * n;
  u8 data[32][64];
  for (int i = 0; i < n; i++) {
    const u64* v = x.rd(w, in, d.k == VEC ? d.v[i] : d, m);
    by_size(each, [&](auto z) { lanes(m, [&](int l) { memcpy(data[l] + i * sizeof z, &v[l], sizeof z); }); });
  }
  lanes(m, [&](int l) {
    u8* p;
    if (in.space == SHARED) {
      u32 off = x.shared(w, in, a[l], size, l, "write");
      x.shared_write(w, in, off, size, l, data[l]);
      p = &x.cta.smem[off];
    } else
      p = x.global(w, in, l, a[l], size, true);
    by_size(size, [&](auto z) { memcpy(p, data[l], sizeof z); });
  });
  tally(x, in, m, a, size);
}

// ------------------------------------------------------------------------------------------------ cp.async
void Machine::land(Warp& w, Copy& k) {
  if (k.landed) return;
  k.landed = true;
  by_size(k.bytes, [&](auto z) {
    if (k.from_src) memcpy(&z, (void*)k.src, sizeof z);
    memcpy(&cta.smem[k.dst], &z, sizeof z);
  });
}

HANDLER(cp_async) {  // in.a: cg
  u64 d[32], s[32];
  x.address(w, in, in.o[0], m, d);
  x.address(w, in, in.o[1], m, s);
  u32 bytes = (u32)in.o[2].off;
  if (bytes != 16 && (in.a || (bytes != 4 && bytes != 8))) x.fault(w, in, "cp.async of this size");
  const u64* part = in.o.size() > 3 ? x.rd(w, in, 3, m) : nullptr;
  u32 clock = ++w.cp_clock, reads = 0;
  bool now = !x.c.timing || x.rng() & 1;
  lanes(m, [&](int l) {
    u32 n = part ? (u32)part[l] : bytes;
    if (n && n != bytes) x.fault(w, in, "cp.async of a part of its bytes", l);
    u32 off = x.shared(w, in, d[l], bytes, l, "cp.async write");
    if (s[l] % bytes) x.fault(w, in, fmt("misaligned cp.async source 0x%llx", (unsigned long long)s[l]), l);
    if (n) {
      reads |= 1u << l;
      x.global(w, in, l, s[l], bytes, false);
    }
    x.mark_write(w, in, off, bytes, l, x.agent(CP_ASYNC, w), clock);
    w.copies.push_back({l, w.group[l], clock, off, s[l], (u8)bytes, (u8)n, false});
    if (now) x.land(w, w.copies.back());
  });
  if (reads) {
    u64 read_bytes = (u64)std::popcount(reads) * bytes;
    x.count(in, sectors(reads, s, bytes), (read_bytes + 31) / 32, read_bytes);
  }
}

HANDLER(cp_commit) {
  lanes(m, [&](int l) { w.group[l]++; });
}

HANDLER(cp_wait) {  // in.a: groups that may stay in flight
  std::erase_if(w.copies, [&](Copy& k) {
    bool done = m >> k.lane & 1 && k.group + in.a + 1 <= w.group[k.lane];
    if (done) x.land(w, k);
    return done;
  });
  u32 done = w.cp_clock;
  for (auto& k : w.copies) done = std::min(done, k.clock - 1);
  u32& v = w.vc[x.agent(CP_ASYNC, w)];
  v = std::max(v, done);
}

// ----------------------------------------------------------------------------------- ldmatrix and stmatrix
HANDLER(matrix) {  // in.a: matrices; in.b: transposed; in.c: stmatrix
  u64 a[32];
  x.address(w, in, in.o[in.c ? 0 : 1], m, a);
  if (m != ~0u) x.fault(w, in, "a matrix needs all lanes");
  const Op& regs = in.o[in.c ? 1 : 0];
  u64 waves = 0;
  for (int i = 0; i < in.a; i++) {
    const Op& part = regs.k == VEC ? regs.v[i] : regs;
    u16 e[8][8];
    // The place of a half of a lane's register.
    auto half = [&](int l, int h) -> u16& {
      return in.b ? e[2 * (l & 3) + h][l >> 2] : e[l >> 2][2 * (l & 3) + h];
    };
    if (in.c) {
      const u64* t = x.rd(w, in, part, m);
      for (int l = 0; l < 32; l++)
        for (int h = 0; h < 2; h++) half(l, h) = t[l] >> (16 * h);
    }
    for (int r = 0; r < 8; r++) {
      int l = 8 * i + r;
      u32 off = x.shared(w, in, a[l], 16, l, in.c ? "write" : "read");
      if (in.c) {
        x.shared_write(w, in, off, 16, l, (const u8*)e[r]);
        memcpy(&x.cta.smem[off], e[r], 16);
      } else {
        x.shared_read(w, in, off, 16, l);
        memcpy(e[r], &x.cta.smem[off], 16);
      }
    }
    waves += wavefronts(0xff, a + 8 * i, 16);
    if (!in.c) {
      u64* t = x.wr(w, in, part, m);
      for (int l = 0; l < 32; l++) t[l] = half(l, 0) | (u32)half(l, 1) << 16;
    }
  }
  x.count(in, waves, in.a, in.a * 128);
}

}  // namespace ptxrun
