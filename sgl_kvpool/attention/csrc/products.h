// Products of queries with a tile of decoded rows, in registers.
#pragma once

#include <algorithm>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "../../codec/csrc/row_decoder.h"

namespace kvpool {

constexpr int kTileRows = 32;  // rows decoded together: 37 KB of bf16, in an L2 cache
constexpr int kGroup = 4;      // queries (one head of one token each) that share a register tile

// ---------------------------------------------------------------------------------------------- vectors

KVPOOL_HD Floats even_values(Words pairs) { return reinterpret_cast<Floats>(pairs << 16); }
KVPOOL_HD Floats odd_values(Words pairs) { return reinterpret_cast<Floats>(pairs & 0xFFFF0000u); }

// Sums of pairs of groups of four lanes, those of `a` first.
KVPOOL_HD Floats fold(Floats a, Floats b) {
#ifdef __AVX512BW__
  constexpr Ints kEven = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
#else
  constexpr Ints kEven = {0, 1, 2, 3, 8, 9, 10, 11};
#endif
  return __builtin_shuffle(a, b, kEven) + __builtin_shuffle(a, b, kEven + 4);
}

// Sums of the lanes of kRowsTogether vectors: that of vector r in lane 4 * r.
constexpr int kRowsTogether = kLanes / 4;
KVPOOL_HD Floats lane_sums(const Floats (&rows)[kRowsTogether]) {
#ifdef __AVX512BW__
  Floats sums = fold(fold(rows[0], rows[1]), fold(rows[2], rows[3]));
  constexpr Ints kNext = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
#else
  Floats sums = fold(rows[0], rows[1]);
  constexpr Ints kNext = {1, 0, 3, 2, 5, 4, 7, 6};
#endif
  sums += __builtin_shuffle(sums, kNext);
  return sums + __builtin_shuffle(sums, kNext ^ 3);
}

// One value of all lanes.
template <typename Function>
KVPOOL_HD float over_lanes(Floats vector, Function&& function) {
  Ints lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  written_out<kLanes == 16 ? 4 : 3>(
      [&](auto step) KVPOOL_LAMBDA { vector = function(vector, __builtin_shuffle(vector, lanes ^ (1 << step))); });
  return vector[0];
}

KVPOOL_HD float sum_of(Floats vector) {
  return over_lanes(vector, [](Floats a, Floats b) KVPOOL_LAMBDA { return a + b; });
}

KVPOOL_HD float largest_of(Floats vector) {
  return over_lanes(vector, [](Floats a, Floats b) KVPOOL_LAMBDA { return b > a ? b : a; });
}

// exp for x <= 0, within 2 ulp; 0 below -87, NaN for NaN.
KVPOOL_HD Floats exponential(Floats x) {
  const Floats zero = {}, least = zero - 87.0f;
  const Floats bounded = x < least ? least : x;
  const Floats shifted = bounded * 1.44269504f + 12582912.0f;  // its low bits are the rounded power of two
  const Floats power = shifted - 12582912.0f;
  const Floats rest = (bounded - power * 0.693359375f) + power * 2.12194440e-4f;
  Floats y = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * rest + 8.3334519073e-3f;
  y = y * rest + 4.1665795894e-2f;
  y = y * rest + 1.6666665459e-1f;
  y = y * rest + 5.0000001201e-1f;
  y = y * (rest * rest) + rest + 1.0f;
  const Ints exponent = (reinterpret_cast<Ints>(shifted) - 0x4B400000 + 127) << 23;
  const Floats result = y * reinterpret_cast<Floats>(exponent);
  return x < least ? zero : result;
}

// ------------------------------------------------------------------------------------ products of a tile

// Operands of scores: bf16 queries with AVX-512-BF16, whose products are exact; otherwise float32, the even values of
// each vector of rows before its odd ones.
#ifdef __AVX512BF16__
constexpr bool kCanDotBf16 = true;
#else
constexpr bool kCanDotBf16 = false;
#endif

// Register tiles: g++ keeps an array in registers only if no loop indexes it, hence `written_out`.
template <int kRows, int kQueries, bool kDot>
KVPOOL_HD void add_products(Floats (&sums)[kQueries][kRows], const uint16_t* rows, int64_t stride, const void* queries,
                            int64_t query_stride, int64_t first, int64_t count) {
  for (int64_t at = first; at < first + count; at += kHalves) {
    Words pairs[kRows];
    written_out<kRows>([&](auto r) KVPOOL_LAMBDA { pairs[r] = load_vector<Words>(rows + r * stride + at); });
    if constexpr (kDot) {
#ifdef __AVX512BF16__
      written_out<kQueries>([&](auto i) KVPOOL_LAMBDA {
        const auto query = load_vector<__m512bh>(static_cast<const uint16_t*>(queries) + i * query_stride + at);
        written_out<kRows>([&](auto r) KVPOOL_LAMBDA {
          sums[i][r] = _mm512_dpbf16_ps(sums[i][r], query, reinterpret_cast<__m512bh>(pairs[r]));
        });
      });
#endif
    } else {
      Floats even[kRows], odd[kRows];
      written_out<kRows>([&](auto r) KVPOOL_LAMBDA { even[r] = even_values(pairs[r]), odd[r] = odd_values(pairs[r]); });
      written_out<kQueries>([&](auto i) KVPOOL_LAMBDA {
        const float* query = static_cast<const float*>(queries) + i * query_stride + at;
        const Floats with_even = load_vector<Floats>(query), with_odd = load_vector<Floats>(query + kLanes);
        written_out<kRows>([&](auto r) KVPOOL_LAMBDA { sums[i][r] += with_even * even[r]; });
        written_out<kRows>([&](auto r) KVPOOL_LAMBDA { sums[i][r] += with_odd * odd[r]; });
      });
    }
  }
}

// Rows of a tile, decoded, and what their latent is multiplied with.
struct Tile {
  const uint16_t* values;  // [kTileRows, stride]
  int64_t stride;
  const float* scales;  // [tiles of 128 values, kTileRows]; only with kScaled
};

// Brings the rows of the next tile into the L2 cache, some lines before each step of the products of this one: a core
// has few misses in flight, and would wait for the lines of whole rows.
struct Prefetch {
  const uint8_t* const* row;
  const uint8_t* const* end;
  int64_t row_bytes;
  int64_t lines;  // for each step
  int64_t offset = 0;
  KVPOOL_HD void step() {
    for (int64_t line = 0; line < lines && row < end; ++line) {
      __builtin_prefetch(*row + offset, 0, 2);
      offset += 64;
      if (offset >= row_bytes) offset = 0, ++row;
    }
  }
};

// scores[i, r] of kRows rows, from `row` on, with kQueries queries.
template <int kRows, int kQueries, bool kDot, bool kScaled>
KVPOOL_HD void scores_of(const RowLayout& layout, const Tile& tile, int row, const void* queries, int64_t query_stride,
                         float* scores, Prefetch& prefetch) {
  prefetch.step();
  Floats sums[kQueries][kRows];
  const auto each = [&](auto&& function) KVPOOL_LAMBDA {
    written_out<kRows>([&](auto r)
                           KVPOOL_LAMBDA { written_out<kQueries>([&](auto i) KVPOOL_LAMBDA { function(r, i); }); });
  };
  each([&](auto r, auto i) KVPOOL_LAMBDA { sums[i][r] = Floats{}; });
  const uint16_t* rows = tile.values + row * tile.stride;
  int64_t done = 0;
  if constexpr (kScaled) {
    for (; done < layout.latent_values; done += kTile) {
      Floats of_tile[kQueries][kRows];
      each([&](auto r, auto i) KVPOOL_LAMBDA { of_tile[i][r] = Floats{}; });
      add_products<kRows, kQueries, kDot>(of_tile, rows, tile.stride, queries, query_stride, done, kTile);
      const float* scales = tile.scales + done / kTile * kTileRows + row;
      each([&](auto r, auto i) KVPOOL_LAMBDA { sums[i][r] += of_tile[i][r] * scales[r]; });
    }
  }
  const int64_t rest = layout.latent_values + layout.rope_values - done;
  add_products<kRows, kQueries, kDot>(sums, rows, tile.stride, queries, query_stride, done, rest);
  written_out<kQueries>([&](auto i) KVPOOL_LAMBDA {
    const Floats of_rows = lane_sums(sums[i]);
    written_out<kRows>([&](auto r) KVPOOL_LAMBDA { scores[i * kTileRows + row + r] = of_rows[4 * r]; });
  });
}

constexpr int kVectors = kVectorBytes == 64 ? 2 : 1;  // vectors of bf16 values that sums are kept of in registers

// sums = sums * factors + weights * values, for the latent values of a tile; sums in the order even, odd of each
// vector.
template <int kQueries, bool kScaled>
KVPOOL_HD void add_values(const RowLayout& layout, const Tile& tile, int rows, const float* weights,
                          const float* factors, float* sums, Prefetch& prefetch) {
  float scaled[kQueries][kTileRows];
  const float* used = kScaled ? scaled[0] : weights;
  for (int64_t first = 0; first < layout.latent_values; first += kVectors * kHalves) {
    prefetch.step();
    if (kScaled && first % kTile == 0) {
      const float* scales = tile.scales + first / kTile * kTileRows;
      for (int i = 0; i < kQueries; ++i) {
        for (int r = 0; r < kTileRows; ++r) scaled[i][r] = weights[i * kTileRows + r] * scales[r];
      }
    }
    Floats added[kQueries][2 * kVectors];
    const auto each = [&](auto&& function) KVPOOL_LAMBDA {
      written_out<kQueries>(
          [&](auto i) KVPOOL_LAMBDA { written_out<2 * kVectors>([&](auto v) KVPOOL_LAMBDA { function(i, v); }); });
    };
    each([&](auto i, auto v) KVPOOL_LAMBDA { added[i][v] = Floats{}; });
    for (int r = 0; r < rows; ++r) {
      Floats value[2 * kVectors];
      written_out<kVectors>([&](auto v) KVPOOL_LAMBDA {
        const Words pairs = load_vector<Words>(tile.values + r * tile.stride + first + v * kHalves);
        value[2 * v] = even_values(pairs);
        value[2 * v + 1] = odd_values(pairs);
      });
      each([&](auto i, auto v) KVPOOL_LAMBDA { added[i][v] += value[v] * used[i * kTileRows + r]; });
    }
    each([&](auto i, auto v) KVPOOL_LAMBDA {
      float* sum = sums + i * layout.latent_values + first + v * kLanes;
      store_vector(sum, load_vector<Floats>(sum) * factors[i] + added[i][v]);
    });
  }
}

}  // namespace kvpool
