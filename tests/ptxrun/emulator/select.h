// Which handler an instruction gets.
#pragma once

#include "wgmma.h"

namespace ptxrun {

void select(Module& m, Func& f, Inst& in) {
  const string& n = in.name;
  vector<T> types;
  for (auto& s : in.mods)
    if (T t = type_named(s)) types.push_back(t);
  auto has = [&](const char* s) { return in.has(s); };
  in.t = types.empty() ? TNONE : types[0];
  if (types.size() > 1) in.t2 = types[1];
  in.ftz = has("ftz");
  in.sat = has("sat");
  in.relu = has("relu");
  in.satfinite = has("satfinite");
  in.rm = has("rz") ? RZ : has("rm") ? RM : has("rp") ? RP : has("rna") ? RNA : RN;
  auto space = [&]() {
    for (auto& s : in.mods) {
      if (s == "global") return GLOBAL;
      if (s.rfind("shared", 0) == 0) return SHARED;
      if (s == "local") return LOCAL;
      if (s.rfind("param", 0) == 0) return PARAM;
      if (s == "const") return CONST;
    }
    return GENERIC;
  };
  in.space = space();
  auto set = [&](Handler h, Class c, int a = 0, int b = 0, int cc = 0) {
    in.fn = h;
    in.cls = c;
    in.a = a;
    in.b = b;
    in.c = cc;
  };
  auto unknown = [&](const char* why = "unknown instruction") { throw Fault(why); };
  // floating literals take the type of the instruction
  std::function<void(Op&)> literals = [&](Op& o) {
    if (o.k == IMM && !o.bc) {
      T t = in.name == "cvt" ? in.t2 : in.t;
      double d = as_f64((u64)o.off);
      u64 v = t == F64 || t == B64    ? (u64)o.off
              : t == F16 || t == BF16 ? encode(d, t)
                                      : (u64)std::bit_cast<u32>((float)d);
      m.imms.emplace_back();
      m.imms.back().fill(v);
      o.bc = m.imms.back().data();
    }
    for (auto& v : o.v) literals(v);
  };
  for (auto& o : in.o) literals(o);
  bool half = in.t == F16 || in.t == F16X2 || in.t == BF16 || in.t == BF16X2, pairs = in.t == U16X2 || in.t == S16X2;
  auto arith = [&](FOp op, int approx = 0) {
    if (half)
      set(half_arith, op == FEX2 || op == FTANH ? C_SFU : C_HALF, op, approx, (has("NaN") ? 1 : 0));
    else if (in.t == F32)
      set(f32_arith, op >= FSQRT && op <= FTANH ? C_SFU : C_FP32, op, approx, has("NaN") ? 1 : 0);
    else if (in.t == F64)
      set(f64_arith, C_FP64, op, approx);
    else
      unknown("type");
  };
  bool fp = half || in.t == F32 || in.t == F64;
  if (has("oob") || has("xorsign")) unknown("modifier");
  if (n == "add") {
    if (fp)
      arith(FADD);
    else if (pairs)
      set(i_pair, C_INT, 0);
    else if (has("cc"))
      set(i_carry, C_INT, 0, 0, 1);
    else
      set(i_add, C_INT);
  } else if (n == "sub") {
    if (fp)
      arith(FSUB);
    else if (has("cc"))
      set(i_carry, C_INT, 1, 0, 1);
    else
      set(i_sub, C_INT);
  } else if (n == "addc")
    set(i_carry, C_INT, 0, 1, has("cc"));
  else if (n == "subc")
    set(i_carry, C_INT, 1, 1, has("cc"));
  else if (n == "mul") {
    if (fp)
      arith(FMUL);
    else if (has("wide"))
      set(i_wide, C_INT, 0);
    else if (has("hi"))
      set(i_mulhi, C_INT);
    else
      set(i_mul, C_INT);
  } else if (n == "mad" || n == "fma" || n == "madc") {
    if (fp)
      arith(FFMA);
    else if (n == "madc" || has("cc"))
      set(i_carry, C_INT, has("hi") ? 3 : 2, n == "madc", has("cc"));
    else if (has("wide"))
      set(i_wide, C_INT, 1);
    else
      set(i_mad, C_INT, has("hi"));
  } else if (n == "mul24" || n == "mad24")
    set(i_mul24, C_INT, has("hi"), n == "mad24");
  else if (n == "div") {
    if (fp)
      arith(FDIV, has("full") || has("approx"));
    else
      set(i_div, C_INT);
  } else if (n == "rem")
    set(i_rem, C_INT);
  else if (n == "min" || n == "max") {
    if (in.o.size() > 3) unknown("three operands");
    if (fp)
      arith(n == "min" ? FMIN : FMAX);
    else if (pairs)
      set(i_pair, C_INT, n == "min" ? 1 : 2);
    else
      set(n == "min" ? i_min : i_max, C_INT);
  } else if (n == "neg") {
    if (fp)
      arith(FNEG);
    else
      set(i_neg, C_INT);
  } else if (n == "abs") {
    if (fp)
      arith(FABS);
    else
      set(i_abs, C_INT);
  } else if (n == "sqrt")
    arith(FSQRT, has("approx"));
  else if (n == "rcp")
    arith(FRCP, has("approx"));
  else if (n == "rsqrt")
    arith(FRSQRT, 1);
  else if (n == "ex2")
    arith(FEX2, 1);
  else if (n == "lg2")
    arith(FLG2, 1);
  else if (n == "sin")
    arith(FSIN, 1);
  else if (n == "cos")
    arith(FCOS, 1);
  else if (n == "tanh")
    arith(FTANH, 1);
  else if (n == "copysign")
    arith(FCOPYSIGN);
  else if (n == "and")
    set(l_and, C_LOGIC);
  else if (n == "or")
    set(l_or, C_LOGIC);
  else if (n == "xor")
    set(l_xor, C_LOGIC);
  else if (n == "not")
    set(l_not, C_LOGIC);
  else if (n == "cnot")
    set(l_cnot, C_LOGIC);
  else if (n == "shl")
    set(l_shl, C_LOGIC);
  else if (n == "shr")
    set(l_shr, C_LOGIC);
  else if (n == "shf")
    set(l_shf, C_LOGIC, has("r"), has("wrap"));
  else if (n == "lop3")
    set(l_lop3, C_LOGIC);
  else if (n == "prmt")
    set(l_prmt, C_LOGIC,
        has("f4e")    ? 1
        : has("b4e")  ? 2
        : has("rc8")  ? 3
        : has("ecl")  ? 4
        : has("ecr")  ? 5
        : has("rc16") ? 6
                      : 0);
  else if (n == "bfe")
    set(l_bfe, C_LOGIC);
  else if (n == "bfi")
    set(l_bfi, C_LOGIC);
  else if (n == "bmsk")
    set(l_bmsk, C_LOGIC, has("wrap"));
  else if (n == "szext")
    set(l_szext, C_LOGIC, has("wrap"));
  else if (n == "popc")
    set(l_popc, C_LOGIC);
  else if (n == "clz")
    set(l_clz, C_LOGIC);
  else if (n == "brev")
    set(l_brev, C_LOGIC);
  else if (n == "bfind")
    set(l_bfind, C_LOGIC, has("shiftamt"));
  else if (n == "fns")
    set(l_fns, C_LOGIC);
  else if (n == "sad")
    set(i_sad, C_INT);
  else if (n == "dp4a")
    set(i_dp, C_INT, 0);
  else if (n == "dp2a")
    set(i_dp, C_INT, has("hi") ? 2 : 1);
  else if (n == "setp" || n == "set") {
    static const std::map<string, int> cmp = {{"eq", EQ},   {"ne", NE},   {"lt", LT},   {"le", LE},   {"gt", GT},
                                              {"ge", GE},   {"lo", LT},   {"ls", LE},   {"hi", GT},   {"hs", GE},
                                              {"equ", EQU}, {"neu", NEU}, {"ltu", LTU}, {"leu", LEU}, {"gtu", GTU},
                                              {"geu", GEU}, {"num", NUM}, {"nan", NANC}};
    auto k = cmp.find(in.mods[0]);
    if (k == cmp.end()) unknown("comparison");
    int b = has("and") ? 1 : has("or") ? 2 : has("xor") ? 3 : 0;
    set(n == "setp" ? c_setp : c_set, C_COMPARE, k->second, b);
    if (n == "set") std::swap(in.t, in.t2);
  } else if (n == "selp")
    set(c_selp, C_COMPARE);
  else if (n == "slct")
    set(c_slct, C_COMPARE);
  else if (n == "testp")
    set(c_testp, C_COMPARE,
        has("finite")       ? 0
        : has("infinite")   ? 1
        : has("number")     ? 2
        : has("notanumber") ? 3
        : has("normal")     ? 4
                            : 5);
  else if (n == "mov") {
    if (in.t == B128) unknown("128-bit move");
    set(m_mov, C_MOVE);
  } else if (n == "cvta") {
    bool to = has("to");
    set(m_cvta, C_MOVE, to);
  } else if (n == "isspacep")
    set(m_isspacep, C_COMPARE, has("shared::cluster"));
  else if (n == "cvt") {
    if (in.mods[0] == "pack") {
      set(v_cvtpack, C_CVT, bits_of(in.t));
      return;
    }
    if (types.size() < 2) unknown("cvt");
    int mode = has("rni") ? RN : has("rzi") ? RZ : has("rmi") ? RM : has("rpi") ? RP : -1;
    set(v_cvt, C_CVT, mode >= 0, mode >= 0 ? mode : RZ);
    if (in.t >= B8 && in.t <= S64 && is_float(in.t2) && mode < 0) unknown("cvt without a rounding to integers");
    if (has("scaled::n2::ue8m0") || has("rs")) unknown("cvt modifier");
  } else if (n == "ld" || n == "ldu") {
    bool sync = has("acquire") || has("volatile") || has("relaxed") || has("mmio");
    set(mem_ld, in.space == SHARED ? C_LDS : in.space == PARAM ? C_PARAM : in.space == LOCAL ? C_LDL : C_LDG, sync);
    if (in.t == B128) unknown("128-bit load");
  } else if (n == "st") {
    if (has("async")) {
      set(st_async, C_BULK);
      return;
    }
    bool sync = has("release") || has("volatile") || has("relaxed") || has("mmio");
    set(mem_st, in.space == SHARED ? C_STS : in.space == PARAM ? C_PARAM : in.space == LOCAL ? C_LDL : C_STG, sync);
    if (in.t == B128) unknown("128-bit store");
  } else if (n == "prefetch" || n == "prefetchu" || n == "discard" || n == "applypriority" || n == "nanosleep" ||
             n == "pmevent" || n == "griddepcontrol" || n == "brkpt" || n == "membar")
    set(mem_nop, n == "membar" ? C_FENCE : C_OTHER);
  else if (n == "createpolicy")
    set(mem_policy, C_OTHER);
  else if (n == "fence") {
    if (has("proxy") && has("async"))
      set(fence_proxy, C_FENCE);
    else {
      bool p = false;
      for (auto& s : in.mods) p |= s.rfind("async", 0) == 0;
      if (has("proxy") && p)
        set(fence_proxy, C_FENCE);
      else
        set(mem_nop, C_FENCE);
    }
  } else if (n == "atom" || n == "red") {
    if (has("async")) unknown("red.async");
    static const std::map<string, int> ops = {{"add", A_ADD}, {"min", A_MIN}, {"max", A_MAX},   {"inc", A_INC},
                                              {"dec", A_DEC}, {"cas", A_CAS}, {"exch", A_EXCH}, {"and", A_AND},
                                              {"or", A_OR},   {"xor", A_XOR}};
    int op = -1;
    for (auto& s : in.mods) {
      auto k = ops.find(s);
      if (k != ops.end()) op = k->second;
    }
    if (op < 0 || in.t == B128) unknown("atomic");
    set(mem_atom, C_ATOMIC, op, n == "atom");
  } else if (n == "cp") {
    if (in.mods.size() > 1 && in.mods[0] == "async" && in.mods[1] == "bulk") {
      if (has("tensor") || has("reduce") || has("prefetch")) unknown("bulk copy of this kind");
      if (has("commit_group"))
        set(bulk_commit, C_BULK);
      else if (has("wait_group"))
        set(bulk_wait, C_BULK, (int)in.o[0].off);
      else {
        vector<string> sp;
        for (auto& s : in.mods)
          if (s == "global" || s.rfind("shared", 0) == 0) sp.push_back(s);
        if (sp.size() < 2) unknown();
        set(bulk_copy, C_BULK, sp[0] == "global" ? 1 : sp[1] == "global" ? 0 : 2);
        in.space = SHARED;
      }
    } else if (has("commit_group"))
      set(cp_commit, C_CPASYNC);
    else if (has("wait_group"))
      set(cp_wait, C_CPASYNC, (int)in.o[0].off);
    else if (has("wait_all"))
      set(cp_wait, C_CPASYNC, 0, 1);
    else if (has("mbarrier")) {
      set(cp_arrive, C_MBARRIER, has("noinc"));
    } else if (has("ca") || has("cg"))
      set(cp_async, C_CPASYNC, has("cg"));
    else
      unknown("cp");
  } else if (n == "mbarrier") {
    auto& o = in.mods[0];
    if (o == "init")
      set(mbarrier, C_MBARRIER, M_INIT);
    else if (o == "inval")
      set(mbarrier, C_MBARRIER, M_INVAL);
    else if (o == "arrive" || o == "arrive_drop") {
      set(mbarrier, C_MBARRIER, M_ARRIVE, has("expect_tx"), o == "arrive_drop");
    } else if (o == "expect_tx")
      set(mbarrier, C_MBARRIER, M_EXPECT);
    else if (o == "complete_tx")
      set(mbarrier, C_MBARRIER, M_COMPLETE);
    else if (o == "test_wait")
      set(mbarrier, C_MBARRIER, M_TEST);
    else if (o == "try_wait")
      set(mbarrier, C_MBARRIER, M_TRY);
    else
      unknown("mbarrier");
    in.d = has("parity");
  } else if (n == "bar" || n == "barrier") {
    if (has("warp"))
      set(bar_warp, C_BARRIER);
    else if (has("cluster"))
      set(bar_cluster, C_BARRIER, has("wait"));
    else {
      int k = has("arrive") ? 1 : has("red") ? 2 : 0;
      set(bar_cta, C_BARRIER, k, has("popc") ? 0 : has("and") ? 1 : 2, n == "bar" || has("aligned"));
      in.d = k == 2;
    }
  } else if (n == "shfl")
    set(w_shfl, C_SHUFFLE, has("up") ? 0 : has("down") ? 1 : has("bfly") ? 2 : 3);
  else if (n == "vote") {
    if (!has("sync")) unknown();
    set(w_vote, C_SHUFFLE, has("all") ? 0 : has("any") ? 1 : has("uni") ? 2 : 3);
    if (has("ballot")) in.a = 3;
  } else if (n == "match")
    set(w_match, C_SHUFFLE, has("all"));
  else if (n == "redux") {
    set(w_redux, C_SHUFFLE,
        has("add")   ? A_ADD
        : has("min") ? A_MIN
        : has("max") ? A_MAX
        : has("and") ? A_AND
        : has("or")  ? A_OR
                     : A_XOR);
    if (in.t == F32) unknown("redux.f32");
  } else if (n == "activemask")
    set(w_activemask, C_SHUFFLE);
  else if (n == "elect")
    set(w_elect, C_SHUFFLE);
  else if (n == "bra")
    set(j_bra, C_BRANCH);
  else if (n == "brx")
    set(j_brx, C_BRANCH);
  else if (n == "exit")
    set(j_exit, C_BRANCH);
  else if (n == "ret")
    set(f.entry ? j_exit : j_ret, C_BRANCH);
  else if (n == "trap")
    set(j_trap, C_BRANCH);
  else if (n == "call")
    set(j_call, C_BRANCH);
  else if (n == "setmaxnreg")
    set(j_setmaxnreg, C_OTHER);
  else if (n == "mapa")
    set(c_mapa, C_INT);
  else if (n == "getctarank")
    set(c_ctarank, C_INT);
  else if (n == "ldmatrix" || n == "stmatrix") {
    if (!has("m8n8") || !has("b16")) unknown("matrix shape");
    set(n == "ldmatrix" ? ld_matrix : st_matrix, C_LDMATRIX, has("x4") ? 4 : has("x2") ? 2 : 1, has("trans"));
  } else if (n == "mma") {
    if (has("sp") || has("block_scale")) unknown("mma");
    int M = 0, N = 0, K = 0;
    for (auto& s : in.mods)
      if (sscanf(s.c_str(), "m%dn%dk%d", &M, &N, &K) == 3) break;
    if ((M != 16 && M != 8) || N != 8 || types.size() < 4) unknown("mma shape");
    T dt = types[0], at = types[1], bt = types[2];
    set(mma_sync, C_MMA, M, N, K);
    in.t = at;
    in.t2 = bt;
    in.d = dt;
    if (bits_of(at) == 4 || bits_of(at) == 1) unknown("mma type");
  } else if (n == "wgmma") {
    if (has("fence"))
      set(wg_fence, C_WGSYNC);
    else if (has("commit_group"))
      set(wg_commit, C_WGSYNC);
    else if (has("wait_group"))
      set(wg_wait, C_WGSYNC);
    else {
      if (has("sp")) unknown("sparse wgmma");
      int M = 0, N = 0, K = 0;
      for (auto& s : in.mods)
        if (sscanf(s.c_str(), "m%dn%dk%d", &M, &N, &K) == 3) break;
      if (M != 64 || types.size() < 3) unknown("wgmma shape");
      T dt = types[0];
      set(wg_mma, C_WGMMA, M, N, K);
      in.t = types[1];
      in.t2 = types[2];
      in.d = dt;
    }
  } else
    unknown();
}

}  // namespace ptxrun
