// Values of rows, 16 at a time: the arithmetic of docs/rows.md for nvcc and g++ alike. The law is
// ../../codec/reference.py and scalars.py; tests compare every byte with those.
//
// Between reading and writing values are bf16, as uint16_t bits: a row in another format holds what
// encode_rows(decode_rows(row)) of the codec holds.
#pragma once

#include "portable.h"

namespace kvpool {

constexpr int kBlock = 16;  // values handled together; a block of e2m1 shares one ue5m3 scale
constexpr int kTile = 128;  // values that share one fp32 scale, and the divisor of every latent rank

constexpr float kE2m1Max = 6.0f;
constexpr float kE4m3Max = 448.0f;
constexpr float kFp32Tiny = 1.17549435e-38f;  // FLT_MIN
constexpr uint32_t kUe5m3MaxByte = 0xF7;

// ---------------------------------------------------------------------------------------------- bf16

KVPOOL_HD float bf16_value(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

// Round to nearest even; NaN stays NaN.
KVPOOL_HD uint16_t bf16_bits(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

// What encoders see of a bf16: NaN becomes 0, infinities the largest finite value.
KVPOOL_HD float finite_value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16, magnitude = wide & 0x7FFFFFFFu;
  const uint32_t finite = magnitude == 0x7F800000u ? wide - 0x10000u : wide;
  return float_of(magnitude > 0x7F800000u ? 0u : finite);
}

// ---------------------------------------------------------------------------------------------- e4m3

KVPOOL_HD float e4m3_value(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24, size = code & 0x7Fu;
  const uint32_t normal = (size << 20) + (120u << 23);
  const uint32_t subnormal = bits_of(multiply(static_cast<float>(static_cast<int32_t>(size)), 0x1p-9f));
  const uint32_t bits = size < 8u ? subnormal : normal;
  return float_of(sign | (size == 0x7Fu ? 0x7FC00000u : bits));
}

// Nearest code of a finite value, which is clamped to +-448.
KVPOOL_HD uint8_t e4m3_code(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const float whole = float_of(bits & 0x7FFFFFFFu);
  const float size = whole > kE4m3Max ? kE4m3Max : whole;
  // Below 2^-6 steps are 2^-9 wide, the spacing of fp32 between 2^14 and 2^15: the addition itself rounds.
  const uint32_t subnormal = bits_of(add(size, 16384.0f)) - bits_of(16384.0f);
  const uint32_t normal = ((bits_of(size) + 0x7FFFFu + ((bits_of(size) >> 20) & 1u)) >> 20) - ((127u - 7u) << 3);
  return static_cast<uint8_t>(sign | (size < 0x1p-6f ? subnormal : normal));
}

// --------------------------------------------------------------------------------------- ue5m3, e2m1

KVPOOL_HD float ue5m3_value(uint32_t byte) {
  const uint32_t exponent = byte >> 3, mantissa = byte & 7u;
  if (exponent == 0) return multiply(static_cast<float>(mantissa), 0x1p-17f);
  if (exponent == 31) return float_of(0x7F800000u | (mantissa << 20));  // no encoder stores these
  return float_of(((exponent + 112u) << 23) | (mantissa << 20));
}

// Nearest byte of a non-negative value; 0 for what rounds to 0.
KVPOOL_HD uint32_t ue5m3_byte(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t byte = value < 0x1p-14f ? bits_of(add(value, 64.0f)) - bits_of(64.0f)
                                         : ((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - ((127u - 15u) << 3);
  return byte < kUe5m3MaxByte ? byte : kUe5m3MaxByte;
}

// Nearest e2m1 magnitude of a non-negative value; above 6 gives 6.
KVPOOL_HD float e2m1_rounded(float size) {
  size = size > kE2m1Max ? kE2m1Max : size;
  // Steps are half of the value's power of two, 0.5 below 1: fp32 numbers 2^22 times that power apart as wide.
  const float power = size < 1.0f ? 1.0f : float_of(bits_of(size) & 0x7F800000u);
  const float spacer = float_of(bits_of(power) + (22u << 23));
  return subtract(add(size, spacer), spacer);
}

KVPOOL_HD uint32_t e2m1_code(float rounded) {
  const uint32_t below_one = rounded > 0.0f ? 1u : 0u, from_one = (bits_of(rounded) >> 22) - 252u;
  return rounded < 1.0f ? below_one : from_one;
}

KVPOOL_HD float e2m1_value(uint32_t code) {
  const uint32_t sign = (code & 8u) << 28, magnitude = code & 7u;
  const uint32_t below_one = magnitude * 0x3F000000u, from_one = (magnitude + 252u) << 22;
  return float_of(sign | (magnitude < 2u ? below_one : from_one));
}

// One try at a block: its scale byte, its magnitudes packed 4 bits each, and the sum of squared errors.
struct E2m1Try {
  uint32_t scale_byte;
  Bytes8 codes;
  float error;
};

// Values of a block that are tried together: half of it needs half the registers, all of it is a vector of a CPU.
// Either is a step of the pairwise sum.
#ifdef __CUDA_ARCH__
constexpr int kAtOnce = 8;
#else
constexpr int kAtOnce = 16;
#endif

// 8 values in 4 bits each, the first lowest.
KVPOOL_HD uint32_t packed(const uint32_t codes[8]) {
  uint32_t word = 0;
  KVPOOL_UNROLL
  for (int i = 0; i < 8; ++i) word |= codes[i] << (4 * i);
  return word;
}

KVPOOL_HD E2m1Try e2m1_try(const float sizes[kBlock], float largest, float anchor) {
  E2m1Try result;
  result.scale_byte = ue5m3_byte(divide(largest, anchor));
  if (largest > 0.0f && result.scale_byte == 0) result.scale_byte = 1;
  const float scale = ue5m3_value(result.scale_byte);
  const float divisor = scale > 0.0f ? scale : 1.0f;
  result.error = 0.0f;
  KVPOOL_UNROLL
  for (int first = 0; first < kBlock; first += kAtOnce) {
    float squares[kAtOnce];
    uint32_t codes[kAtOnce];
    KVPOOL_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const float size = sizes[first + i];
      const float rounded = e2m1_rounded(divide(size, divisor));
      codes[i] = e2m1_code(rounded);
      const float difference = subtract(size, multiply(rounded, scale));
      squares[i] = multiply(difference, difference);
    }
    KVPOOL_UNROLL
    for (int i = 0; i < kAtOnce; i += 8) result.codes.word[(first + i) / 8] = packed(codes + i);
    KVPOOL_UNROLL
    for (int width = 1; width < kAtOnce; width *= 2) {
      KVPOOL_UNROLL
      for (int i = 0; i < kAtOnce; i += 2 * width) squares[i] = add(squares[i], squares[i + width]);
    }
    result.error = first == 0 ? squares[0] : add(result.error, squares[0]);
  }
  return result;
}

// Codes and scale byte of 16 bf16 values.
KVPOOL_HD Bytes8 e2m1_encode(const uint16_t values[kBlock], uint8_t* scale_byte) {
  float sizes[kBlock];
  float largest = 0.0f;
  Bytes8 codes;
  KVPOOL_UNROLL
  for (int first = 0; first < kBlock; first += kAtOnce) {
    uint32_t signs[kAtOnce];
    KVPOOL_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t bits = bits_of(finite_value(values[first + i]));
      const float size = float_of(bits & 0x7FFFFFFFu);
      sizes[first + i] = size;
      largest = size > largest ? size : largest;
      signs[i] = (bits >> 31) << 3;
    }
    KVPOOL_UNROLL
    for (int i = 0; i < kAtOnce; i += 8) codes.word[(first + i) / 8] = packed(signs + i);
  }
  const E2m1Try first = e2m1_try(sizes, largest, 6.0f), second = e2m1_try(sizes, largest, 4.0f);
  const bool better = second.error < first.error;  // strictly: a tie keeps the first
  *scale_byte = static_cast<uint8_t>(better ? second.scale_byte : first.scale_byte);
  KVPOOL_UNROLL
  for (int half = 0; half < 2; ++half) {
    codes.word[half] |= better ? second.codes.word[half] : first.codes.word[half];
  }
  return codes;
}

KVPOOL_HD void e2m1_decode(Bytes8 codes, uint8_t scale_byte, uint16_t values[kBlock]) {
  const float scale = ue5m3_value(scale_byte);
  KVPOOL_UNROLL
  for (int half = 0; half < 2; ++half) {
    KVPOOL_UNROLL
    for (int i = 0; i < kBlock / 2; ++i) {
      values[8 * half + i] = bf16_bits(multiply(scale, e2m1_value((codes.word[half] >> (4 * i)) & 15u)));
    }
  }
}

// ---------------------------------------------------------------------------------- blocks of the rest

KVPOOL_HD void bf16_read(const uint8_t* from, uint16_t values[kBlock]) {
  KVPOOL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const Bytes16 bytes = load<Bytes16>(from + 16 * half);
    std::memcpy(values + 8 * half, &bytes, sizeof bytes);
  }
}

KVPOOL_HD void bf16_write(uint8_t* to, const uint16_t values[kBlock]) {
  KVPOOL_UNROLL
  for (int half = 0; half < 2; ++half) {
    Bytes16 bytes;
    std::memcpy(&bytes, values + 8 * half, sizeof bytes);
    store(to + 16 * half, bytes);
  }
}

// The same, of an even number of values, where the address is a multiple of 4 and no more: a rope behind the scales
// of a short latent.
template <int kValues>
KVPOOL_HD void bf16_read_words(const uint8_t* from, uint16_t values[kValues]) {
  KVPOOL_UNROLL
  for (int i = 0; i < kValues / 2; ++i) {
    const uint32_t word = load<uint32_t>(from + 4 * i);
    values[2 * i] = static_cast<uint16_t>(word);
    values[2 * i + 1] = static_cast<uint16_t>(word >> 16);
  }
}

template <int kValues>
KVPOOL_HD void bf16_write_words(uint8_t* to, const uint16_t values[kValues]) {
  KVPOOL_UNROLL
  for (int i = 0; i < kValues / 2; ++i) {
    store(to + 4 * i, values[2 * i] | static_cast<uint32_t>(values[2 * i + 1]) << 16);
  }
}

// As many values as `Bytes` has bytes.
template <typename Bytes>
KVPOOL_HD void e4m3_decode(Bytes bytes, float scale, uint16_t values[sizeof(Bytes)]) {
  uint8_t codes[sizeof bytes];
  std::memcpy(codes, &bytes, sizeof bytes);
  KVPOOL_UNROLL
  for (size_t i = 0; i < sizeof bytes; ++i) values[i] = bf16_bits(multiply(e4m3_value(codes[i]), scale));
}

template <typename Bytes>
KVPOOL_HD Bytes e4m3_encode(const uint16_t values[sizeof(Bytes)], float scale) {
  Bytes bytes;
  uint8_t codes[sizeof bytes];
  KVPOOL_UNROLL
  for (size_t i = 0; i < sizeof bytes; ++i) codes[i] = e4m3_code(divide(finite_value(values[i]), scale));
  std::memcpy(&bytes, codes, sizeof bytes);
  return bytes;
}

// Largest magnitude of a block; a tile's is the largest of its blocks'.
KVPOOL_HD float largest_of(const uint16_t values[kBlock]) {
  float largest = 0.0f;
  KVPOOL_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    const float size = float_of(bits_of(finite_value(values[i])) & 0x7FFFFFFFu);
    largest = size > largest ? size : largest;
  }
  return largest;
}

KVPOOL_HD float tile_scale(float largest) {
  const float scale = divide(largest, kE4m3Max);
  return scale > kFp32Tiny ? scale : kFp32Tiny;
}

}  // namespace kvpool
