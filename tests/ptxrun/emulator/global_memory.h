// Global and local memory: bounds, alignment, races between CTAs; generic addresses.
#pragma once

#include "registers.h"

namespace ptxrun {

inline Region* Machine::region(u64 a, u32 size) {
  if (last_region && a >= last_region->base && a + size <= last_region->end) return last_region;
  size_t lo = 0, hi = regions.size();
  while (lo < hi) {
    size_t mid = (lo + hi) / 2;
    if (regions[mid].base <= a)
      lo = mid + 1;
    else
      hi = mid;
  }
  if (!lo) return nullptr;
  Region* r = &regions[lo - 1];
  if (a >= r->base && a + size <= r->end) return last_region = r;
  return nullptr;
}

inline u8* Machine::global(Warp& w, const Inst& in, int lane, u64 a, u32 size, bool write, bool atomic) {
  if (a % size)
    fault(w, in,
          fmt("misaligned global %s of %u bytes at 0x%llx", write ? "write" : "read", size, (unsigned long long)a),
          lane);
  Region* r = region(a, size);
  if (!r) [[unlikely]] {
    string near = "no region registered";
    u64 best = ~0ull;
    for (auto& x : regions) {
      u64 d = a < x.base ? x.base - a : a >= x.end ? a - x.end + 1 : 0;
      if (d < best) {
        best = d;
        near = fmt("nearest region %s [0x%llx, +%llu), offset %lld", x.name.c_str(), (unsigned long long)x.base,
                   (unsigned long long)(x.end - x.base), (long long)(a - x.base));
      }
    }
    fault(
        w, in,
        fmt("%u-byte global %s out of all regions at 0x%llx; ", size, write ? "write" : "read", (unsigned long long)a) +
            near,
        lane);
  }
  if (write && r->readonly)
    fault(w, in, fmt("writes read-only region %s at offset %llu", r->name.c_str(), (unsigned long long)(a - r->base)),
          lane);
  if (r->writer && !atomic) {
    u32 me = (u32)w.cta->linear + 1;
    u64 b = a - r->base;
    __atomic_store_n(&r->accessed[b >> kAccessedShift], 1, __ATOMIC_RELAXED);
    for (u32 i = 0; i < size; i++) {
      u32 ww = __atomic_load_n(&r->writer[b + i], __ATOMIC_RELAXED);
      if (c.global_races && ww && ww != me && (write || !w.cta->synced_global)) {
        report("global race", w, in,
               fmt("%s byte %llu of region %s, written by CTA %u in the same launch", write ? "writes" : "reads",
                   (unsigned long long)(b + i), r->name.c_str(), ww - 1),
               0, lane);
        break;
      }
      if (write) {
        u32 rr = __atomic_load_n(&r->reader[b + i], __ATOMIC_RELAXED);
        if (c.global_races && rr && rr != me && !w.cta->synced_global) {
          report("global race", w, in,
                 fmt("writes byte %llu of region %s, read by CTA %u in the same launch", (unsigned long long)(b + i),
                     r->name.c_str(), rr - 1),
                 0, lane);
          break;
        }
        __atomic_store_n(&r->writer[b + i], me, __ATOMIC_RELAXED);
      } else
        __atomic_store_n(&r->reader[b + i], me, __ATOMIC_RELAXED);
    }
  }
  return (u8*)a;
}

inline u8* Machine::local(Warp& w, const Inst& in, int lane, u64 a, u32 size) {
  if (a % size) fault(w, in, fmt("misaligned local access of %u bytes at 0x%llx", size, (unsigned long long)a), lane);
  if (a + size > (u64)m.total_local)
    fault(w, in, fmt("local access at 0x%llx out of range", (unsigned long long)a), lane);
  return &w.local[(size_t)lane * m.total_local + a];
}

inline Machine::Place Machine::place(Warp& w, const Inst& in, int lane, Space s, u64 a, u32 size, bool write,
                                     bool atomic) {
  if (s == GENERIC) {
    u64 tag = a & WINDOW_MASK;
    if (tag == GENERIC_SHARED)
      s = SHARED, a &= ~WINDOW_MASK;
    else if (tag == GENERIC_LOCAL)
      s = LOCAL, a &= ~WINDOW_MASK;
    else
      s = GLOBAL;
  }
  if (s == SHARED) {
    u32 off;
    Cta* t = owner_aligned(w, in, a, size, lane, off, write ? "write" : "read");
    return {SHARED, &t->smem[off], t, off};
  }
  if (s == LOCAL) return {LOCAL, local(w, in, lane, a, size), nullptr, (u32)a};
  if (s == CONST && write) fault(w, in, "a write to constant memory", lane);
  return {GLOBAL, global(w, in, lane, a, size, write, atomic), nullptr, 0};
}

inline void Machine::count(const Inst& in, u64 units, u64 ideal, u64 bytes) {
  stats.units[in.uid] += units;
  stats.ideal[in.uid] += ideal;
  stats.bytes[in.uid] += bytes;
}

}  // namespace ptxrun
