// Attention of queries over lists of rows on a CPU, in one pass: a tile of rows is decoded to bf16 in a core's cache,
// all heads and queries of a list multiply it, and softmax is kept online. Scores and sums are float32.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "../../codec/csrc/threads.h"
#include "products.h"

namespace kvpool {

constexpr int kMostQueries = 64;  // queries of an item of work: 128 KB of sums, in an L2 cache
constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Strided {
  uint8_t* data;
  int64_t token, head;  // strides in bytes
  uint8_t* at(int64_t t, int64_t h) const { return data + t * token + h * head; }
};

// A list of rows and the tokens that attend it.
struct RowList {
  int64_t first_element;  // of `kv_indices`
  int64_t first_token;
  int64_t tokens;
};

struct Attention {
  const RowLayout* layout;
  const uint8_t* row_buffer;
  int64_t row_stride;
  const void* kv_indices;  // int32 or int64 slots; negative ones are skipped
  bool kv_indices_are_int64;
  int64_t kv_indices_stride;
  int64_t page_tokens, page_rows, dcp_size;  // as PageStride; 1, 1 and 1 if slots are rows
  const RowList* lists;
  int64_t list_count;
  const int64_t* kv_lens;  // entries of its list that each token attends
  Strided q, q_rope, out, lse;
  bool q_is_bf16, out_is_bf16;
  int64_t heads;
  bool whole_lists;  // not divided among threads, by which the sums of a query would depend on the batch
  float scale, k_scale;

  // Row of a list's entry; negative if it has none.
  int64_t row(const RowList& list, int64_t position) const {
    const int64_t at = list.first_element + position * kv_indices_stride;
    const int64_t slot = kv_indices_are_int64 ? static_cast<const int64_t*>(kv_indices)[at]
                                              : static_cast<const int32_t*>(kv_indices)[at];
    // Of 100 ns for a row and one head, two divisions would be a tenth.
    if (slot < 0 || (dcp_size == 1 && page_tokens == page_rows)) return slot;
    const int64_t stored = slot / dcp_size;
    if (stored >> 40) return stored;  // beyond any pool, as its row, whose product could overflow
    return stored + stored / page_tokens * (page_rows - page_tokens);
  }
  int64_t values() const { return layout->latent_values + layout->rope_values; }
};

// ------------------------------------------------------------------------------------------ items of work

// Queries [first, first + count) of a list (token * heads + head) over its positions [begin, end).
struct Item {
  const RowList* list;
  int64_t first;
  int count;
  int64_t begin, end;
  size_t first_part = 0, parts = 1;  // items of the same queries
  int64_t partial = 0;               // number of its first query's partial result, if there are several parts
};

// Softmax sums of some queries: weighted latents, relative to `largest`, and the sum of weights.
struct Sums {
  float* values;  // [queries, latent_values]
  float* largest;
  float* weights;
};

// Memory of one thread.
struct Scratch {
  std::unique_ptr<uint8_t[]> memory;
  uint16_t* tile;
  float* scales;
  uint8_t* queries;
  float* scores;
  Sums sums;
  Scratch(const RowLayout& layout) {
    const int64_t values = layout.latent_values + layout.rope_values;
    const int64_t sizes[] = {2 * kTileRows * tile_stride(layout),
                             4 * kTileRows * (layout.latent_values / kTile),
                             4 * kMostQueries * values,
                             4 * kGroup * kTileRows,
                             4 * kMostQueries * layout.latent_values,
                             4 * kMostQueries,
                             4 * kMostQueries};
    int64_t offsets[8] = {};
    for (int i = 0; i < 7; ++i) offsets[i + 1] = offsets[i] + (sizes[i] + 63) / 64 * 64;
    memory = std::make_unique_for_overwrite<uint8_t[]>(static_cast<size_t>(offsets[7] + 64));
    uint8_t* start = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64;
    std::memset(start, 0, static_cast<size_t>(offsets[2]));  // rows that a first tile lacks are multiplied, then hidden
    tile = reinterpret_cast<uint16_t*>(start);
    scales = reinterpret_cast<float*>(start + offsets[1]);
    queries = start + offsets[2];
    scores = reinterpret_cast<float*>(start + offsets[3]);
    sums = {reinterpret_cast<float*>(start + offsets[4]), reinterpret_cast<float*>(start + offsets[5]),
            reinterpret_cast<float*>(start + offsets[6])};
  }
  // 64 bytes more than a row, so that the rows of a tile do not fall into the same sets of the cache.
  static int64_t tile_stride(const RowLayout& layout) { return layout.latent_values + layout.rope_values + 32; }
};

KVPOOL_HD float value_of(const uint8_t* address, bool is_bf16) {
  return is_bf16 ? bf16_value(load<uint16_t>(address)) : load<float>(address);
}

// Copies an item's queries to where `add_products` reads them.
template <bool kDot>
inline void pack_queries(const Attention& call, const Item& item, uint8_t* queries) {
  const RowLayout& layout = *call.layout;
  for (int i = 0; i < item.count; ++i) {
    const int64_t token = item.list->first_token + (item.first + i) / call.heads, head = (item.first + i) % call.heads;
    const uint8_t* parts[] = {call.q.at(token, head), call.q_rope.at(token, head)};
    const int64_t counts[] = {layout.latent_values, layout.rope_values};
    for (int part = 0; part < 2; ++part) {
      const int64_t at = i * call.values() + (part == 0 ? 0 : layout.latent_values);
      if constexpr (kDot) {
        std::memcpy(reinterpret_cast<uint16_t*>(queries) + at, parts[part], static_cast<size_t>(2 * counts[part]));
      } else {
        float* to = reinterpret_cast<float*>(queries) + at;
        const int64_t bytes = call.q_is_bf16 ? 2 : 4;
        for (int64_t v = 0; v < counts[part]; ++v) {
          const int64_t in_vector = v % kHalves;
          to[v - in_vector + in_vector % 2 * kLanes + in_vector / 2] =
              value_of(parts[part] + bytes * v, call.q_is_bf16);
        }
      }
    }
  }
}

// Calls function.template operator()<count>() for a count of 1 to kGroup.
template <typename Function>
KVPOOL_HD void with_count(int count, Function&& function) {
  static_assert(kGroup == 4);
  switch (count) {
    case 1:
      return function.template operator()<1>();
    case 2:
      return function.template operator()<2>();
    case 3:
      return function.template operator()<3>();
    default:
      return function.template operator()<4>();
  }
}

// Attends an item's rows; results are in scratch.sums.
template <Latent kFrom, bool kDot>
inline void attend_item(const Attention& call, const Item& item, Scratch& scratch) {
  constexpr bool kScaled = kFrom == Latent::kE4m3Tiles;
  const RowLayout& layout = *call.layout;
  const int64_t values = call.values(), stride = Scratch::tile_stride(layout);
  const float scale = call.scale * layout.divisor(call.k_scale);
  pack_queries<kDot>(call, item, scratch.queries);
  std::memset(scratch.sums.values, 0, static_cast<size_t>(4 * item.count * layout.latent_values));
  int64_t limits[kMostQueries];
  for (int i = 0; i < item.count; ++i) {
    scratch.sums.largest[i] = kNone;
    scratch.sums.weights[i] = 0.0f;
    limits[i] = call.kv_lens[item.list->first_token + (item.first + i) / call.heads];
  }

  // Entries of two tiles: one is multiplied while the rows of the other come from memory.
  int64_t positions[2][kTileRows];
  const uint8_t* rows[2][kTileRows];
  int64_t next = item.begin;
  const auto find_rows = [&](int which) {
    int found = 0;
    for (; next < item.end && found < kTileRows; ++next) {
      const int64_t row = call.row(*item.list, next);
      if (row < 0) continue;
      positions[which][found] = next;
      rows[which][found++] = call.row_buffer + row * call.row_stride;
    }
    // One access to each page of the rows, together: a walk of page tables takes longer than a miss.
    for (int r = 0; r < found; ++r)
      __builtin_prefetch(rows[which][r], 0, 2), __builtin_prefetch(rows[which][r] + layout.payload_bytes - 1, 0, 2);
    return found;
  };
  int count = find_rows(0), which = 0;
  while (count > 0) {
    const int following = find_rows(1 - which);
    for (int r = 0; r < count; ++r) {
      uint16_t* to = scratch.tile + r * stride;
      const uint8_t* row = rows[which][r];
      decode_latent<kFrom>(row, layout, 0, layout.latent_values, to);
      decode_rope(row, layout, to + layout.latent_values);
      if constexpr (kScaled) {
        for (int64_t t = 0; t < layout.latent_values / kTile; ++t)
          scratch.scales[t * kTileRows + r] = latent_scale<kFrom>(row, layout, t, 1.0f);
      }
    }
    const Tile tile = {scratch.tile, stride, scratch.scales};
    const int groups = (item.count + kGroup - 1) / kGroup;
    const int64_t lines = following * ((layout.payload_bytes + 63) / 64);
    const int64_t steps =
        groups * ((count + kRowsTogether - 1) / kRowsTogether + layout.latent_values / (kVectors * kHalves));
    Prefetch prefetch = {rows[1 - which], rows[1 - which] + following, layout.payload_bytes, lines / steps + 1};
    for (int group = 0; group < groups; ++group) {
      const int first = group * kGroup;
      with_count(item.count - first, [&]<int kQueries>() KVPOOL_LAMBDA {
        const uint8_t* queries = scratch.queries + first * values * (kDot ? 2 : 4);
        for (int r = 0; r < count; r += kRowsTogether) {
          scores_of<kRowsTogether, kQueries, kDot, kScaled>(layout, tile, r, queries, values, scratch.scores, prefetch);
        }
        float factors[kQueries];
        for (int i = 0; i < kQueries; ++i) {
          float* scores = scratch.scores + i * kTileRows;
          for (int r = 0; r < kTileRows; r += kLanes) store_vector(scores + r, load_vector<Floats>(scores + r) * scale);
          int seen = count;
          while (seen > 0 && positions[which][seen - 1] >= limits[first + i]) --seen;
          for (int r = seen; r < kTileRows; ++r) scores[r] = kNone;
          Floats largest = load_vector<Floats>(scores);
          for (int r = kLanes; r < kTileRows; r += kLanes) {
            const Floats some = load_vector<Floats>(scores + r);
            largest = some > largest ? some : largest;
          }
          const float before = scratch.sums.largest[first + i], most = std::max(before, largest_of(largest));
          const float shift = most == kNone ? 0.0f : most;
          Floats sum = {};
          for (int r = 0; r < kTileRows; r += kLanes) {
            const Floats weights = exponential(load_vector<Floats>(scores + r) - shift);
            store_vector(scores + r, weights);
            sum += weights;
          }
          factors[i] = before == most ? 1.0f : std::exp(before - shift);
          scratch.sums.largest[first + i] = most;
          scratch.sums.weights[first + i] = scratch.sums.weights[first + i] * factors[i] + sum_of(sum);
        }
        add_values<kQueries, kScaled>(layout, tile, count, scratch.scores, factors,
                                      scratch.sums.values + first * layout.latent_values, prefetch);
      });
    }
    which = 1 - which;
    count = following;
  }
}

// Writes the result of one query; `values` is in the order of `add_values`.
inline void write_result(const Attention& call, int64_t token, int64_t head, const float* values, float largest,
                         float weights) {
  const float factor = weights == 0.0f ? 0.0f : call.layout->divisor(call.k_scale) / weights;
  uint8_t* out = call.out.at(token, head);
  for (int64_t first = 0; first < call.layout->latent_values; first += kHalves) {
    for (int i = 0; i < kHalves; ++i) {
      const float value = values[first + i % 2 * kLanes + i / 2] * factor;
      if (call.out_is_bf16) {
        store(out + 2 * (first + i), bf16_bits(value));
      } else {
        store(out + 4 * (first + i), value);
      }
    }
  }
  store(call.lse.at(token, head), largest + std::log(weights));
}

// Divides lists into items of at most kMostQueries queries and, for several threads, runs of entries, each a share of the
// work that is left: the last ones are short, and a thread that others slow down takes fewer. Lowers `threads` to as many
// as pay off.
inline std::vector<Item> items_of(const Attention& call, int64_t& threads) {
  std::vector<Item> items;
  int64_t work = 0;
  for (int64_t number = 0; number < call.list_count; ++number) {
    const RowList& list = call.lists[number];
    const int64_t queries = list.tokens * call.heads;
    for (int64_t first = 0; first < queries; first += kMostQueries) {
      const int count = static_cast<int>(std::min<int64_t>(kMostQueries, queries - first));
      int64_t most = 0;
      for (int64_t t = first / call.heads; t <= (first + count - 1) / call.heads; ++t)
        most = std::max(most, call.kv_lens[list.first_token + t]);
      items.push_back({&list, first, count, 0, most});
      work += most * (count + kGroup);
    }
  }
  // Some 4 million products take a core 100 us, five times the time to start a thread.
  threads = threads_for(work * (call.layout->latent_values + call.values()), 4'000'000, threads);
  if (threads == 1 || call.whole_lists) return items;
  std::vector<Item> parts;
  int64_t partials = 0;
  for (Item item : items) {
    const int64_t end = item.end, least = 4 * kTileRows;
    item.first_part = parts.size();
    do {
      const int64_t entries = std::max(work / (2 * threads * (item.count + kGroup)), least);
      item.end = end - item.begin < entries + least ? end : item.begin + entries;
      work -= (item.end - item.begin) * (item.count + kGroup);
      parts.push_back(item);
      item.begin = item.end;
    } while (item.end < end);
    const size_t count = parts.size() - item.first_part;
    for (size_t part = item.first_part; part < parts.size(); ++part) {
      parts[part].parts = count;
      parts[part].partial = partials;
      partials += count > 1 ? item.count : 0;
    }
  }
  return parts;
}

// Merges the partial results of queries, `parts` of them from `first` on, and writes their results.
inline void merge(const Attention& call, const Item* first, float* partial) {
  const int64_t rank = call.layout->latent_values, stride = rank + 2;
  for (int i = 0; i < first->count; ++i) {
    const auto result = [&](size_t part) { return partial + (first[part].partial + i) * stride; };
    float largest = kNone, weights = 0.0f;
    for (size_t part = 0; part < first->parts; ++part) largest = std::max(largest, result(part)[rank]);
    const float shift = largest == kNone ? 0.0f : largest;
    float* merged = result(0);
    for (size_t part = 0; part < first->parts; ++part) {
      const float* values = result(part);
      const float factor = std::exp(values[rank] - shift);
      weights += values[rank + 1] * factor;
      for (int64_t v = 0; v < rank; ++v) merged[v] = (part == 0 ? 0.0f : merged[v]) + values[v] * factor;
    }
    const int64_t token = first->list->first_token + (first->first + i) / call.heads;
    write_result(call, token, (first->first + i) % call.heads, merged, largest, weights);
  }
}

inline void attend(const Attention& call, int64_t threads) {
  const RowLayout& layout = *call.layout;
  const int64_t rank = layout.latent_values;
  const std::vector<Item> items = items_of(call, threads);
  const int64_t partials = items.empty() ? 0 : items.back().partial + items.back().count;
  auto partial = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(partials * (rank + 2)));
  std::vector<std::atomic<size_t>> ended(items.size());  // parts, at the first of each item
  std::vector<Scratch> scratch;
  scratch.reserve(static_cast<size_t>(threads));
  for (int64_t i = 0; i < threads; ++i) scratch.emplace_back(layout);

  std::atomic<size_t> taken = 0;
  share(threads, threads, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      Scratch& own = scratch[static_cast<size_t>(thread)];
      for (size_t number; (number = taken++) < items.size();) {
        const Item& item = items[number];
        with_latent(layout, [&]<Latent kFrom>() {
          if (kCanDotBf16 && call.q_is_bf16) {
            attend_item<kFrom, kCanDotBf16>(call, item, own);
          } else {
            attend_item<kFrom, false>(call, item, own);
          }
        });
        for (int i = 0; i < item.count; ++i) {
          const float* values = own.sums.values + i * rank;
          if (item.parts == 1) {
            const int64_t token = item.list->first_token + (item.first + i) / call.heads;
            write_result(call, token, (item.first + i) % call.heads, values, own.sums.largest[i], own.sums.weights[i]);
          } else {
            float* to = partial.get() + (item.partial + i) * (rank + 2);
            std::memcpy(to, values, static_cast<size_t>(4 * rank));
            to[rank] = own.sums.largest[i];
            to[rank + 1] = own.sums.weights[i];
          }
        }
        if (item.parts > 1 && ++ended[item.first_part] == item.parts)
          merge(call, &items[item.first_part], partial.get());
      }
    }
  });
}

}  // namespace kvpool
