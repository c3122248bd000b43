// Which handler an instruction gets. Only what compilers emit for the kernels under test is implemented: anything else
// is a fault when it is executed.
#pragma once

#include "products.h"

namespace ptxrun {

void select(Module& m, Inst& in) {
  const string& n = in.name;
  auto unknown = [](const string& why) { throw Fault(why); };
  vector<T> types;
  for (auto& s : in.mods)
    if (T t = type_named(s)) types.push_back(t);
  auto has = [&](const char* s) { return in.has(s); };
  // An instruction without handlers for modifiers beside types and these.
  auto only = [&](std::initializer_list<const char*> known) {
    for (auto& s : in.mods)
      if (!type_named(s) && std::find(known.begin(), known.end(), s) == known.end()) unknown("modifier " + s);
  };
  in.t = types.empty() ? TNONE : types[0];
  in.t2 = types.size() > 1 ? types[1] : TNONE;
  in.ftz = has("ftz");
  for (auto& s : in.mods) {
    if (s == "global") in.space = GLOBAL;
    if (s.rfind("shared", 0) == 0) in.space = SHARED;
    if (s == "param") in.space = PARAM;
  }
  auto set = [&](Handler h, Class c, int a = 0, int b = 0, int cc = 0) {
    in.fn = h;
    in.cls = c;
    in.a = a;
    in.b = b;
    in.c = cc;
  };
  // Floating-point literals take the type of the instruction.
  std::function<void(Op&)> literals = [&](Op& o) {
    if (o.k == IMM && !o.bc) {
      T t = n == "cvt" ? in.t2 : in.t;
      m.imms.emplace_back().fill(is_half(t) ? encode(as_f32(o.off), t) : (u64)o.off);
      o.bc = m.imms.back().data();
    }
    for (auto& v : o.v) literals(v);
  };
  for (auto& o : in.o) literals(o);
  bool fp = is_half(in.t) || in.t == F32;
  auto arith = [&](FOp op) {
    bool approx = has("approx") || has("full");
    only({"rn", "rm", "approx", "full", "ftz", "NaN", "xorsign", "abs"});
    if ((has("rm") && (op != FFMA || in.t != F32)) || (has("xorsign") && op != FMIN && op != FMAX)) unknown("modifier");
    if (in.t == F32)
      set(f32_arith, op >= FRCP ? C_SFU : C_FP32, op, approx, has("NaN") | 2 * has("rm") | 4 * has("xorsign"));
    else if (is_half(in.t) && op <= FFMA && !in.ftz)
      set(half_arith, C_HALF, op);
    else
      unknown("type");
  };
  auto integers = [&](Handler h, int a = 0, int b = 0) {
    only({"lo", "hi", "wide", "relu"});
    if (in.t == TNONE || in.o.size() < 2) unknown("operands");
    set(h, C_INT, a, b);
  };
  auto bits = [&](Handler h, int a = 0) {
    only({});
    if (in.t == TNONE) unknown("type");
    set(h, C_LOGIC, a);
  };
  auto operands_of_product = [&] {
    bool good = types.size() >= 3 && types[0] == F32 && (is_half(types[1]) || types[1] == TF32) && types[2] == types[1];
    if (!good || (types.size() == 4 && types[3] != F32)) unknown("types");
    in.t = types[1];
  };
  if (n == "add" || n == "sub") {
    if (fp)
      arith(n == "add" ? FADD : FSUB);
    else
      integers(n == "add" ? i_add : i_sub);
  } else if (n == "mul") {
    if (fp)
      arith(FMUL);
    else
      integers(has("wide") ? i_wide : has("hi") ? i_mulhi : i_mul);
  } else if (n == "mad" || n == "fma") {
    if (fp)
      arith(FFMA);
    else if (has("hi"))
      unknown("modifier hi");
    else
      integers(has("wide") ? i_wide : i_mad, has("wide"));
  } else if (n == "div") {
    if (fp)
      arith(FDIV);
    else
      integers(i_div);
  } else if (n == "rem")
    integers(i_rem);
  else if (n == "min" || n == "max") {
    if (in.o.size() > 3) unknown("three operands");
    if (fp)
      arith(n == "min" ? FMIN : FMAX);
    else
      integers(i_extreme, n == "max", has("relu"));
  } else if (n == "neg" || n == "abs") {
    only({"ftz"});
    if (in.t == F32)
      set(f32_sign, C_FP32, n == "neg");
    else if (is_half(in.t) && !in.ftz)
      set(half_sign, C_HALF, n == "neg");
    else if (n == "neg")
      integers(i_neg);
    else
      unknown("type");
  } else if (n == "rcp")
    arith(FRCP);
  else if (n == "ex2")
    arith(FEX2);
  else if (n == "lg2")
    arith(FLG2);
  else if (n == "sqrt")
    arith(FSQRT);
  else if (n == "rsqrt")
    arith(FRSQRT);
  else if (n == "and" || n == "or" || n == "xor")
    bits(l_bits, n == "and" ? 0 : n == "or" ? 1 : 2);
  else if (n == "not")
    bits(l_not);
  else if (n == "shl")
    bits(l_shl);
  else if (n == "shr")
    bits(l_shr);
  else if (n == "prmt")
    bits(l_prmt);
  else if (n == "bfe")
    bits(l_bfe);
  else if (n == "setp") {
    static const std::map<string, int> cmp = {{"eq", EQ},   {"ne", NE},   {"lt", LT},   {"le", LE},   {"gt", GT},
                                              {"ge", GE},   {"equ", EQU}, {"neu", NEU}, {"ltu", LTU}, {"leu", LEU},
                                              {"gtu", GTU}, {"geu", GEU}, {"num", NUM}, {"nan", NANC}};
    auto k = cmp.find(in.mods[0]);
    if (k == cmp.end() || in.o[0].k == VEC) unknown("comparison");
    only({k->first.c_str(), "ftz"});
    set(c_setp, C_COMPARE, k->second);
  } else if (n == "selp" || n == "mov") {
    only({});
    if (in.t == TNONE) unknown("type");
    set(n == "mov" ? m_mov : c_selp, n == "mov" ? C_MOVE : C_COMPARE);
  } else if (n == "cvta")
    set(m_mov, C_MOVE);
  else if (n == "cvt") {
    only({"rn", "rz", "rna", "sat", "satfinite", "rpi", "rmi", "rzi", "rni", "ftz"});
    int whole = has("rpi") ? 1 : has("rmi") ? 2 : has("rzi") ? 3 : has("rni") ? 4 : 0;
    auto integer = [](T t) { return t >= B8 && t <= S64; };
    bool known = in.t2 == F32 && in.o.size() == 3     ? in.t == F16X2 || in.t == BF16X2 || in.t == E4M3X2
                 : in.t2 == E4M3X2                    ? in.t == F16X2
                 : is_float(in.t2) && in.o.size() == 2 ? is_float(in.t) || (whole && in.t2 == F32 && integer(in.t))
                                                       : integer(in.t2) ? in.t == F32 || integer(in.t) : whole && in.t2 == F32 && integer(in.t);
    if (!known || (in.ftz && in.t2 != F32) || has("rz") || (in.t == TF32) != has("rna") ||
        (has("satfinite") && in.t != E4M3X2) || (has("sat") && !is_float(in.t2)))
      unknown("conversion");
    set(v_cvt, C_CVT, 0, has("sat"), whole);
  } else if (n == "ld" || n == "st") {
    only({"global", "param", "shared", "shared::cta", "v2", "v4", "ca", "cg", "cs", "wb", "wt", "relaxed", "L1::evict_last", "L1::evict_first"});
    if (in.t == TNONE || in.space == GENERIC || (in.space == PARAM && n == "st")) unknown("address space or type");
    bool shared = in.space == SHARED;
    if (n == "ld")
      set(mem_ld, shared ? C_LDS : in.space == PARAM ? C_PARAM : C_LDG);
    else
      set(mem_st, shared ? C_STS : C_STG);
  } else if (n == "fence") {
    if (in.mods != vector<string>{"proxy", "async", "shared::cta"}) unknown("fence");
    set(fence_proxy, C_FENCE);
  } else if (n == "cp") {
    only({"async", "commit_group", "wait_group", "ca", "cg", "shared", "shared::cta", "global"});
    if (has("commit_group"))
      set(cp_commit, C_CPASYNC);
    else if (has("wait_group"))
      set(cp_wait, C_CPASYNC, (int)in.o[0].off);
    else
      set(cp_async, C_CPASYNC, has("cg"));
  } else if (n == "mbarrier") {
    only({"init", "arrive", "try_wait", "parity", "shared", "shared::cta"});
    size_t operands = in.o.size();
    if (has("init") && operands == 2)
      set(mbarrier, C_MBARRIER, M_INIT);
    else if (has("arrive") && operands == 2 && in.o[0].k == NONE)
      set(mbarrier, C_MBARRIER, M_ARRIVE);
    else if (has("try_wait") && has("parity") && operands >= 3)
      set(mbarrier, C_MBARRIER, M_TRY);
    else
      unknown("mbarrier");
  } else if (n == "bar" || n == "barrier") {
    only({"warp", "sync", "aligned"});
    if (has("warp"))
      set(bar_warp, C_BARRIER);
    else
      set(bar_cta, C_BARRIER, n == "bar" || has("aligned"));
  } else if (n == "shfl") {
    only({"sync", "bfly", "idx", "up", "down"});
    set(w_shfl, C_SHUFFLE, has("bfly") ? 1 : has("up") ? 2 : has("down") ? 3 : 0);
  } else if (n == "redux") {
    only({"sync", "add"});
    if (!has("add") || (in.t != S32 && in.t != U32)) unknown("operation");
    set(w_redux, C_SHUFFLE);
  } else if (n == "elect") {
    if (in.o[0].k != VEC) unknown("operands");
    set(w_elect, C_SHUFFLE);
  } else if (n == "bra")
    set(j_bra, C_BRANCH);
  else if (n == "brx")
    set(j_brx, C_BRANCH);
  else if (n == "exit" || n == "ret")
    set(j_exit, C_BRANCH);
  else if (n == "griddepcontrol")  // kernels run one after the other
    set(j_nothing, C_OTHER);
  else if (n == "setmaxnreg")
    set(j_setmaxnreg, C_OTHER);
  else if (n == "ldmatrix" || n == "stmatrix") {
    only({"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta"});
    set(matrix, C_LDMATRIX, has("x4") ? 4 : has("x2") ? 2 : 1, has("trans"), n == "stmatrix");
  } else if (n == "mma") {
    only({"sync", "aligned", "m16n8k16", "m16n8k8", "row", "col"});
    operands_of_product();
    if (has("m16n8k8") != (in.t == TF32)) unknown("shape");
    set(mma_sync, C_MMA);
  } else if (n == "wgmma") {
    if (has("fence"))
      set(wg_fence, C_WGSYNC);
    else if (has("commit_group"))
      set(wg_commit, C_WGSYNC);
    else if (has("wait_group"))
      set(wg_wait, C_WGSYNC);
    else {
      int columns = 0, depth = 0;
      for (auto& s : in.mods) sscanf(s.c_str(), "m64n%dk%d", &columns, &depth);
      operands_of_product();
      if (!columns || depth != (in.t == TF32 ? 8 : 16)) unknown("shape");
      set(wg_mma, C_WGMMA, columns);
    }
  } else
    unknown("instruction");
}

}  // namespace ptxrun
