// Decoder of rows on a CPU: latent values as bf16 without their fp32 scale, exactly, since e4m3, e2m1 times ue5m3, and
// bf16 are bf16 numbers. Callers multiply by `latent_scale`.
#pragma once

#ifdef __AVX512BW__
#include <immintrin.h>
#endif

#include "row_conversion.h"

namespace kvpool {

// A vector register: 64 bytes with AVX-512, else 32, which g++ splits where registers are narrower.
#ifdef __AVX512BW__
constexpr int kVectorBytes = 64;
#else
constexpr int kVectorBytes = 32;
#endif
constexpr int kLanes = kVectorBytes / 4;
constexpr int kHalves = kVectorBytes / 2;  // 16-bit lanes

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes)));

template <typename Vector>
KVPOOL_HD Vector load_vector(const void* address) {
  Vector value;
  std::memcpy(&value, address, sizeof value);
  return value;
}

template <typename Vector>
KVPOOL_HD void store_vector(void* address, const Vector& value) {
  std::memcpy(address, &value, sizeof value);
}

// Values that decoding looks up, as bf16: of every e4m3 magnitude, and products of every ue5m3 byte and e2m1 code.
struct DecodedValues {
  alignas(64) uint16_t e4m3[128];
  alignas(64) uint16_t e2m1[256][kBlock];
  DecodedValues() {
    for (uint32_t code = 0; code < 128; ++code) e4m3[code] = bf16_bits(e4m3_value(static_cast<uint8_t>(code)));
    for (uint32_t byte = 0; byte < 256; ++byte) {
      for (uint32_t code = 0; code < kBlock; ++code) {
        e2m1[byte][code] = bf16_bits(multiply(ue5m3_value(byte), e2m1_value(code)));
      }
    }
  }
};
inline const DecodedValues kDecoded;

#ifdef __AVX512BW__
// A vector of e4m3 codes as bf16.
KVPOOL_HD void e4m3_as_bf16(const uint8_t* codes, uint16_t* values) {
  const auto table = [](int number) KVPOOL_LAMBDA { return _mm512_load_si512(kDecoded.e4m3 + 32 * number); };
  const __m512i code = _mm512_cvtepu8_epi16(load_vector<__m256i>(codes));
  const __mmask32 upper = _mm512_test_epi16_mask(code, _mm512_set1_epi16(0x40));
  const __m512i low = _mm512_permutex2var_epi16(table(0), code, table(1));
  const __m512i size = _mm512_mask_blend_epi16(upper, low, _mm512_permutex2var_epi16(table(2), code, table(3)));
  const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(code, 8), _mm512_set1_epi16(static_cast<int16_t>(0x8000)));
  store_vector(values, _mm512_or_si512(size, sign));
}

// A block of 16 e2m1 codes as bf16.
KVPOOL_HD void e2m1_as_bf16(const uint8_t* codes, uint8_t scale_byte, uint16_t* values) {
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadu_si64(codes));
  const __m256i indices = _mm256_or_si256(bytes, _mm256_slli_epi32(bytes, 12));  // even values are the low nibbles
  const __m256i products = _mm256_load_si256(reinterpret_cast<const __m256i*>(kDecoded.e2m1[scale_byte]));
  store_vector(values, _mm256_permutexvar_epi16(indices, products));
}
#else
// A vector of e4m3 codes as bf16. Bits as a function of the magnitude have a straight piece for all normal numbers and
// one for each power of two of subnormals; each is the least where it holds.
KVPOOL_HD void e4m3_as_bf16(const uint8_t* codes, uint16_t* values) {
  Halves code;
  for (int i = 0; i < kHalves; ++i) code[i] = codes[i];
  const Halves size = code & 0x7F;
  const Halves normal = (size << 4) + 0x3C00, from_4 = (size << 5) + 0x3B80;
  const Halves from_2 = (size << 6) + 0x3B00, from_1 = (size << 7) + 0x3A80;
  const Halves high = normal < from_4 ? normal : from_4, low = from_2 < from_1 ? from_2 : from_1;
  Halves bits = high < low ? high : low;
  bits = size == 0 ? size : bits;
  bits = size == 0x7F ? bits | 0x7FC0 : bits;
  store_vector(values, bits | ((code & 0x80) << 8));
}

// A block of 16 e2m1 codes as bf16.
KVPOOL_HD void e2m1_as_bf16(const uint8_t* codes, uint8_t scale_byte, uint16_t* values) {
  typedef uint8_t Bytes __attribute__((vector_size(kBlock)));
  typedef uint64_t Twice __attribute__((vector_size(kBlock)));
  const uint64_t pairs = load<uint64_t>(codes);
  constexpr Bytes kEach = {0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15};
  const Bytes indices = __builtin_shuffle(reinterpret_cast<Bytes>(Twice{pairs, pairs >> 4}), kEach) & 15;
  const auto* products = reinterpret_cast<const uint8_t*>(kDecoded.e2m1[scale_byte]);
  const auto first = load_vector<Bytes>(products), second = load_vector<Bytes>(products + 16);
  constexpr Bytes kLow = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30},
                  kFirst = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  const Bytes low = __builtin_shuffle(__builtin_shuffle(first, second, kLow), indices);
  const Bytes high = __builtin_shuffle(__builtin_shuffle(first, second, kLow + 1), indices);
  store_vector(values, __builtin_shuffle(low, high, kFirst));
  store_vector(values + 8, __builtin_shuffle(low, high, kFirst + 8));
}
#endif

// Latent values [first, first + count) as bf16, without their fp32 scale; both are multiples of kTile.
template <Latent kFrom>
KVPOOL_HD void decode_latent(const uint8_t* row, const RowLayout& layout, int64_t first, int64_t count,
                             uint16_t* values) {
  const uint8_t* latent = row + layout.latent_offset;
  const uint8_t* scales = row + layout.scale_offset;
  if constexpr (kFrom == Latent::kBf16) {
    std::memcpy(values, latent + 2 * first, static_cast<size_t>(2 * count));
  } else if constexpr (kFrom == Latent::kE2m1) {
    for (int64_t i = first; i < first + count; i += kBlock)
      e2m1_as_bf16(latent + i / 2, scales[i / kBlock], values + i - first);
  } else {
    for (int64_t i = first; i < first + count; i += kHalves) e4m3_as_bf16(latent + i, values + i - first);
  }
}

KVPOOL_HD void decode_rope(const uint8_t* row, const RowLayout& layout, uint16_t* values) {
  const uint8_t* rope = row + layout.rope_offset;
  if (layout.rope == Rope::kBf16) {
    std::memcpy(values, rope, static_cast<size_t>(2 * layout.rope_values));
  } else {
    for (int64_t i = 0; i < layout.rope_values; i += kHalves) e4m3_as_bf16(rope + i, values + i);
  }
}

// What latent values of a tile are multiplied with: the fp32 scale of the row, if its encoding has one.
template <Latent kFrom>
KVPOOL_HD float latent_scale(const uint8_t* row, const RowLayout& layout, int64_t tile, float k_scale) {
  if constexpr (kFrom == Latent::kE4m3Tiles) return load<float>(row + layout.scale_offset + 4 * tile);
  return layout.divisor(k_scale);
}

// Calls function.template operator()<from>() for a layout's latent encoding.
template <typename Function>
KVPOOL_HD auto with_latent(const RowLayout& layout, Function&& function) {
  switch (layout.latent) {
    case Latent::kE4m3:
      return function.template operator()<Latent::kE4m3>();
    case Latent::kE4m3Tiles:
      return function.template operator()<Latent::kE4m3Tiles>();
    case Latent::kE2m1:
      return function.template operator()<Latent::kE2m1>();
    case Latent::kBf16:
      break;
  }
  return function.template operator()<Latent::kBf16>();
}

}  // namespace kvpool
