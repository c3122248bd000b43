// A launch: one CTA after the other. Instructions access registers and memory through `Machine`, which checks them.
//
// A handler executes one instruction for the lanes `m` of warp `w` of machine `x`; HANDLER(name) declares it.
#pragma once

#include "state.h"

namespace ptxrun {

#define HANDLER(name) static void name(Machine& x, Warp& w, const Inst& in, u32 m)

template <class F>
inline void lanes(u32 m, F f) {
  if (m == ~0u)
    for (int l = 0; l < 32; l++) f(l);
  else
    for (; m; m &= m - 1) f(std::countr_zero(m));
}

// Of a function that touches nothing but its lane of registers, so that lanes are vectorised.
template <class F>
[[gnu::flatten]] inline void each_lane(u32 m, F f) {
  if (m != ~0u) return lanes(m, f);
#pragma GCC ivdep
  for (int l = 0; l < 32; l++) f(l);
}

// Calls f with an integer of as many bytes, so that loops over them are compiled for this size.
template <class F>
inline void by_size(u32 bytes, F f) {
  switch (bytes) {
    case 1: return f(u8{});
    case 2: return f(u16{});
    case 4: return f(u32{});
    case 8: return f(u64{});
    case 16: return f((unsigned __int128)0);
    default: throw Fault(fmt("an access of %u bytes", bytes));
  }
}

// Its megabytes remain from launch to launch: the system needs longer to hand them out than most launches take.
inline thread_local Cta kept;

struct Machine {
  Module& m;
  Func& kernel;
  Config c;
  Rng rng;
  vector<Region>& regions;
  Cta& cta = kept;
  int warps = 0;
  u32 threads = 0, grid[3];
  u32 shared_limit = 0;
  const u8* params;
  Stats stats;
  std::map<string, Report> reports;
  Region* last_region = nullptr;
  u64 steps = 0;
  Warp* current = nullptr;
  const Inst* now = nullptr;

  Machine(Module& mm, Func& k, Config cc, vector<Region>& r) : m(mm), kernel(k), c(cc), rng(cc.seed), regions(r) {}

  // Where an instruction is, faults (which end a launch) and reports (which do not).
  string where(const Warp& w, const Inst& in, int lane = -1);
  [[noreturn]] void fault(const Warp& w, const Inst& in, const string& what, int lane = -1);
  void report(const char* kind, const Warp& w, const Inst& in, const string& what, u32 other_line, int lane = -1);

  int agent(Agent kind, const Warp& w) const { return kind * warps + w.id; }

  // registers.h
  [[noreturn]] void bad_read(Warp& w, const Inst& in, const Op& o, u32 mask);
  const u64* special(Warp& w, int r);
  const u64* rd_other(Warp& w, const Inst& in, const Op& o, u32 mask);

  [[gnu::always_inline]] const u64* rd(Warp& w, const Inst& in, const Op& o, u32 mask) {
    return o.k == REG && !o.neg && !(mask & ~w.def[o.r]) ? &w.reg[(size_t)o.r * 32] : rd_other(w, in, o, mask);
  }

  const u64* rd(Warp& w, const Inst& in, int i, u32 mask) { return rd(w, in, in.o[i], mask); }

  u64* wr(Warp& w, const Inst& in, const Op& o, u32 mask);

  u64* wr(Warp& w, const Inst& in, int i, u32 mask) { return wr(w, in, in.o[i], mask); }

  // The address of a memory operand in each lane.
  void address(Warp& w, const Inst& in, const Op& o, u32 mask, u64* out);
  u64 uniform(Warp& w, const Inst& in, const Op& o, u32 mask, const char* what);

  // global_memory.h
  Region* region(u64 a, u32 size);
  u8* global(Warp& w, const Inst& in, int lane, u64 a, u32 size, bool write);
  void count(const Inst& in, u64 units, u64 ideal, u64 bytes);

  // shared_memory.h
  // Checks an address in shared memory, and returns it.
  u32 shared(Warp& w, const Inst& in, u64 a, u32 size, int lane, const char* what);

  bool before(const Clock& vc, u32 clock, u32 agent) const { return clock <= vc[agent]; }

  void race(Warp& w, const Inst& in, u32 off, const char* mine, const char* theirs, u32 line, u32 agent_, int lane);
  template <class Z>
  void written(Warp& w, const Inst& in, u32 off, Z z, int lane);
  void shared_read(Warp& w, const Inst& in, u32 off, u32 size, int lane);
  // Layouts of Triton may have several warps write the same value to one place: not reported.
  bool same_value(u32 b, u32 off, u32 size, const u8* data) const;
  // Agent `as` writes on behalf of `w`, whose clock orders the write.
  void mark_write(Warp& w, const Inst& in, u32 off, u32 size, int lane, u32 as, u32 clock, const u8* data = nullptr);
  void shared_write(Warp& w, const Inst& in, u32 off, u32 size, int lane, const u8* data = nullptr);
  // A read of 16 bytes by wgmma. Writes have to be ordered before it by `vc` and by `pvc`.
  void async_read(Warp& w, const Inst& in, u32 off, u32 clock, const Clock& vc, const Clock& pvc);
  // Agents that acquire `vc` and `pvc` later are ordered after the work of `w` before the release.
  void release(Warp& w, Clock& vc, Clock& pvc);
  void acquire(Warp& w, const Clock& vc, const Clock& pvc);

  // The rest
  void step(Warp& w);
  void run_cta(u64 number);
  void wake_barrier(int id);
  void land(Warp& w, Copy& k);
  void compute_wgmma(Warp& w, WgOp& g);
};

inline string Machine::where(const Warp& w, const Inst& in, int lane) {
  string t = fmt("kernel %s, PTX line %u, CTA (%u,%u,%u), warp %d", kernel.name.c_str(), in.line, cta.id[0], cta.id[1],
                 cta.id[2], w.id);
  if (lane >= 0) t += fmt(", thread %d", w.id * 32 + lane);
  string l = m.lines[in.line - 1];
  l.erase(0, l.find_first_not_of(" \t"));
  return t + ": " + l.substr(0, 160);
}

[[noreturn]] inline void Machine::fault(const Warp& w, const Inst& in, const string& what, int lane) {
  throw Fault(what + "\n  at " + where(w, in, lane));
}

inline void Machine::report(const char* kind, const Warp& w, const Inst& in, const string& what, u32 other_line,
                            int lane) {
  string key = fmt("%s %u %u ", kind, in.line, other_line);
  auto& r = reports[key];
  if (!r.count++) {
    r.kind = kind;
    r.text = what + "\n  at " + where(w, in, lane);
    if (other_line) {
      string l = m.lines[other_line - 1];
      l.erase(0, l.find_first_not_of(" \t"));
      r.text += fmt("\n  other: PTX line %u: ", other_line) + l.substr(0, 160);
    }
  }
}

}  // namespace ptxrun
