// Shared memory: bounds, bytes never written, races by vector clocks, missing proxy fences.
#pragma once

#include "global_memory.h"

namespace ptxrun {

inline u32 Machine::shared(Warp& w, const Inst& in, u64 a, u32 size, int lane, const char* what) {
  if (a % size)
    fault(w, in, fmt("misaligned shared %s of %u bytes at 0x%llx", what, size, (unsigned long long)a), lane);
  if (a < SHARED_BASE || a + size > shared_limit)
    fault(w, in,
          fmt("%s of %u bytes at shared address 0x%llx, outside of [0x%x, 0x%x)", what, size, (unsigned long long)a,
              SHARED_BASE, shared_limit),
          lane);
  return (u32)a;
}

inline void Machine::race(Warp& w, const Inst& in, u32 off, const char* mine, const char* theirs, u32 line, u32 agent_,
                          int lane) {
  static const char* names[AGENTS] = {"", " (its cp.async)", " (its wgmma)"};
  report("race", w, in,
         fmt("%s shared 0x%x, not ordered after the %s by warp %d%s", mine, off, theirs, agent_ % warps,
             names[agent_ / warps]),
         line, lane);
}

inline void Machine::shared_read(Warp& w, const Inst& in, u32 off, u32 size, int lane) {
  if (c.uninit_shared)
    for (u32 i = 0; i < size; i++)
      if (!cta.init[off + i]) [[unlikely]]
        fault(w, in, fmt("reads shared 0x%x, which was never written", off + i), lane);
  if (!c.races) return;
  u32 me = w.id, clock = w.vc[me];
  for (u32 b = off & ~3u; b < off + size; b += 4) {
    auto& e = cta.we[b / 4];
    if (e.clock && e.agent != me && !before(w.vc, e.clock, e.agent)) [[unlikely]] {
      u8 mask = 0;
      for (u32 i = 0; i < 4; i++)
        if (b + i >= off && b + i < off + size) mask |= 1 << i;
      if (mask & e.mask) race(w, in, b, "reads", "write", e.line, e.agent, lane);
    }
    cta.re[(size_t)(b / 4) * warps + me] = {clock, in.line};
  }
}

// Layouts of Triton may have several warps write the same value to one place: not reported.
inline bool Machine::same_value(u32 b, u32 off, u32 size, const u8* data) const {
  if (!data) return false;
  for (u32 i = b; i < b + 4; i++)
    if (i >= off && i < off + size && cta.smem[i] != data[i - off]) return false;
  return true;
}

inline void Machine::mark_write(Warp& w, const Inst& in, u32 off, u32 size, int lane, u32 as, u32 clock,
                                const u8* data) {
  memset(&cta.init[off], 1, size);
  if (!cta.mbars.empty()) {
    auto k = cta.mbars.lower_bound(off & ~7u);
    if (k != cta.mbars.end() && k->first < off + size)
      fault(w, in, fmt("writes over the mbarrier at shared 0x%x", k->first), lane);
  }
  if (!c.races) return;
  for (u32 b = off & ~3u; b < off + size; b += 4) {
    u8 mask = 0;
    for (u32 i = 0; i < 4; i++)
      if (b + i >= off && b + i < off + size) mask |= 1 << i;
    auto& e = cta.we[b / 4];
    bool mine = e.agent == as || e.agent == (u32)w.id;
    if (e.clock && !mine && (mask & e.mask) && !before(w.vc, e.clock, e.agent) && !same_value(b, off, size, data))
      race(w, in, b, "writes", "write", e.line, e.agent, lane);
    ReadEpoch* r = &cta.re[(size_t)(b / 4) * warps];
    for (int g = 0; g < warps; g++)
      if (r[g].clock > w.vc[g] && g != w.id) {
        race(w, in, b, "writes", "read", r[g].line, g, lane);
        r[g].clock = 0;
      }
    if (e.clock && mine && e.clock == clock && e.agent == as)
      e.mask |= mask;
    else
      e = {clock, (u16)as, mask, in.line};
    e.line = in.line;
  }
  for (u32 g = off / 16; g <= (off + size - 1) / 16; g++) {
    ReadEpoch* r = &cta.are[(size_t)g * warps];
    for (int a = 0; a < warps; a++)
      if (r[a].clock > w.vc[WGMMA * warps + a]) {
        race(w, in, g * 16, "writes", "read", r[a].line, WGMMA * warps + a, lane);
        r[a].clock = 0;
      }
  }
}

inline void Machine::shared_write(Warp& w, const Inst& in, u32 off, u32 size, int lane, const u8* data) {
  mark_write(w, in, off, size, lane, w.id, w.vc[w.id], data);
}

inline void Machine::async_read(Warp& w, const Inst& in, u32 off, u32 size, u32 clock, const Clock& vc,
                                const Clock& pvc) {
  if (c.uninit_shared)
    for (u32 i = 0; i < size; i++)
      if (!cta.init[off + i]) fault(w, in, fmt("reads shared 0x%x, which was never written", off + i));
  if (!c.races) return;
  for (u32 b = off & ~3u; b < off + size; b += 4) {
    auto& e = cta.we[b / 4];
    if (!e.clock) continue;
    if (!before(vc, e.clock, e.agent))
      race(w, in, b, "reads", "write", e.line, e.agent, -1);
    else if (!before(pvc, e.clock, e.agent))
      report("proxy", w, in,
             fmt("the asynchronous proxy reads shared 0x%x, written by warp %d without fence.proxy.async since", b,
                 e.agent % warps),
             e.line);
  }
  for (u32 g = off / 16; g <= (off + size - 1) / 16; g++) cta.are[(size_t)g * warps + w.id] = {clock, in.line};
}

inline void Machine::release(Warp& w, Clock& vc, Clock& pvc) {
  if (vc.empty()) vc.resize(AGENTS * warps), pvc.resize(AGENTS * warps);
  join(vc, w.vc);
  join(pvc, w.pvc);
  w.vc[w.id]++;
}

inline void Machine::acquire(Warp& w, const Clock& vc, const Clock& pvc) {
  join(w.vc, vc);
  join(w.pvc, pvc);
}

}  // namespace ptxrun
