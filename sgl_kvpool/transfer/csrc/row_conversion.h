// Whole rows from one format into another, for nvcc and g++ alike. A row is handled in blocks of 16 values, the
// latent's first, then the rope's; on a GPU the rope goes in pairs of values. A latent that both formats store alike is
// copied. Where the parts of a row lie comes from layout.py: nothing here knows it.
#pragma once

#include "row_codec.h"

namespace kvpool {

// Ids as ../conversion.py gives them.
enum class Latent : int64_t { kBf16 = 0, kE4m3 = 1, kE4m3Tiles = 2, kE2m1 = 3 };
enum class Rope : int64_t { kBf16 = 0, kE4m3 = 1 };

// As eleven int64, in this order.
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
  int64_t latent_by_k_scale;  // 1: values are divided by the layer's k_scale
  int64_t rope_by_k_scale;

  KVPOOL_HD int latent_blocks() const { return static_cast<int>(latent_values / kBlock); }
  KVPOOL_HD float latent_divisor(float k_scale) const { return latent_by_k_scale ? k_scale : 1.0f; }
  KVPOOL_HD float rope_divisor(float k_scale) const { return rope_by_k_scale ? k_scale : 1.0f; }
};

static_assert(sizeof(RowLayout) == 11 * sizeof(int64_t), "a list of eleven numbers");

template <Latent kFrom>
KVPOOL_HD void read_latent(const uint8_t* row, const RowLayout& layout, int block, float k_scale,
                           uint16_t values[kBlock]) {
  const uint8_t* latent = row + layout.latent_offset;
  const uint8_t* scales = row + layout.scale_offset;
  if constexpr (kFrom == Latent::kBf16) {
    bf16_read(latent + 32 * block, values);
  } else if constexpr (kFrom == Latent::kE4m3) {
    e4m3_decode(load<Bytes16>(latent + 16 * block), layout.latent_divisor(k_scale), values);
  } else if constexpr (kFrom == Latent::kE4m3Tiles) {
    e4m3_decode(load<Bytes16>(latent + 16 * block), load<float>(scales + 4 * (block / (kTile / kBlock))),
                values);
  } else {
    e2m1_decode(load<Bytes8>(latent + 8 * block), load<uint8_t>(scales + block), values);
  }
}

// `largest` is the largest magnitude of the block's tile; only tiles look at it.
template <Latent kTo>
KVPOOL_HD void write_latent(uint8_t* row, const RowLayout& layout, int block, float k_scale, float largest,
                            const uint16_t values[kBlock]) {
  uint8_t* latent = row + layout.latent_offset;
  uint8_t* scales = row + layout.scale_offset;
  if constexpr (kTo == Latent::kBf16) {
    bf16_write(latent + 32 * block, values);
  } else if constexpr (kTo == Latent::kE4m3) {
    store(latent + 16 * block, e4m3_encode<Bytes16>(values, layout.latent_divisor(k_scale)));
  } else if constexpr (kTo == Latent::kE4m3Tiles) {
    const float scale = tile_scale(largest);
    store(latent + 16 * block, e4m3_encode<Bytes16>(values, scale));
    if (block % (kTile / kBlock) == 0) store(scales + 4 * (block / (kTile / kBlock)), scale);
  } else {
    uint8_t scale;
    store(latent + 8 * block, e2m1_encode(values, &scale));
    store(scales + block, scale);
  }
}

// A block that both sides store alike keeps its bytes.
template <Latent kBoth>
KVPOOL_HD void copy_latent(const uint8_t* from_row, const RowLayout& from, uint8_t* to_row, const RowLayout& to,
                           int block) {
  static_assert(kBoth == Latent::kE2m1, "the one latent that several layouts have");
  store(to_row + to.latent_offset + 8 * block, load<Bytes8>(from_row + from.latent_offset + 8 * block));
  store(to_row + to.scale_offset + block, load<uint8_t>(from_row + from.scale_offset + block));
}

// Values of the rope from `first` on, as many as `Codes`, which e4m3 is loaded and stored as, has bytes.
template <typename Codes>
KVPOOL_HD void convert_rope(const uint8_t* from_row, const RowLayout& from, uint8_t* to_row,
                            const RowLayout& to, int64_t first, float k_scale) {
  constexpr int kValues = sizeof(Codes);
  uint16_t values[kValues];
  const uint8_t* source = from_row + from.rope_offset;
  uint8_t* target = to_row + to.rope_offset;
  if (from.rope == Rope::kBf16) {
    bf16_read_words<kValues>(source + 2 * first, values);
  } else {
    e4m3_decode(load<Codes>(source + first), from.rope_divisor(k_scale), values);
  }
  if (to.rope == Rope::kBf16) {
    bf16_write_words<kValues>(target + 2 * first, values);
  } else {
    store(target + first, e4m3_encode<Codes>(values, to.rope_divisor(k_scale)));
  }
}

KVPOOL_HD void clear_padding(uint8_t* row, const RowLayout& layout) {
  for (int64_t i = layout.payload_bytes; i < layout.row_bytes; ++i) store<uint8_t>(row + i, 0);
}

// A row by one thread.
template <Latent kFrom, Latent kTo>
inline void convert_row(const uint8_t* from_row, const RowLayout& from, uint8_t* to_row, const RowLayout& to,
                        float k_scale) {
  if constexpr (kFrom == kTo) {
    for (int block = 0; block < from.latent_blocks(); ++block) copy_latent<kTo>(from_row, from, to_row, to, block);
  } else {
    constexpr int kTileBlocks = kTile / kBlock;
    for (int first = 0; first < from.latent_blocks(); first += kTileBlocks) {
      uint16_t values[kTileBlocks][kBlock];
      float largest = 0.0f;
      for (int i = 0; i < kTileBlocks; ++i) {
        read_latent<kFrom>(from_row, from, first + i, k_scale, values[i]);
        if constexpr (kTo == Latent::kE4m3Tiles) {
          const float size = largest_of(values[i]);
          largest = size > largest ? size : largest;
        }
      }
      for (int i = 0; i < kTileBlocks; ++i) {
        write_latent<kTo>(to_row, to, first + i, k_scale, largest, values[i]);
      }
    }
  }
  for (int64_t first = 0; first < from.rope_values; first += kBlock) {
    convert_rope<Words16>(from_row, from, to_row, to, first, k_scale);
  }
  clear_padding(to_row, to);
}

// Calls `function.template operator()<from, to>()` for the pairs that a narrower host tier needs, both ways;
// false for another pair.
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
