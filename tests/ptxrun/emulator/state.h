// The state of running CTAs and warps, and what a launch counts and reports.
#pragma once

#include "module.h"

namespace ptxrun {

// Global memory that a launch may touch. `writer` and `reader` hold, for each byte, the number + 1 of the CTA that last
// wrote and read it other than by atomics (0: none); they are null where races are not looked for.
constexpr int kAccessedShift = 12;
struct Region {
  u64 base, end;
  bool readonly;
  string name;
  u32 *writer = nullptr, *reader = nullptr;
  u8* accessed = nullptr;  // for each 2^kAccessedShift bytes, whether either was set
};

// Options of ptxrun.py's `Module.launch`, where `timing_random` is called `timing`.
struct Config {
  u64 seed = 0;
  int threads = 1;
  u64 limit = 0;
  bool uninit_regs = true, uninit_shared = true, races = true, global_races = true;
  bool approx = false;
  int mma = 0;
  int quantum = 24;
  bool timing_random = true;
  bool wgmma_registers = true;
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
// An agent is a warp, its cp.async, its wgmma or its bulk copies (Machine::agent). A vector clock holds, for every
// agent, how much of its work is ordered before the owner of the clock.
using Clock = vector<u32>;

inline void join(Clock& a, const Clock& b) {
  for (size_t i = 0; i < a.size(); i++) a[i] = std::max(a[i], b[i]);
}

// The last write of a 4-byte word of shared memory: which of its bytes, and whether by the asynchronous proxy.
struct WriteEpoch {
  u32 clock;
  u16 agent;
  u8 mask, async;
  u32 line;
};

struct ReadEpoch {
  u32 clock, line;
};

// A barrier of a CTA (or of the cluster). `vc` joins what its arrivals released, `pvc` the part of it that the
// asynchronous proxy may see. All pairs of these names have this meaning.
struct Barrier {
  int expected = 0, arrived = 0;
  vector<int> waiting;
  Clock vc, pvc;
  u32 line = 0;
  u32 pop = 0;  // the count of bar.red; for the cluster's barrier, its phase
  bool all_and = true, any = false;
};

struct MBar {
  u32 expected = 0, pending = 0;
  i64 tx = 0;
  u64 phase = 0;
  Clock vc, pvc, done_vc, done_pvc;  // of the phase at hand, and of the last that was completed
  u32 line = 0;
};

// -------------------------------------------------------------------------------------------- CTAs, warps
struct Cta {
  int rank = 0;  // in its cluster
  u32 id[3];
  u64 linear = 0;
  vector<u8> smem, init;      // shared memory, and which of its bytes were written
  vector<WriteEpoch> we;      // by 4-byte word
  vector<ReadEpoch> re, are;  // by word and warp; by 16 bytes and reader of the asynchronous proxy
  std::map<int, Barrier> bars;
  std::map<u32, MBar> mbars;
  int live = 0;                // warps that have not ended
  bool synced_global = false;  // an atomic or synchronising load of global memory was executed: reads may be ordered
  vector<Warp> warps;
};

// An entry of the stack of divergence: lanes that go together and wait for the others at `rpc`.
struct Entry {
  int pc, rpc;
  u32 mask;
  int func, frame;
};

// A cp.async that has not been waited for.
struct Copy {
  int lane;
  u32 group, clock;
  u32 dst;
  u64 src;
  u8 bytes, from_src;
  u32 line;
  bool landed;
  const Inst* in;
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

enum Status : u8 { RUN, AT_BARRIER, AT_MBARRIER, AT_CLUSTER, DONE };

struct Warp {
  Cta* cta = nullptr;
  int id = 0, gid = 0;  // in the CTA, in the cluster
  u32 alive = 0;        // lanes that have not ended
  vector<Entry> st;
  Status status = RUN;
  u64 ic = 0;  // instructions so far

  // Registers, 32 lanes each: values, lanes that were written, instruction of the last write, and whether a wgmma in
  // flight writes (1) or reads (2) them.
  vector<u64> reg;
  vector<u32> def;
  vector<u64> stamp;
  vector<u8> infl;
  int n_infl = 0;
  vector<u8> local;
  u64 cc = 0;  // carry flags
  u64 tmp[8][32];
  int ntmp = 0;
  u64 tidx[32], tidy[32], tidz[32];

  Clock vc, pvc;
  int barrier = -1;
  bool resumed = false;
  u32 bar_pop = 0;
  bool bar_and = false, bar_or = false;
  u32 wait_mbar = 0;
  Cta* wait_cta = nullptr;

  std::deque<Copy> copies;
  u32 group[32] = {};
  u32 cp_clock = 0;
  std::deque<WgOp> wg;
  u32 wg_group = 0, wg_clock = 0;
  u64 wg_count = 0, fence_stamp = 0;  // wgmma so far; instruction of the last wgmma.fence
  u32 bulk_group[32] = {};
  u32 bulk_clock = 0;

  Entry& top() { return st.back(); }
};

// Asynchronous work that lands at some later moment: a bulk copy or st.async that completes on an mbarrier (kind 0),
// a bulk copy of a bulk group (1), arrivals behind cp.async (2).
struct Pending {
  std::function<void()> land;
  u8 kind;
  int gid;
  int lane;
  u32 group;
};

struct Report {
  string kind, text;
  u64 count;
};

// By instruction: how often a warp executed it, lanes, sectors or passes over the banks (`units`), how many of them
// its bytes need at least, and bytes. For products `units` are operations.
struct Stats {
  vector<u64> n, lanes, units, ideal, bytes;
  u64 warp_class[64][C_COUNT] = {};
  u64 instructions = 0;
};

}  // namespace ptxrun
