// Registers, special registers and operands.
#pragma once

#include "machine.h"

namespace ptxrun {

[[noreturn]] inline void Machine::bad_read(Warp& w, const Inst& in, const Op& o, u32 mask) {
  int lane = std::countr_zero(mask & ~w.def[o.r]);
  fault(w, in,
        (w.infl[o.r] ? "reads register " : "reads never-written register ") + reg_name(o.r) +
            (w.infl[o.r] ? ", which a wgmma in flight writes" : ""),
        lane);
}

[[noreturn]] inline void Machine::bad_write(Warp& w, const Inst& in, const Op& o) {
  fault(w, in, "writes register " + reg_name(o.r) + " of a wgmma in flight");
}

inline string Machine::reg_name(int r) {
  if (r < kernel.nregs) return kernel.reg_names[r];
  for (auto& f : m.funcs)
    if (!f.entry)
      if (r >= f.regs0 && r < f.regs0 + f.nregs) return f.reg_names[r - f.regs0];
  return "?";
}

inline const u64* Machine::special(Warp& w, int r) {
  u64* t = w.tmp[w.ntmp++ & 7];
  u64 v = 0;
  switch (r) {
    case TID_X: return w.tidx;
    case TID_Y: return w.tidy;
    case TID_Z: return w.tidz;
    case NTID_X: v = block[0]; break;
    case NTID_Y: v = block[1]; break;
    case NTID_Z: v = block[2]; break;
    case CTAID_X: v = w.cta->id[0]; break;
    case CTAID_Y: v = w.cta->id[1]; break;
    case CTAID_Z: v = w.cta->id[2]; break;
    case NCTAID_X: v = grid[0]; break;
    case NCTAID_Y: v = grid[1]; break;
    case NCTAID_Z: v = grid[2]; break;
    case LANEID:
      for (int l = 0; l < 32; l++) t[l] = l;
      return t;
    case LM_EQ:
      for (int l = 0; l < 32; l++) t[l] = 1u << l;
      return t;
    case LM_LT:
      for (int l = 0; l < 32; l++) t[l] = (1u << l) - 1;
      return t;
    case LM_LE:
      for (int l = 0; l < 32; l++) t[l] = (2ull << l) - 1;
      return t;
    case LM_GE:
      for (int l = 0; l < 32; l++) t[l] = (u32) ~((1u << l) - 1);
      return t;
    case LM_GT:
      for (int l = 0; l < 32; l++) t[l] = (u32) ~((2ull << l) - 1);
      return t;
    case WARPID: v = w.id; break;
    case NWARPID: v = 64; break;
    case SMID: v = w.cta->linear % 132; break;
    case NSMID: v = 132; break;
    case CLOCK: v = (u32)(steps * 4); break;
    case CLOCK64: v = steps * 4; break;
    case GLOBALTIMER: v = 1000000000ull + steps * 32; break;
    case GLOBALTIMER_LO: v = (u32)(1000000000ull + steps * 32); break;
    case GLOBALTIMER_HI: v = (1000000000ull + steps * 32) >> 32; break;
    case DYN_SMEM: v = dynamic_shared; break;
    case TOTAL_SMEM: v = dynamic_shared + static_shared; break;
    case CL_ID_X: v = w.cta->id[0] / cluster[0]; break;
    case CL_ID_Y: v = w.cta->id[1] / cluster[1]; break;
    case CL_ID_Z: v = w.cta->id[2] / cluster[2]; break;
    case NCL_X: v = grid[0] / cluster[0]; break;
    case NCL_Y: v = grid[1] / cluster[1]; break;
    case NCL_Z: v = grid[2] / cluster[2]; break;
    case CL_CTAID_X: v = w.cta->id[0] % cluster[0]; break;
    case CL_CTAID_Y: v = w.cta->id[1] % cluster[1]; break;
    case CL_CTAID_Z: v = w.cta->id[2] % cluster[2]; break;
    case CL_NCTAID_X: v = cluster[0]; break;
    case CL_NCTAID_Y: v = cluster[1]; break;
    case CL_NCTAID_Z: v = cluster[2]; break;
    case CL_CTARANK: v = w.cta->rank; break;
    case CL_NCTARANK: v = ctas.size(); break;
    case IS_EXPLICIT_CLUSTER: v = ctas.size() > 1; break;
    default: v = 0;
  }
  for (int l = 0; l < 32; l++) t[l] = v;
  return t;
}

inline const u64* Machine::rd(Warp& w, const Inst& in, const Op& o, u32 mask) {
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
    case IMM:
      if (!o.bc) fault(w, in, "an immediate that has no value for this type");
      return o.bc;
    case SREG: return special(w, o.r);
    default: fault(w, in, "an operand of this kind cannot be read");
  }
}

inline u64* Machine::wr(Warp& w, const Inst& in, const Op& o, u32 mask) {
  if (o.k == NONE) return w.tmp[w.ntmp++ & 7];
  if (o.k != REG) fault(w, in, "an operand of this kind cannot be written");
  if (w.n_infl && w.infl[o.r]) bad_write(w, in, o);
  w.def[o.r] |= mask;
  w.stamp[o.r] = w.ic;
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
