// Types of PTX, and what a fault is.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
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

enum T : u8 { TNONE, PRED, B8, U8, S8, B16, U16, S16, B32, U32, S32, B64, U64, S64, F16, BF16, F32, F16X2, BF16X2, E4M3X2, TF32 };

inline int bits_of(T t) {
  static const u8 bits[] = {0, 1, 8, 8, 8, 16, 16, 16, 32, 32, 32, 64, 64, 64, 16, 16, 32, 32, 32, 16, 32};
  return bits[t];
}

inline bool is_signed(T t) { return t == S8 || t == S16 || t == S32 || t == S64; }

inline bool is_float(T t) { return t == F16 || t == BF16 || t == F32 || t == TF32; }

inline bool is_half(T t) { return t == F16 || t == BF16 || t == F16X2 || t == BF16X2; }

// A type by its name; TNONE for what names none. Types that are not implemented are faults.
inline T type_named(const string& s) {
  static const std::unordered_map<string, T> m = {
      {"pred", PRED}, {"b8", B8},   {"u8", U8},   {"s8", S8},     {"b16", B16},     {"u16", U16},       {"s16", S16},
      {"b32", B32},   {"u32", U32}, {"s32", S32}, {"b64", B64},   {"u64", U64},     {"s64", S64},       {"f16", F16},
      {"bf16", BF16}, {"f32", F32}, {"f16x2", F16X2}, {"bf16x2", BF16X2}, {"e4m3x2", E4M3X2}, {"tf32", TF32}};
  if (auto i = m.find(s); i != m.end()) return i->second;
  size_t digit = s.find_first_of("0123456789");
  string letters = s.substr(0, digit);
  for (const char* kind : {"b", "u", "s", "f", "bf", "tf", "e"})
    if (digit != string::npos && letters == kind) throw Fault("type " + s);
  return TNONE;
}

}  // namespace ptxrun
