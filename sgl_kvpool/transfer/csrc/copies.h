// Flat copies of a transfer, for the copy engine. Plain C++, which is tested without a GPU.
#pragma once

#include <algorithm>
#include <vector>

#include "chunks.h"

namespace kvpool {

// Host memory that was registered with CUDA in chunks. No copy may cross a chunk boundary. Chunks hold whole pages of
// the host tier, so only a joined copy could cross one.
struct RegisteredChunks {
  int64_t begin;        // address of the first chunk
  int64_t chunk_bytes;  // 0: a single chunk, or memory that is not registered

  bool starts_at(int64_t address) const { return chunk_bytes > 0 && (address - begin) % chunk_bytes == 0; }
};

struct FlatCopies {
  std::vector<void*> targets, sources;
  std::vector<size_t> sizes;

  void clear() {
    targets.clear();
    sources.clear();
    sizes.clear();
  }

  void add(int64_t target, int64_t source, int64_t size, bool joins) {
    if (joins && !sizes.empty() && at(targets.back()) + static_cast<int64_t>(sizes.back()) == target &&
        at(sources.back()) + static_cast<int64_t>(sizes.back()) == source) {
      sizes.back() += static_cast<size_t>(size);
      return;
    }
    targets.push_back(reinterpret_cast<void*>(target));
    sources.push_back(reinterpret_cast<void*>(source));
    sizes.push_back(static_cast<size_t>(size));
  }

 private:
  static int64_t at(void* pointer) { return reinterpret_cast<int64_t>(pointer); }
};

// Adds the copies of a transfer whose page lists are in host memory. A copy that is adjacent to its predecessor on both
// sides is joined to it.
inline void flatten(const Transfer& transfer, bool host_is_source, RegisteredChunks chunks, FlatCopies& copies) {
  for (int64_t number = 0; number < transfer.run_count; ++number) {
    const CopyRun& run = transfer.runs[number];
    for (int64_t i = 0; i < transfer.page_count; ++i) {
      const int64_t from = transfer.source_pages.page(i), to = transfer.target_pages.page(i);
      for (int64_t k = 0; k < run.run_count; ++k) {
        const int64_t source = transfer.source_base + run.source(from, k);
        const int64_t target = transfer.target_base + run.target(to, k);
        copies.add(target, source, run.run_bytes, !chunks.starts_at(host_is_source ? source : target));
      }
    }
  }
}

// Copies per call of CUDA. A driver has crashed on a list of 51,828 (vLLM's issue 49276), and a token-major pool makes
// millions of copies.
constexpr size_t kBatchCopies = 4096;

// Calls submit(first, count) for successive batches of at most `most` copies.
template <typename Submit>
void each_batch(const FlatCopies& copies, size_t most, Submit&& submit) {
  for (size_t first = 0; first < copies.sizes.size(); first += most) {
    submit(first, std::min(most, copies.sizes.size() - first));
  }
}

}  // namespace kvpool
