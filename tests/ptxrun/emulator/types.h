// Types of PTX, and what a fault is.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace ptxrun {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;
using std::string;
using std::vector;

struct Fault : std::runtime_error {
  using runtime_error::runtime_error;
};

template <class... A>
string fmt(const char* f, A... a) {
  char b[1024];
  snprintf(b, sizeof b, f, a...);
  return b;
}

enum T : u8 {
  TNONE,
  PRED,
  B8,
  U8,
  S8,
  B16,
  U16,
  S16,
  B32,
  U32,
  S32,
  B64,
  U64,
  S64,
  B128,
  F16,
  BF16,
  F32,
  F64,
  TF32,
  F16X2,
  BF16X2,
  E4M3,
  E5M2,
  E4M3X2,
  E5M2X2,
  F32X2,
  U16X2,
  S16X2
};

inline int bits_of(T t) {
  switch (t) {
    case PRED: return 1;
    case B8:
    case U8:
    case S8:
    case E4M3:
    case E5M2: return 8;
    case B16:
    case U16:
    case S16:
    case F16:
    case BF16:
    case E4M3X2:
    case E5M2X2: return 16;
    case B32:
    case U32:
    case S32:
    case F32:
    case TF32:
    case F16X2:
    case BF16X2:
    case U16X2:
    case S16X2: return 32;
    case B64:
    case U64:
    case S64:
    case F64:
    case F32X2: return 64;
    case B128: return 128;
    default: return 0;
  }
}

inline bool is_signed(T t) { return t == S8 || t == S16 || t == S32 || t == S64; }

inline bool is_float(T t) { return t == F16 || t == BF16 || t == F32 || t == F64 || t == TF32; }

inline T type_named(const string& s) {
  static const std::unordered_map<string, T> m = {
      {"pred", PRED},     {"b8", B8},       {"u8", U8},         {"s8", S8},      {"b16", B16},   {"u16", U16},
      {"s16", S16},       {"b32", B32},     {"u32", U32},       {"s32", S32},    {"b64", B64},   {"u64", U64},
      {"s64", S64},       {"b128", B128},   {"f16", F16},       {"bf16", BF16},  {"f32", F32},   {"f64", F64},
      {"tf32", TF32},     {"f16x2", F16X2}, {"bf16x2", BF16X2}, {"e4m3", E4M3},  {"e5m2", E5M2}, {"e4m3x2", E4M3X2},
      {"e5m2x2", E5M2X2}, {"f32x2", F32X2}, {"u16x2", U16X2},   {"s16x2", S16X2}};
  auto i = m.find(s);
  return i == m.end() ? TNONE : i->second;
}

}  // namespace ptxrun
