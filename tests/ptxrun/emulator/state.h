// The state of a running CTA and its warps, and what a launch counts and reports.
#pragma once

#include "module.h"

namespace ptxrun {

// Global memory that a launch may touch. `writer` and `reader` hold, for each byte, the number + 1 of the CTA that last
// wrote and read it (0: none); they are null where races are not looked for.
constexpr int kAccessedShift = 12;
struct Region {
  u64 base, end;
  bool readonly;
  string name;
  u32 *writer = nullptr, *reader = nullptr;
  u8* accessed = nullptr;  // for each 2^kAccessedShift bytes, whether either was set
};

// Options of ptxrun.py's `Module.launch`, which has their defaults.
struct Config {
  u64 seed, limit;
  u32 uninit_regs, uninit_shared, races, global_races, approx, mma, quantum, timing, touched;
};

struct Rng {
  u64 s;

  explicit Rng(u64 x = 1) : s(x * 0x9E3779B97F4A7C15ull + 0x1234567) {}

  u64 operator()() {
    u64 z = (s += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }

  u32 below(u32 n) { return (u32)((*this)() % n); }
};

// ------------------------------------------------------------------------------------------------- order
// An agent is a warp, its cp.async or its wgmma (Machine::agent). A vector clock holds, for every agent, how much of
// its work is ordered before the owner of the clock.
using Clock = vector<u32>;
enum Agent { WARP, CP_ASYNC, WGMMA, AGENTS };

inline void join(Clock& a, const Clock& b) {
  for (size_t i = 0; i < a.size(); i++) a[i] = std::max(a[i], b[i]);
}

// The last write of a 4-byte word of shared memory, and which of its bytes.
struct WriteEpoch {
  u32 clock;
  u16 agent;
  u8 mask;
  u32 line;
};

struct ReadEpoch {
  u32 clock, line;
};

// Reads of 16 bytes by a warp: the last by its wgmma, and the clock of the last by itself of any byte.
struct GranuleReads : ReadEpoch {
  u32 own;
};

// A barrier of a CTA. `vc` joins what its arrivals released, `pvc` the part of it that the asynchronous proxy may see.
// All pairs of these names have this meaning.
struct Barrier {
  int expected = 0, arrived = 0;
  vector<int> waiting;
  Clock vc, pvc;
  u32 line = 0;
};

struct MBar {
  u32 expected = 0, pending = 0;
  u64 phase = 0;
  Clock vc, pvc, done_vc, done_pvc;  // of the phase at hand, and of the last that was completed
  u32 line = 0;
};

// ---------------------------------------------------------------------------------------------- CTA, warps

// An entry of the stack of divergence: lanes that go together and wait for the others at `rpc`.
struct Entry {
  int pc, rpc;
  u32 mask;
};

// A cp.async that has not been waited for.
struct Copy {
  int lane;
  u32 group, clock;
  u32 dst;
  u64 src;
  u8 bytes, from_src;
  bool landed;
};

// A wgmma that has not been waited for; `done`: its result is in the registers already.
struct WgOp {
  const Inst* in;
  u64 a, b;
  bool scale_d;
  u32 group, clock;
  bool done;
  Clock vc, pvc;  // of the warp at the issue: later waits and proxy fences do not order what this reads
};

enum Status : u8 { RUN, AT_BARRIER, AT_MBARRIER, DONE };

struct Warp {
  int id = 0;
  u32 alive = 0;  // lanes that have not ended
  vector<Entry> st;
  Status status = RUN;

  // Registers, 32 lanes each: values, lanes that were written, and whether a wgmma in flight writes (1) or reads (2)
  // them.
  vector<u64> reg;
  vector<u32> def;
  vector<u8> infl;
  int n_infl = 0;
  u64 tmp[8][32];
  int ntmp = 0;

  Clock vc, pvc;
  bool at_barrier = false, resumed = false;
  u32 wait_mbar = 0;

  std::deque<Copy> copies;
  u32 group[32] = {};
  u32 cp_clock = 0;
  std::deque<WgOp> wg;
  u32 wg_group = 0, wg_clock = 0;
  bool fenced = false;  // by wgmma.fence

  Entry& top() { return st.back(); }
};

struct Cta {
  u32 id[3];
  u64 linear = 0;
  vector<u8> smem, init;  // shared memory, and which of its bytes were written
  vector<WriteEpoch> we;  // by 4-byte word
  vector<ReadEpoch> re;   // by warp and word
  vector<GranuleReads> are;  // by 16 bytes and warp
  std::map<int, Barrier> bars;
  std::map<u32, MBar> mbars;
  int live = 0;  // warps that have not ended
  vector<Warp> warps;

  ReadEpoch& reader(u32 warp, u32 off) { return re[warp * we.size() + off / 4]; }
};

struct Report {
  string kind, text;
  u64 count;
};

// By instruction: how often a warp executed it, lanes, sectors or passes over the banks (`units`), how many of them
// its bytes need at least, and bytes. For products `units` are operations.
struct Stats {
  vector<u64> n, lanes, units, ideal, bytes;
  u64 instructions = 0;
};

}  // namespace ptxrun
