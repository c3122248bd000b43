// Encodings of docs/rows.md for nvcc and g++. ../reference.py and ../scalars.py define the rules;
// tests compare every byte with theirs.
//
// Between reading and writing, values are bf16, as uint16_t bits: converting a row to another format gives the bytes of
// encode_rows(decode_rows(row)) of the codec, except for a latent that is copied (row_conversion.h).
#pragma once

#include "portable.h"

namespace kvpool {

constexpr int kBlock = 16;  // e2m1 values that share one ue5m3 scale; on a GPU, values per thread
constexpr int kTile = 128;  // values that share one fp32 scale; every latent rank is a multiple of it

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

// Finite form of the fp32 bits of a bf16: NaN becomes 0, infinities the largest finite bf16.
KVPOOL_HD uint32_t finite_bits(uint32_t wide) {
  const uint32_t magnitude = wide & 0x7FFFFFFFu;
  const uint32_t finite = magnitude < 0x7F7F0000u ? magnitude : 0x7F7F0000u;
  return magnitude > 0x7F800000u ? 0u : finite | (wide & 0x80000000u);
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
  const float size = smaller(float_of(bits & 0x7FFFFFFFu), kE4m3Max);
  // Below 2^-6 steps are 2^-9 wide, the spacing of fp32 between 2^14 and 2^15: the addition itself rounds.
  const uint32_t subnormal = bits_of(add(size, 16384.0f)) - bits_of(16384.0f);
  const uint32_t normal = ((bits_of(size) + 0x7FFFFu + ((bits_of(size) >> 20) & 1u)) >> 20) - ((127u - 7u) << 3);
  return static_cast<uint8_t>(sign | (size < 0x1p-6f ? subnormal : normal));
}

// --------------------------------------------------------------------------------------- ue5m3, e2m1

// Value of a byte up to kUe5m3MaxByte; encoders store only these.
KVPOOL_HD float finite_ue5m3_value(uint32_t byte) {
  const float subnormal = multiply(static_cast<float>(static_cast<int32_t>(byte)), 0x1p-17f);
  return byte < 8u ? subnormal : float_of((byte << 20) + (112u << 23));
}

KVPOOL_HD float ue5m3_value(uint32_t byte) {
  return byte > kUe5m3MaxByte ? float_of(0x7F800000u | ((byte & 7u) << 20)) : finite_ue5m3_value(byte);
}

// Nearest byte of a non-negative value; 0 if the value rounds to 0.
KVPOOL_HD uint32_t ue5m3_byte(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t subnormal = bits_of(add(value, 64.0f)) - bits_of(64.0f);
  const uint32_t normal = ((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - ((127u - 15u) << 3);
  const uint32_t byte = value < 0x1p-14f ? subnormal : normal;
  return byte < kUe5m3MaxByte ? byte : kUe5m3MaxByte;
}

// Nearest e2m1 magnitude of a non-negative value; values above 6 give 6.
KVPOOL_HD float e2m1_rounded(float size) {
  size = smaller(size, kE2m1Max);
  // Steps are half of the value's power of two, 0.5 below 1: the fp32 spacing at 2^22 times that power.
  const float spacer = float_of((bits_of(larger(size, 1.0f)) & 0x7F800000u) + (22u << 23));
  return subtract(add(size, spacer), spacer);
}

// Quotient of a bf16 and a ue5m3 number, rounded, at most 6. `product` is the bf16 times the rounded reciprocal.
// A quotient halfway between two e2m1 magnitudes is exact. All other quotients are at least 2^-10 away from the middle,
// and the result is on the same side of the middle as the quotient. (tests/codec/test_codec_rules.py checks all pairs.)
KVPOOL_HD float e2m1_quotient(float product) {
  const float size = smaller(product, kE2m1Max);
  return subtract(add(size, 3072.0f), 3072.0f);  // a multiple of 2^-12
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

// Number of scales that an encoder tries for a block. With b6 and b4 the bytes of largest / 6 and largest / 4, the
// order is b6, b6 - 1, b6 + 1, b4 - 1, b4.
constexpr int kCandidates = 5;

KVPOOL_HD int32_t candidate_step(int number) { return number == 0 ? 0 : number < 3 ? 2 * number - 3 : number - 4; }

KVPOOL_HD uint32_t clamped_byte(int32_t byte) {
  const int32_t positive = byte > 1 ? byte : 1, most = static_cast<int32_t>(kUe5m3MaxByte);
  return static_cast<uint32_t>(positive < most ? positive : most);
}

// Sum as a tree, adjacent pairs first.
template <int kCount>
KVPOOL_HD float pairwise_sum(const float* values) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    return add(pairwise_sum<kCount / 2>(values), pairwise_sum<kCount / 2>(values + kCount / 2));
  }
}

// Encodes kBlocks blocks of 16 bf16 values into 8 bytes of codes and a scale byte each. On a CPU one vector lane
// encodes one block, which determines the order of the arrays; on a GPU one thread does.
template <int kBlocks>
KVPOOL_HD void e2m1_encode(const uint16_t values[kBlocks * kBlock], Bytes8 codes[kBlocks], uint8_t scale_bytes[kBlocks]) {
  float sizes[kBlock][kBlocks];
  uint32_t words[2][kBlocks];
  uint32_t pairs[kBlock / 2][kBlocks];  // pairs of values, as in memory
  uint32_t sixth[kBlocks], quarter[kBlocks], nonzero[kBlocks], best_byte[kBlocks];
  float best_error[kBlocks];
  for (int block = 0; block < kBlocks; ++block) {
    KVPOOL_UNROLL
    for (int i = 0; i < kBlock / 2; ++i) std::memcpy(&pairs[i][block], values + block * kBlock + 2 * i, 4);
  }
  for (int block = 0; block < kBlocks; ++block) {
    uint32_t largest = 0, signs[2] = {0, 0};
    written_out<kBlock>([&](auto i) KVPOOL_LAMBDA {
      const uint32_t pair = pairs[i / 2][block], bits = finite_bits(i % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u);
      const uint32_t size = bits & 0x7FFFFFFFu;
      sizes[i][block] = float_of(size);
      largest = size > largest ? size : largest;
      signs[i / 8] |= (bits >> 31) << (4 * (i % 8) + 3);
    });
    words[0][block] = signs[0];
    words[1][block] = signs[1];
    sixth[block] = ue5m3_byte(divide(float_of(largest), kE2m1Max));
    quarter[block] = ue5m3_byte(multiply(float_of(largest), 0.25f));
    nonzero[block] = largest > 0u ? 0xFFu : 0u;
    best_byte[block] = 0;
    best_error[block] = 0.0f;
  }
  for (int number = 0; number < kCandidates; ++number) {
    const int32_t step = candidate_step(number);
    for (int block = 0; block < kBlocks; ++block) {
      const uint32_t nearest = number < 3 ? sixth[block] : quarter[block];
      const uint32_t byte = clamped_byte(static_cast<int32_t>(nearest) + step);
      const float scale = finite_ue5m3_value(byte), reciprocal = divide(1.0f, scale);
      float squares[kBlock];
      written_out<kBlock>([&](auto i) KVPOOL_LAMBDA {
        // If a quotient is halfway between two magnitudes, it may round to either of them, with the same error.
        const float rounded = e2m1_rounded(multiply(sizes[i][block], reciprocal));
        const float difference = subtract(sizes[i][block], multiply(rounded, scale));
        squares[i] = multiply(difference, difference);
      });
      const float error = pairwise_sum<kBlock>(squares);
      const bool better = number == 0 || error < best_error[block];  // at a tie the earlier candidate stays
      best_byte[block] = better ? byte : best_byte[block];
      best_error[block] = better ? error : best_error[block];
    }
  }
  for (int block = 0; block < kBlocks; ++block) {
    const float reciprocal = divide(1.0f, finite_ue5m3_value(best_byte[block]));
    uint32_t low = words[0][block], high = words[1][block];
    written_out<kBlock / 2>([&](auto i) KVPOOL_LAMBDA {
      low |= e2m1_code(e2m1_rounded(e2m1_quotient(multiply(sizes[i][block], reciprocal)))) << (4 * i);
      high |= e2m1_code(e2m1_rounded(e2m1_quotient(multiply(sizes[8 + i][block], reciprocal)))) << (4 * i);
    });
    words[0][block] = low;
    words[1][block] = high;
    best_byte[block] &= nonzero[block];
  }
  for (int block = 0; block < kBlocks; ++block) {
    codes[block] = {words[0][block], words[1][block]};
    scale_bytes[block] = static_cast<uint8_t>(best_byte[block]);
  }
}

template <int kBlocks>
KVPOOL_HD void e2m1_decode(const Bytes8 codes[kBlocks], const uint8_t scale_bytes[kBlocks],
                           uint16_t values[kBlocks * kBlock]) {
  for (int block = 0; block < kBlocks; ++block) {
    const float scale = ue5m3_value(scale_bytes[block]);
    KVPOOL_VECTOR
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t code = (codes[block].word[i / 8] >> (4 * (i % 8))) & 15u;
      values[block * kBlock + i] = bf16_bits(multiply(scale, e2m1_value(code)));
    }
  }
}

// ------------------------------------------------------------------------------------ runs of values

template <int kValues>
KVPOOL_HD void e4m3_decode(const uint8_t codes[kValues], float scale, uint16_t values[kValues]) {
  KVPOOL_VECTOR
  for (int i = 0; i < kValues; ++i) values[i] = bf16_bits(multiply(e4m3_value(codes[i]), scale));
}

template <int kValues>
KVPOOL_HD void e4m3_encode(const uint16_t values[kValues], float scale, uint8_t codes[kValues]) {
  KVPOOL_VECTOR
  for (int i = 0; i < kValues; ++i) codes[i] = e4m3_code(divide(float_of(finite_bits(static_cast<uint32_t>(values[i]) << 16)), scale));
}

// Largest magnitude of some values, without NaN. The largest magnitude of a tile is the largest of its blocks. Compared
// as integers, bf16 magnitudes have the order of their values, and NaN is above infinity.
template <int kValues>
KVPOOL_HD float largest_of(const uint16_t values[kValues]) {
  uint32_t largest = 0;
  KVPOOL_VECTOR
  for (int i = 0; i < kValues; ++i) {
    const uint32_t size = values[i] & 0x7FFFu;
    const uint32_t number = size & -static_cast<uint32_t>(size <= 0x7F80u);  // a branch would keep g++ from vectorizing
    largest = number > largest ? number : largest;
  }
  return float_of(finite_bits(largest << 16));
}

KVPOOL_HD float tile_scale(float largest) {
  const float scale = divide(largest, kE4m3Max);
  return scale > kFp32Tiny ? scale : kFp32Tiny;
}

}  // namespace kvpool
