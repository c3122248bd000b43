// Conversion of whole rows from one format into another, for nvcc and g++. The latent is converted in blocks of 16 values
// (on a CPU 32 or 8 blocks together), then the rope: on a CPU all its values together, on a GPU in pairs. A latent that
// both formats encode alike is copied. RowLayout has all offsets, which layout.py computes.
#pragma once

#include "row_codec.h"

namespace kvpool {

constexpr int kTileBlocks = kTile / kBlock;
// Blocks that a CPU handles together: those of a latent of 512, two vectors of 16 lanes.
constexpr int kVectorBlocks = 32;

constexpr int kRope = 64;  // rotary values of a row with rope

// Ids, equal to those of ../compiled.py.
enum class Latent : int64_t { kBf16 = 0, kE4m3 = 1, kE4m3Tiles = 2, kE2m1 = 3 };
enum class Rope : int64_t { kBf16 = 0, kE4m3 = 1 };

// Byte table of a row, passed as ten int64 in this order.
struct RowLayout {
  Latent latent;
  Rope rope;
  int64_t latent_values;
  int64_t rope_values;
  int64_t latent_offset;
  int64_t scale_offset;
  int64_t rope_offset;
  int64_t payload_bytes;
  int64_t row_bytes;
  int64_t by_k_scale;  // 1: all values are divided by the layer's k_scale

  KVPOOL_HD int latent_blocks() const { return static_cast<int>(latent_values / kBlock); }
  KVPOOL_HD float divisor(float k_scale) const { return by_k_scale ? k_scale : 1.0f; }
};

static_assert(sizeof(RowLayout) == 10 * sizeof(int64_t), "a list of ten numbers");

// Reads kBlocks blocks of 16 values, starting with `block`, as bf16.
template <Latent kFrom, int kBlocks>
KVPOOL_HD void read_latent(const uint8_t* row, const RowLayout& layout, int block, float k_scale,
                           uint16_t values[kBlocks * kBlock]) {
  const uint8_t* latent = row + layout.latent_offset;
  const uint8_t* scales = row + layout.scale_offset;
  if constexpr (kFrom == Latent::kBf16) {
    load_bytes<2 * kBlock * kBlocks>(latent + 2 * kBlock * block, values);
  } else if constexpr (kFrom == Latent::kE4m3) {
    uint8_t codes[kBlocks * kBlock];
    load_bytes<kBlock * kBlocks>(latent + kBlock * block, codes);
    e4m3_decode<kBlock * kBlocks>(codes, layout.divisor(k_scale), values);
  } else if constexpr (kFrom == Latent::kE4m3Tiles) {
    constexpr int kTogether = kBlocks < kTileBlocks ? kBlocks : kTileBlocks;
    uint8_t codes[kBlocks * kBlock];
    load_bytes<kBlock * kBlocks>(latent + kBlock * block, codes);
    for (int first = 0; first < kBlocks; first += kTogether) {
      const float scale = load<float>(scales + 4 * ((block + first) / kTileBlocks));
      e4m3_decode<kBlock * kTogether>(codes + kBlock * first, scale, values + kBlock * first);
    }
  } else {
    Bytes8 codes[kBlocks];
    uint8_t scale_bytes[kBlocks];
    load_bytes<8 * kBlocks>(latent + 8 * block, codes);
    for (int i = 0; i < kBlocks; ++i) scale_bytes[i] = load<uint8_t>(scales + block + i);
    e2m1_decode<kBlocks>(codes, scale_bytes, values);
  }
}

// Writes kBlocks blocks of 16 bf16 values, starting with `block`. `largest` holds the largest magnitude of each tile of
// these blocks; only encodings with tiles read it.
template <Latent kTo, int kBlocks>
KVPOOL_HD void write_latent(uint8_t* row, const RowLayout& layout, int block, float k_scale, const float* largest,
                            const uint16_t values[kBlocks * kBlock]) {
  uint8_t* latent = row + layout.latent_offset;
  uint8_t* scales = row + layout.scale_offset;
  if constexpr (kTo == Latent::kBf16) {
    store_bytes<2 * kBlock * kBlocks>(latent + 2 * kBlock * block, values);
  } else if constexpr (kTo == Latent::kE4m3) {
    uint8_t codes[kBlocks * kBlock];
    e4m3_encode<kBlock * kBlocks>(values, layout.divisor(k_scale), codes);
    store_bytes<kBlock * kBlocks>(latent + kBlock * block, codes);
  } else if constexpr (kTo == Latent::kE4m3Tiles) {
    constexpr int kTogether = kBlocks < kTileBlocks ? kBlocks : kTileBlocks;
    uint8_t codes[kBlocks * kBlock];
    for (int first = 0; first < kBlocks; first += kTogether) {
      const float scale = tile_scale(largest[first / kTileBlocks]);
      e4m3_encode<kBlock * kTogether>(values + kBlock * first, scale, codes + kBlock * first);
      if ((block + first) % kTileBlocks == 0) store(scales + 4 * ((block + first) / kTileBlocks), scale);
    }
    store_bytes<kBlock * kBlocks>(latent + kBlock * block, codes);
  } else {
    Bytes8 codes[kBlocks];
    uint8_t scale_bytes[kBlocks];
    e2m1_encode<kBlocks>(values, codes, scale_bytes);
    store_bytes<8 * kBlocks>(latent + 8 * block, codes);
    for (int i = 0; i < kBlocks; ++i) store(scales + block + i, scale_bytes[i]);
  }
}

// Copies a block that both formats encode alike.
template <Latent kBoth>
KVPOOL_HD void copy_latent(const uint8_t* from_row, const RowLayout& from, uint8_t* to_row, const RowLayout& to,
                           int block) {
  static_assert(kBoth == Latent::kE2m1, "the only latent encoding that several layouts share");
  store(to_row + to.latent_offset + 8 * block, load<Bytes8>(from_row + from.latent_offset + 8 * block));
  store(to_row + to.scale_offset + block, load<uint8_t>(from_row + from.scale_offset + block));
}

// Converts kValues rotary values, starting with `first`. The rope follows the scales; with a short latent it begins at a
// multiple of 4 bytes only.
template <int kValues>
KVPOOL_HD void convert_rope(const uint8_t* from_row, const RowLayout& from, uint8_t* to_row,
                            const RowLayout& to, int64_t first, float k_scale) {
  uint16_t values[kValues];
  const uint8_t* source = from_row + from.rope_offset;
  uint8_t* target = to_row + to.rope_offset;
  if (from.rope == Rope::kBf16) {
    load_bytes<2 * kValues, 4>(source + 2 * first, values);
  } else {
    uint8_t codes[kValues];
    load_bytes<kValues>(source + first, codes);
    e4m3_decode<kValues>(codes, from.divisor(k_scale), values);
  }
  if (to.rope == Rope::kBf16) {
    store_bytes<2 * kValues, 4>(target + 2 * first, values);
  } else {
    uint8_t codes[kValues];
    e4m3_encode<kValues>(values, to.divisor(k_scale), codes);
    store_bytes<kValues>(target + first, codes);
  }
}

KVPOOL_HD void clear_padding(uint8_t* row, const RowLayout& layout) {
  for (int64_t i = layout.payload_bytes; i < layout.row_bytes; ++i) store<uint8_t>(row + i, 0);
}

template <Latent kFrom, Latent kTo, int kBlocks>
inline void convert_blocks(const uint8_t* from_row, const RowLayout& from, uint8_t* to_row, const RowLayout& to, int block,
                           float k_scale) {
  static_assert(kBlocks % kTileBlocks == 0);
  uint16_t values[kBlocks * kBlock];
  float largest[kBlocks / kTileBlocks] = {};
  read_latent<kFrom, kBlocks>(from_row, from, block, k_scale, values);
  if constexpr (kTo == Latent::kE4m3Tiles) {
    for (int i = 0; i < kBlocks / kTileBlocks; ++i) largest[i] = largest_of<kTile>(values + kTile * i);
  }
  write_latent<kTo, kBlocks>(to_row, to, block, k_scale, largest, values);
}

// Converts a row on one thread of a CPU.
template <Latent kFrom, Latent kTo>
inline void convert_row(const uint8_t* from_row, const RowLayout& from, uint8_t* to_row, const RowLayout& to,
                        float k_scale) {
  int block = 0;
  if constexpr (kFrom == kTo) {
    for (; block < from.latent_blocks(); ++block) copy_latent<kTo>(from_row, from, to_row, to, block);
  } else {
    for (; block + kVectorBlocks <= from.latent_blocks(); block += kVectorBlocks) {
      convert_blocks<kFrom, kTo, kVectorBlocks>(from_row, from, to_row, to, block, k_scale);
    }
    for (; block < from.latent_blocks(); block += kTileBlocks) {
      convert_blocks<kFrom, kTo, kTileBlocks>(from_row, from, to_row, to, block, k_scale);
    }
  }
  for (int64_t first = 0; first < from.rope_values; first += kRope) {
    convert_rope<kRope>(from_row, from, to_row, to, first, k_scale);
  }
  clear_padding(to_row, to);
}

// Bytes, read plus written, that a core converts in some 100 us, five times the time to start a thread: at 2 GB/s to
// e2m1, at 8 to 12 GB/s to other encodings.
template <Latent kTo>
constexpr int64_t kConvertedBytesPerThread = kTo == Latent::kE2m1 ? 256 * 1024 : 1024 * 1024;

// Calls `function.template operator()<from, to>()` for the pairs that a narrower host tier needs, in both directions;
// returns false for any other pair. A host layout takes a pair for each wider layout of the device.
template <typename Function>
bool for_formats(Latent from, Latent to, Function&& function) {
#define KVPOOL_ONE_WAY(a, b)                                                      \
  if (from == Latent::a && to == Latent::b) {                                     \
    function.template operator()<Latent::a, Latent::b>();                         \
    return true;                                                                  \
  }
#define KVPOOL_PAIR(a, b) KVPOOL_ONE_WAY(a, b) KVPOOL_ONE_WAY(b, a)
  KVPOOL_PAIR(kBf16, kE4m3Tiles)
  KVPOOL_PAIR(kBf16, kE2m1)
  KVPOOL_PAIR(kE4m3, kE2m1)
  KVPOOL_PAIR(kE4m3Tiles, kE2m1)
  KVPOOL_ONE_WAY(kE2m1, kE2m1)
#undef KVPOOL_PAIR
#undef KVPOOL_ONE_WAY
  return false;
}

}  // namespace kvpool
