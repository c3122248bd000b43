// What nvcc and g++ need to compile the same arithmetic: qualifiers, bits of floats, and operations that round
// once and are never fused. g++ is called with -ffp-contract=off.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define KVPOOL_HD __host__ __device__ __forceinline__
#define KVPOOL_UNROLL _Pragma("unroll")
#else
#define KVPOOL_HD inline
#define KVPOOL_UNROLL  // g++ makes vectors of loops, and none of what it has unrolled before
#endif

namespace kvpool {

// 16 and 8 bytes that one instruction moves. Addresses are multiples of their size: plan.py sees to it.
struct alignas(16) Bytes16 {
  uint32_t word[4];
};
struct alignas(8) Bytes8 {
  uint32_t word[2];
};
// 16 bytes at a multiple of 4 and no more: of a rope behind the scales of a short latent.
struct Words16 {
  uint32_t word[4];
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

// All that kernels touch is global memory, pinned host memory included; addresses come to them as numbers, of which
// the compiler cannot tell.
KVPOOL_HD void assume_global([[maybe_unused]] const void* address) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(address));
#endif
}

template <typename T>
KVPOOL_HD T load(const uint8_t* address) {
  assume_global(address);
  return *reinterpret_cast<const T*>(address);
}

template <typename T>
KVPOOL_HD void store(uint8_t* address, T value) {
  assume_global(address);
  *reinterpret_cast<T*>(address) = value;
}

}  // namespace kvpool
