// What a parsed PTX module consists of.
#pragma once

#include "formats.h"

namespace ptxrun {

enum Kind : u8 { NONE, REG, IMM, SREG, MEM, VEC, LABEL, FUNC };

enum Space : u8 { GENERIC, GLOBAL, SHARED, LOCAL, PARAM, CONST };

enum Sreg : u8 {
  TID_X,
  TID_Y,
  TID_Z,
  NTID_X,
  NTID_Y,
  NTID_Z,
  CTAID_X,
  CTAID_Y,
  CTAID_Z,
  NCTAID_X,
  NCTAID_Y,
  NCTAID_Z,
  LANEID,
  WARPID,
  NWARPID,
  SMID,
  NSMID,
  GRIDID,
  CLOCK,
  CLOCK64,
  GLOBALTIMER,
  GLOBALTIMER_LO,
  GLOBALTIMER_HI,
  LM_EQ,
  LM_LE,
  LM_LT,
  LM_GE,
  LM_GT,
  DYN_SMEM,
  TOTAL_SMEM,
  CL_ID_X,
  CL_ID_Y,
  CL_ID_Z,
  NCL_X,
  NCL_Y,
  NCL_Z,
  CL_CTAID_X,
  CL_CTAID_Y,
  CL_CTAID_Z,
  CL_NCTAID_X,
  CL_NCTAID_Y,
  CL_NCTAID_Z,
  CL_CTARANK,
  CL_NCTARANK,
  IS_EXPLICIT_CLUSTER
};

struct Op {
  Kind k = NONE;
  bool neg = false;
  u8 width = 0;
  Space space = GENERIC;
  bool literal = false;  // a floating-point literal, held as a double
  int r = -1;
  i64 off = 0;
  const u64* bc = nullptr;  // an immediate in all lanes
  vector<Op> v;
};
struct Machine;
struct Warp;
struct Inst;
using Handler = void (*)(Machine&, Warp&, const Inst&, u32 mask);

enum Class : u8 {
  C_INT,
  C_MOVE,
  C_LOGIC,
  C_COMPARE,
  C_CVT,
  C_FP32,
  C_FP64,
  C_HALF,
  C_SFU,
  C_BRANCH,
  C_PARAM,
  C_LDG,
  C_STG,
  C_LDS,
  C_STS,
  C_LDL,
  C_ATOMIC,
  C_CPASYNC,
  C_BULK,
  C_LDMATRIX,
  C_MMA,
  C_WGMMA,
  C_WGSYNC,
  C_BARRIER,
  C_MBARRIER,
  C_FENCE,
  C_SHUFFLE,
  C_OTHER,
  C_COUNT
};

inline const char* class_names[] = {
    "int",   "move",      "logic",      "compare",   "cvt",       "fp32",  "fp64",    "half",     "sfu",  "branch",
    "param", "ld_global", "st_global",  "ld_shared", "st_shared", "local", "atomic",  "cp_async", "bulk", "ldmatrix",
    "mma",   "wgmma",     "wgmma_sync", "barrier",   "mbarrier",  "fence", "shuffle", "other"};

struct Inst {
  Handler fn = nullptr;
  string name;
  vector<string> mods;
  vector<Op> o;
  T t = TNONE, t2 = TNONE;
  u32 line = 0;
  int pred = -1;
  bool pneg = false;
  Class cls = C_OTHER;
  Round rm = RN;
  bool ftz = false, sat = false, relu = false, satfinite = false;
  Space space = GENERIC, space2 = GENERIC;
  int a = 0, b = 0, c = 0, d = 0;
  int target = -1, rpc = -1;
  int func = -1;
  int uid = 0;

  bool has(const char* s) const { return std::find(mods.begin(), mods.end(), s) != mods.end(); }
};

struct Param {
  string name;
  int offset, size, align;
  T t;
};

struct Var {
  Space space;
  u64 address;
  int size;
  bool dynamic;
};

struct Func {
  string name;
  bool entry = false, declared_only = false;
  vector<Param> params, rets;
  int param_bytes = 0;
  vector<Inst> code;
  int regs0 = 0, nregs = 0;
  vector<string> reg_names;
  vector<u8> reg_width;
  int local0 = 0, local_bytes = 0;
  int shared_bytes = 0;
  int shared_align = 16;
  int reqntid[3] = {0, 0, 0}, maxntid[3] = {0, 0, 0};
  int cluster[3] = {0, 0, 0};
};

constexpr u32 SHARED_BASE = 1024;  // the first KB belongs to the system on sm_90
constexpr u64 GENERIC_SHARED = 0x0100000000000000ull, GENERIC_LOCAL = 0x0200000000000000ull;
constexpr u64 WINDOW_MASK = 0xff00000000000000ull;

struct Module {
  string text;
  vector<string> lines;
  vector<Func> funcs;
  std::map<string, int> func_index;
  std::map<string, Var> vars;
  std::deque<std::array<u64, 32>> imms;
  vector<std::pair<std::array<u64, 32>*, i64>> dynamic_imms;
  std::deque<vector<u64>> globals;
  vector<std::pair<u64, u64>> global_regions;
  vector<string> global_names;
  int module_shared = 0, dynamic_align = 16;
  int total_regs = 0, total_local = 0;
  std::map<string, int> files;
  vector<string> unsupported;
  vector<std::function<void()>> fixups;
};

}  // namespace ptxrun
