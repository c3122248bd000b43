// Shared memory: bounds, bytes never written, races by vector clocks, missing proxy fences.
#pragma once

#include "global_memory.h"

namespace ptxrun {

// An address in the shared window: of this CTA, or of a CTA of the cluster, whose rank + 1 is in the upper byte.
inline Cta* Machine::owner(Warp& w, const Inst& in, u64 a, u32 size, int lane, u32& off, const char* what) {
  Cta* t = w.cta;
  u32 rank = (u32)a >> 24;
  off = (u32)a & 0xffffff;
  if (rank) {
    if (rank > ctas.size()) fault(w, in, fmt("%s of CTA %u of a cluster of %zu", what, rank - 1, ctas.size()), lane);
    t = ctas[rank - 1];
  }
  if (a >> 32 || off < SHARED_BASE || off + size > (u32)shared_limit)
    fault(w, in,
          fmt("%s of %u bytes at shared address 0x%llx, outside of [0x%x, 0x%x)", what, size, (unsigned long long)a,
              SHARED_BASE, shared_limit),
          lane);
  return t;
}

inline Cta* Machine::owner_aligned(Warp& w, const Inst& in, u64 a, u32 size, int lane, u32& off, const char* what) {
  if (a % size)
    fault(w, in, fmt("misaligned shared %s of %u bytes at 0x%llx", what, size, (unsigned long long)a), lane);
  return owner(w, in, a, size, lane, off, what);
}

inline void Machine::race(Warp& w, const Inst& in, Cta* t, u32 off, const char* mine, const char* theirs, u32 line,
                          u32 agent_, int lane) {
  int kind = agent_ / TW, g = agent_ % TW;
  static const char* names[] = {"", " (its cp.async)", " (its wgmma)", " (its bulk copy)"};
  report("race", w, in,
         fmt("%s shared 0x%x%s, not ordered after the %s by warp %d%s", mine, off, t == w.cta ? "" : " of another CTA",
             theirs, g, names[kind]),
         line, lane);
}

inline void Machine::shared_read(Warp& w, const Inst& in, Cta* t, u32 off, u32 size, int lane, bool sync_access) {
  if (c.uninit_shared)
    for (u32 i = 0; i < size; i++)
      if (!t->init[off + i]) [[unlikely]]
        fault(w, in, fmt("reads shared 0x%x, which was never written", off + i), lane);
  if (!c.races || sync_access) return;
  u32 me = w.gid, clock = w.vc[me];
  for (u32 b = off & ~3u; b < off + size; b += 4) {
    auto& e = t->we[b / 4];
    if (e.clock && e.agent != me && !before(w.vc, e.clock, e.agent)) [[unlikely]] {
      u8 mask = 0;
      for (u32 i = 0; i < 4; i++)
        if (b + i >= off && b + i < off + size) mask |= 1 << i;
      if (mask & e.mask) race(w, in, t, b, "reads", "write", e.line, e.agent, lane);
    }
    t->re[(size_t)(b / 4) * TW + me] = {clock, in.line};
  }
}

// Layouts of Triton may have several warps write the same value to one place: not reported.
inline bool Machine::same_value(Cta* t, u32 b, u32 off, u32 size, const u8* data) {
  if (!data) return false;
  for (u32 i = b; i < b + 4; i++)
    if (i >= off && i < off + size && t->smem[i] != data[i - off]) return false;
  return true;
}

// Agent `as` writes on behalf of `w`, whose clock orders the write.
inline void Machine::mark_write(Warp& w, const Inst& in, Cta* t, u32 off, u32 size, int lane, u32 as, u32 clock,
                                bool async_proxy, const u8* data) {
  memset(&t->init[off], 1, size);
  if (!t->mbars.empty()) {
    auto k = t->mbars.lower_bound(off & ~7u);
    if (k != t->mbars.end() && k->first < off + size)
      fault(w, in, fmt("writes over the mbarrier at shared 0x%x", k->first), lane);
  }
  if (!c.races) return;
  for (u32 b = off & ~3u; b < off + size; b += 4) {
    u8 mask = 0;
    for (u32 i = 0; i < 4; i++)
      if (b + i >= off && b + i < off + size) mask |= 1 << i;
    auto& e = t->we[b / 4];
    bool mine = e.agent == as || e.agent == (u32)w.gid;
    if (e.clock && !mine && (mask & e.mask) && !before(w.vc, e.clock, e.agent) && !same_value(t, b, off, size, data))
      race(w, in, t, b, "writes", "write", e.line, e.agent, lane);
    ReadEpoch* r = &t->re[(size_t)(b / 4) * TW];
    for (int g = 0; g < TW; g++)
      if (r[g].clock > w.vc[g] && g != w.gid) {
        race(w, in, t, b, "writes", "read", r[g].line, g, lane);
        r[g].clock = 0;
      }
    if (e.clock && mine && e.clock == clock && e.agent == as)
      e.mask |= mask;
    else
      e = {clock, (u16)as, mask, (u8)async_proxy, in.line};
    e.line = in.line;
  }
  for (u32 g = off / 16; g <= (off + size - 1) / 16; g++) {
    ReadEpoch* r = &t->are[(size_t)g * 2 * TW];
    for (int a = 0; a < 2 * TW; a++)
      if (r[a].clock > w.vc[2 * TW + a]) {
        race(w, in, t, g * 16, "writes", "read", r[a].line, 2 * TW + a, lane);
        r[a].clock = 0;
      }
  }
}

inline void Machine::shared_write(Warp& w, const Inst& in, Cta* t, u32 off, u32 size, int lane, const u8* data) {
  mark_write(w, in, t, off, size, lane, w.gid, w.vc[w.gid], false, data);
}

// A read by the asynchronous proxy (wgmma, bulk copies). Writes have to be ordered before it by `vc`, those
// of the generic proxy also by `pvc`.
inline void Machine::async_read(Warp& w, const Inst& in, Cta* t, u32 off, u32 size, int kind, u32 clock,
                                const Clock& vc, const Clock& pvc) {
  if (c.uninit_shared)
    for (u32 i = 0; i < size; i++)
      if (!t->init[off + i]) fault(w, in, fmt("reads shared 0x%x, which was never written", off + i));
  if (!c.races) return;
  for (u32 b = off & ~3u; b < off + size; b += 4) {
    auto& e = t->we[b / 4];
    if (!e.clock) continue;
    if (!before(vc, e.clock, e.agent))
      race(w, in, t, b, "reads", "write", e.line, e.agent, -1);
    else if (!e.async && !before(pvc, e.clock, e.agent))
      report("proxy", w, in,
             fmt("the asynchronous proxy reads shared 0x%x, written by warp %d without fence.proxy.async since", b,
                 e.agent % TW),
             e.line);
  }
  for (u32 g = off / 16; g <= (off + size - 1) / 16; g++)
    t->are[(size_t)g * 2 * TW + (kind - 2) * TW + w.gid] = {clock, in.line};
}

// Agents that acquire `vc` and `pvc` later are ordered after the work of `w` before the release.
inline void Machine::release(Warp& w, Clock& vc, Clock& pvc) {
  if (vc.empty()) vc.resize(4 * TW), pvc.resize(4 * TW);
  join(vc, w.vc);
  join(pvc, w.pvc);
  w.vc[w.gid]++;
}

inline void Machine::acquire(Warp& w, const Clock& vc, const Clock& pvc) {
  if (!vc.empty()) {
    join(w.vc, vc);
    join(w.pvc, pvc);
  }
}

}  // namespace ptxrun
