// Registers, special registers and operands.
#pragma once

#include "machine.h"

namespace ptxrun {

[[noreturn]] inline void Machine::bad_read(Warp& w, const Inst& in, const Op& o, u32 mask) {
  int lane = std::countr_zero(mask & ~w.def[o.r]);
  fault(w, in,
        (w.infl[o.r] ? "reads register " : "reads never-written register ") + kernel.reg_names[o.r] +
            (w.infl[o.r] ? ", which a wgmma in flight writes" : ""),
        lane);
}

inline const u64* Machine::special(Warp& w, int r) {
  u64* t = w.tmp[w.ntmp++ & 7];
  for (int l = 0; l < 32; l++) switch (r) {
      case TID_X: t[l] = w.id * 32 + l; break;
      case LANEID: t[l] = l; break;
      case NTID_X: t[l] = threads; break;
      case CTAID_X:
      case CTAID_Y:
      case CTAID_Z: t[l] = cta.id[r - CTAID_X]; break;
      default: t[l] = grid[r - NCTAID_X];
    }
  return t;
}

inline const u64* Machine::rd_other(Warp& w, const Inst& in, const Op& o, u32 mask) {
  switch (o.k) {
    case REG:
      if (mask & ~w.def[o.r]) [[unlikely]]
        if (c.uninit_regs || w.infl[o.r]) bad_read(w, in, o, mask);
      if (o.neg) {
        u64* t = w.tmp[w.ntmp++ & 7];
        for (int l = 0; l < 32; l++) t[l] = !(w.reg[(size_t)o.r * 32 + l] & 1);
        return t;
      }
      return &w.reg[(size_t)o.r * 32];
    case IMM: return o.bc;
    case SREG: return special(w, o.r);
    default: fault(w, in, "an operand of this kind cannot be read");
  }
}

inline u64* Machine::wr(Warp& w, const Inst& in, const Op& o, u32 mask) {
  if (o.k == NONE) return w.tmp[w.ntmp++ & 7];
  if (o.k != REG) fault(w, in, "an operand of this kind cannot be written");
  if (w.n_infl && w.infl[o.r]) fault(w, in, "writes register " + kernel.reg_names[o.r] + " of a wgmma in flight");
  w.def[o.r] |= mask;
  return &w.reg[(size_t)o.r * 32];
}

// The address of a memory operand in each lane.
inline void Machine::address(Warp& w, const Inst& in, const Op& o, u32 mask, u64* out) {
  if (o.k != MEM) fault(w, in, "expected an address");
  const u64* b = rd(w, in, o.v[0], mask);
  bool narrow = o.v[0].k == REG && o.v[0].width == 32;
  for (int l = 0; l < 32; l++) out[l] = narrow ? (u32)(b[l] + o.off) : b[l] + o.off;
}

inline u64 Machine::uniform(Warp& w, const Inst& in, const Op& o, u32 mask, const char* what) {
  const u64* a = rd(w, in, o, mask);
  int f = std::countr_zero(mask);
  for (u32 r = mask; r; r &= r - 1)
    if (a[std::countr_zero(r)] != a[f]) fault(w, in, string(what) + " differs between lanes", std::countr_zero(r));
  return a[f];
}

}  // namespace ptxrun
