// What a parsed PTX module consists of.
#pragma once

#include "formats.h"

namespace ptxrun {

enum Kind : u8 { NONE, REG, IMM, SREG, MEM, VEC, LABEL };

enum Space : u8 { GENERIC, GLOBAL, SHARED, PARAM };

enum Sreg : u8 { TID_X, NTID_X, CTAID_X, CTAID_Y, CTAID_Z, NCTAID_X, NCTAID_Y, NCTAID_Z, LANEID };

struct Op {
  Kind k = NONE;
  bool neg = false;
  u8 width = 0;
  int r = -1;
  i64 off = 0;              // of a label, the number of its name
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
  C_HALF,
  C_SFU,
  C_BRANCH,
  C_PARAM,
  C_LDG,
  C_STG,
  C_LDS,
  C_STS,
  C_CPASYNC,
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

inline const char* class_names[] = {"int",       "move",      "logic",    "compare",  "cvt",   "fp32",
                                    "half",      "sfu",       "branch",   "param",    "ld_global", "st_global",
                                    "ld_shared", "st_shared", "cp_async", "ldmatrix", "mma",   "wgmma",
                                    "wgmma_sync", "barrier",  "mbarrier", "fence",    "shuffle", "other"};

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
  bool ftz = false;
  Space space = GENERIC;
  int a = 0, b = 0, c = 0;
  int target = -1, rpc = -1;
  int uid = 0;

  bool has(const char* s) const { return std::find(mods.begin(), mods.end(), s) != mods.end(); }
};

struct Param {
  string name;
  int offset, size;
  T t;
};

// A parameter, or an array in shared memory.
struct Var {
  Space space;
  u64 address;
  bool dynamic;
};

// A kernel.
struct Func {
  string name;
  vector<Param> params;
  int param_bytes = 0;
  vector<Inst> code;
  int nregs = 0;
  vector<string> reg_names;
  vector<u8> reg_width;
  int shared_bytes = 0;
  int reqntid[3] = {0, 0, 0}, maxntid[3] = {0, 0, 0};
};

constexpr u32 SHARED_BASE = 1024;  // the first KB belongs to the system on sm_90

struct Module {
  string text;
  vector<string> lines;
  std::deque<Func> funcs;
  std::map<string, Var> vars;
  std::deque<std::array<u64, 32>> imms;
  vector<std::pair<std::array<u64, 32>*, i64>> dynamic_imms;
  int dynamic_align = 16;
  vector<string> unsupported;
};

}  // namespace ptxrun
