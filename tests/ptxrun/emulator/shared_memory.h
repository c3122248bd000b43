// Shared memory: bounds, bytes never written, races by vector clocks, missing proxy fences.
#pragma once

#include "global_memory.h"

namespace ptxrun {

[[gnu::always_inline]] inline u32 Machine::shared(Warp& w, const Inst& in, u64 a, u32 size, int lane, const char* what) {
  if (a & (size - 1))
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

// Whether all bytes were written; their marks are 1 each.
template <class Z>
void Machine::written(Warp& w, const Inst& in, u32 off, Z z, int lane) {
  memcpy(&z, &cta.init[off], sizeof z);
  if (!c.uninit_shared || z == Z(~Z(0)) / 255) return;
  for (u32 i = 0; i < sizeof z; i++)
    if (!cta.init[off + i]) fault(w, in, fmt("reads shared 0x%x, which was never written", off + i), lane);
}

// Of the 4-byte word of an access, which bytes it touches.
inline u8 mask_of(u32 off, u32 size) { return size < 4 ? ((1 << size) - 1) << (off & 3) : 15; }

inline void Machine::shared_read(Warp& w, const Inst& in, u32 off, u32 size, int lane) {
  by_size(size, [&](auto z) {
    written(w, in, off, z, lane);
    if (!c.races) return;
    u32 me = w.id, clock = cta.are[(size_t)(off / 16) * warps + me].own = w.vc[me];
    for (u32 b = off & ~3u; b < (off & ~3u) + sizeof z; b += 4) {
      auto& e = cta.we[b / 4];
      if (!before(w.vc, e.clock, e.agent) && e.agent != me && (mask_of(off, size) & e.mask)) [[unlikely]]
        race(w, in, b, "reads", "write", e.line, e.agent, lane);
      cta.reader(me, b) = {clock, in.line};
    }
  });
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
  if (!cta.mbars.empty()) {
    auto k = cta.mbars.lower_bound(off & ~7u);
    if (k != cta.mbars.end() && k->first < off + size)
      fault(w, in, fmt("writes over the mbarrier at shared 0x%x", k->first), lane);
  }
  by_size(size, [&](auto z) {
    constexpr u32 n = sizeof z;
    memset(&cta.init[off], 1, n);
    if (!c.races) return;
    u8 mask = mask_of(off, n);
    u32 first = off & ~3u;
    GranuleReads* r = &cta.are[(size_t)(off / 16) * warps];
    bool late = false;  // reads that are not ordered before, if maybe of other words
    for (int g = 0; g < warps; g++) late |= (r[g].own > w.vc[g]) | (r[g].clock > w.vc[WGMMA * warps + g]);
    for (u32 b = first; b < first + n; b += 4) {
      auto& e = cta.we[b / 4];
      bool mine = e.agent == as || e.agent == (u32)w.id;
      if (!mine && !before(w.vc, e.clock, e.agent) && (mask & e.mask) && !same_value(b, off, size, data))
        race(w, in, b, "writes", "write", e.line, e.agent, lane);
      for (int g = 0; g < warps && late; g++)
        if (auto& e = cta.reader(g, b); e.clock > w.vc[g] && g != w.id) {
          race(w, in, b, "writes", "read", e.line, g, lane);
          e.clock = 0;
        }
      if (e.clock && mine && e.clock == clock && e.agent == as)
        e.mask |= mask;
      else
        e = {clock, (u16)as, mask, in.line};
      e.line = in.line;
    }
    for (int a = 0; a < warps && late; a++)
      if (r[a].clock > w.vc[WGMMA * warps + a]) [[unlikely]] {
        race(w, in, off & ~15u, "writes", "read", r[a].line, WGMMA * warps + a, lane);
        r[a].clock = 0;
      }
  });
}

inline void Machine::shared_write(Warp& w, const Inst& in, u32 off, u32 size, int lane, const u8* data) {
  mark_write(w, in, off, size, lane, w.id, w.vc[w.id], data);
}

inline void Machine::async_read(Warp& w, const Inst& in, u32 off, u32 clock, const Clock& vc,
                                const Clock& pvc) {
  written(w, in, off, (unsigned __int128)0, -1);
  if (!c.races) return;
  for (u32 b = off; b < off + 16; b += 4) {
    auto& e = cta.we[b / 4];
    if (!before(vc, e.clock, e.agent)) [[unlikely]]
      race(w, in, b, "reads", "write", e.line, e.agent, -1);
    else if (!before(pvc, e.clock, e.agent)) [[unlikely]]
      report("proxy", w, in,
             fmt("the asynchronous proxy reads shared 0x%x, written by warp %d without fence.proxy.async since", b,
                 e.agent % warps),
             e.line);
  }
  auto& r = cta.are[(size_t)(off / 16) * warps + w.id];
  r = {{clock, in.line}, r.own};
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
