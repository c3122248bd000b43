// Drives sgl_kvpool/attention/csrc/attend.h under a sanitizer: rows at odd addresses, buffers without a byte to spare, lists
// with holes, empty lists, queries with limits of their own, numbers of heads around a register tile, and threads. Results of
// several threads must be those of one.

#include <cstdio>
#include <random>

#include "attend.h"

using namespace kvpool;

namespace {

std::mt19937 generator(7);

int64_t number(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(generator); }

// Layouts of every latent encoding, with and without rope, rows padded to an odd size.
RowLayout layout_of(Latent latent, int64_t rank, int64_t rope) {
  const bool is_bf16 = latent == Latent::kBf16, narrow_rope = latent == Latent::kE4m3;
  const int64_t codes = is_bf16 ? 2 * rank : latent == Latent::kE2m1 ? rank / 2 : rank;
  const int64_t scales = latent == Latent::kE2m1 ? rank / kBlock : latent == Latent::kE4m3Tiles ? 4 * rank / kTile : 0;
  const int64_t payload = codes + scales + rope * (narrow_rope ? 1 : 2);
  return {latent, narrow_rope ? Rope::kE4m3 : Rope::kBf16, rank, rope, 0, codes, codes + scales, payload, payload + 1, narrow_rope};
}

bool run(const RowLayout& layout, int64_t heads, int64_t lists, int64_t most_rows, bool bf16) {
  const int64_t values = layout.latent_values + layout.rope_values, rank = layout.latent_values, rows = 3 * most_rows + 5;
  std::vector<uint8_t> pool(static_cast<size_t>(rows * layout.row_bytes));
  for (auto& byte : pool) byte = static_cast<uint8_t>(number(0, 0x3E));  // no NaN in any encoding
  std::vector<RowList> of_lists;
  std::vector<int32_t> entries;
  std::vector<int64_t> limits;
  for (int64_t i = 0; i < lists; ++i) {
    const int64_t tokens = number(1, 3), count = i == 1 ? 0 : number(1, most_rows);
    of_lists.push_back({static_cast<int64_t>(entries.size()), static_cast<int64_t>(limits.size()), tokens});
    for (int64_t t = 0; t < tokens; ++t) limits.push_back(std::max<int64_t>(0, count - t));
    for (int64_t e = 0; e < count; ++e) entries.push_back(number(0, 9) == 0 ? -3 : static_cast<int32_t>(number(0, rows - 1)));
  }
  const int64_t tokens = static_cast<int64_t>(limits.size()), width = bf16 ? 2 : 4;
  std::vector<uint8_t> q(static_cast<size_t>(tokens * heads * values * width));
  for (size_t i = 0; i < q.size() / static_cast<size_t>(width); ++i) {
    const float value = static_cast<float>(number(-100, 100)) / 64.0f;
    bf16 ? store(q.data() + 2 * i, bf16_bits(value)) : store(q.data() + 4 * i, value);
  }
  std::vector<float> out[2], lse[2];
  for (int several = 0; several < 2; ++several) {
    out[several].assign(static_cast<size_t>(tokens * heads * rank), NAN);
    lse[several].assign(static_cast<size_t>(tokens * heads), NAN);
    Attention call = {};
    call.layout = &layout;
    call.row_buffer = pool.data();
    call.row_stride = layout.row_bytes;
    call.kv_indices = entries.data();
    call.kv_indices_stride = call.page_tokens = call.page_rows = call.dcp_size = 1;
    call.lists = of_lists.data();
    call.list_count = lists;
    call.kv_lens = limits.data();
    call.q = {q.data(), heads * values * width, values * width};
    call.q_rope = {q.data() + rank * width, heads * values * width, values * width};
    call.out = {reinterpret_cast<uint8_t*>(out[several].data()), heads * rank * 4, rank * 4};
    call.lse = {reinterpret_cast<uint8_t*>(lse[several].data()), heads * 4, 4};
    call.q_is_bf16 = bf16;
    call.heads = heads;
    call.scale = 0.07f;
    call.k_scale = 0.5f;
    attend(call, several ? 8 : 1);
  }
  for (size_t i = 0; i < out[0].size(); ++i) {
    if (!(std::abs(out[0][i] - out[1][i]) <= 1e-5f * (1.0f + std::abs(out[0][i])))) return false;
  }
  for (size_t i = 0; i < lse[0].size(); ++i) {
    if (lse[0][i] != lse[1][i] && !(std::abs(lse[0][i] - lse[1][i]) <= 1e-4f)) return false;
  }
  return true;
}

}  // namespace

int main() {
  for (const Latent latent : {Latent::kBf16, Latent::kE4m3, Latent::kE4m3Tiles, Latent::kE2m1}) {
    for (const int64_t heads : {1, 3, 16, 67}) {
      const bool wide = heads == 16;  // enough work for several threads
      const RowLayout layout = layout_of(latent, wide ? 512 : 384, heads == 3 ? 0 : 64);
      for (const bool bf16 : {false, true}) {
        if (!run(layout, heads, wide ? 5 : 3, wide ? 700 : 70, bf16)) {
          std::printf("latent %d, %d heads: threads change the result\n", static_cast<int>(latent), static_cast<int>(heads));
          return 1;
        }
      }
    }
  }
  std::puts("same results");
}
