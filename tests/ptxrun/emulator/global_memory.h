// Global memory: bounds, alignment, races between CTAs.
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

[[gnu::always_inline]] inline u8* Machine::global(Warp& w, const Inst& in, int lane, u64 a, u32 size, bool write) {
  if (a & (size - 1))
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
  if (r->writer) {
    u32 me = (u32)cta.linear + 1;
    u64 b = a - r->base;
    r->accessed[b >> kAccessedShift] = 1;
    u32 *writers = r->writer + b, *readers = r->reader + b;
    bool raced = false;
    by_size(size, [&](auto z) {
      for (u32 i = 0; i < sizeof z; i++)
        raced |= (writers[i] && writers[i] != me) | (write && readers[i] && readers[i] != me);
      for (u32 i = 0; i < sizeof z && !(raced && c.global_races); i++) (write ? writers : readers)[i] = me;
    });
    for (u32 i = 0; i < size && raced && c.global_races; i++) {
      const char* how = write && readers[i] && readers[i] != me ? "read" : nullptr;
      if (writers[i] && writers[i] != me) how = "written";
      if (how) {
        report("global race", w, in,
               fmt("%s byte %llu of region %s, %s by CTA %u in the same launch", write ? "writes" : "reads",
                   (unsigned long long)(b + i), r->name.c_str(), how, (how[0] == 'w' ? writers : readers)[i] - 1),
               0, lane);
        break;
      }
      (write ? writers : readers)[i] = me;
    }
  }
  return (u8*)a;
}

inline void Machine::count(const Inst& in, u64 units, u64 ideal, u64 bytes) {
  stats.units[in.uid] += units;
  stats.ideal[in.uid] += ideal;
  stats.bytes[in.uid] += bytes;
}

}  // namespace ptxrun
