// Definitions with which nvcc and g++ compile the same arithmetic: qualifiers, bits of floats, operations that round
// once and are never fused. g++ is called with -ffp-contract=off.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#ifdef __CUDACC__
#define KVPOOL_HD __host__ __device__ __forceinline__
#define KVPOOL_LAMBDA
#define KVPOOL_UNROLL _Pragma("unroll")
#define KVPOOL_VECTOR _Pragma("unroll")
#else
#define KVPOOL_HD inline __attribute__((always_inline))
#define KVPOOL_LAMBDA __attribute__((always_inline))
#define KVPOOL_UNROLL
#define KVPOOL_VECTOR _Pragma("GCC unroll 1")  // g++ does not vectorize a loop that it has unrolled
#endif

namespace kvpool {

template <int kIndex>
struct Index {
  KVPOOL_HD constexpr operator int() const { return kIndex; }
};

// Calls function(0) ... function(kCount - 1) without a loop, so that g++ vectorizes the surrounding loop.
template <int kCount, typename Function>
KVPOOL_HD void written_out(Function&& function) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) KVPOOL_LAMBDA {
    (function(Index<kIndex>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// 16 and 8 bytes that one instruction moves. transfer/plan.py refuses to convert rows that do not begin at multiples of
// 16 bytes.
struct alignas(16) Bytes16 {
  uint32_t word[4];
};
struct alignas(8) Bytes8 {
  uint32_t word[2];
};

KVPOOL_HD uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

KVPOOL_HD float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

#ifdef __CUDA_ARCH__
KVPOOL_HD float add(float a, float b) { return __fadd_rn(a, b); }
KVPOOL_HD float subtract(float a, float b) { return __fsub_rn(a, b); }
KVPOOL_HD float multiply(float a, float b) { return __fmul_rn(a, b); }
KVPOOL_HD float divide(float a, float b) { return __fdiv_rn(a, b); }
#else
KVPOOL_HD float add(float a, float b) { return a + b; }
KVPOOL_HD float subtract(float a, float b) { return a - b; }
KVPOOL_HD float multiply(float a, float b) { return a * b; }
KVPOOL_HD float divide(float a, float b) { return a / b; }
#endif

// Of two numbers that are not negative, whose bits have their order. g++ takes one vector instruction for integers; for
// floats, which may be NaN, a comparison and a blend, or a branch.
KVPOOL_HD float smaller(float a, float b) { return float_of(bits_of(a) < bits_of(b) ? bits_of(a) : bits_of(b)); }
KVPOOL_HD float larger(float a, float b) { return float_of(bits_of(a) > bits_of(b) ? bits_of(a) : bits_of(b)); }

// Tells the compiler that an address is in global memory (pinned host memory included), as all addresses of the kernels
// are; the compiler cannot infer this, because addresses come as integers.
KVPOOL_HD void assume_global([[maybe_unused]] const void* address) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(address));
#endif
}

// On a CPU addresses may be unaligned: callers of the codec may pass values with any stride.
template <typename T>
KVPOOL_HD T load(const uint8_t* address) {
#ifdef __CUDA_ARCH__
  assume_global(address);
  return *reinterpret_cast<const T*>(address);
#else
  T value;
  std::memcpy(&value, address, sizeof value);
  return value;
#endif
}

template <typename T>
KVPOOL_HD void store(uint8_t* address, T value) {
#ifdef __CUDA_ARCH__
  assume_global(address);
  *reinterpret_cast<T*>(address) = value;
#else
  std::memcpy(address, &value, sizeof value);
#endif
}

// Type by which a GPU moves kBytes at addresses that are multiples of kAlignment.
template <int kBytes, int kAlignment>
using WordOf = std::conditional_t<kBytes % 16 == 0 && kAlignment >= 16, Bytes16,
                                  std::conditional_t<kBytes % 8 == 0 && kAlignment >= 8, Bytes8,
                                                     std::conditional_t<kBytes % 4 == 0, uint32_t, uint16_t>>>;

template <int kBytes, int kAlignment = 16>
KVPOOL_HD void load_bytes(const uint8_t* address, void* to) {
#ifdef __CUDA_ARCH__
  using Word = WordOf<kBytes, kAlignment>;
  KVPOOL_UNROLL
  for (int at = 0; at < kBytes; at += sizeof(Word)) {
    const Word word = load<Word>(address + at);
    std::memcpy(static_cast<uint8_t*>(to) + at, &word, sizeof word);
  }
#else
  std::memcpy(to, address, kBytes);
#endif
}

template <int kBytes, int kAlignment = 16>
KVPOOL_HD void store_bytes(uint8_t* address, const void* from) {
#ifdef __CUDA_ARCH__
  using Word = WordOf<kBytes, kAlignment>;
  KVPOOL_UNROLL
  for (int at = 0; at < kBytes; at += sizeof(Word)) {
    Word word;
    std::memcpy(&word, static_cast<const uint8_t*>(from) + at, sizeof word);
    store(address + at, word);
  }
#else
  std::memcpy(address, from, kBytes);
#endif
}

}  // namespace kvpool
