// Distribution of a transfer's bytes over the warps of a kernel; compiles with nvcc and g++.
#pragma once

#include "copy_run.h"

namespace kvpool {

// Page indices in one of three forms: slots of the tokens as SGLang lists them (stride: tokens of a page), page indices
// (stride 1), or a null pointer, which counts pages from 0 (a page buffer).
struct PageIndices {
  const int64_t* slots;
  int64_t stride;

  KVPOOL_HD int64_t page(int64_t i) const { return slots == nullptr ? i : slots[i * stride] / stride; }
  PageIndices from(int64_t i) const { return {slots == nullptr ? nullptr : slots + i * stride, stride}; }
};

// The addresses of copy runs are relative to the bases, which are 0 for absolute addresses.
struct Transfer {
  const CopyRun* runs;
  int64_t run_count;
  PageIndices source_pages;
  PageIndices target_pages;
  int64_t page_count;
  int64_t source_base;
  int64_t target_base;
};

// Calls move(target address, source address, bytes, number of the copy run) for one worker's share of all chunks:
// runs are cut into chunks of at most `chunk_bytes`, and workers take turns over the chunks of all copy runs, so
// that a transfer of few pages in many copy runs keeps all workers busy.
template <typename Move>
KVPOOL_HD void each_chunk(const Transfer& transfer, int64_t chunk_bytes, int64_t worker, int64_t workers,
                          Move&& move) {
  int64_t item = worker;  // counted from the first chunk of the current copy run
  for (int64_t number = 0; number < transfer.run_count; ++number) {
    const CopyRun& run = transfer.runs[number];
    const int64_t chunks = (run.run_bytes + chunk_bytes - 1) / chunk_bytes;  // of a run
    const int64_t page_chunks = chunks * run.run_count;
    const int64_t items = page_chunks * transfer.page_count;
    for (; item < items; item += workers) {
      const int64_t i = item / page_chunks, rest = item % page_chunks;
      const int64_t offset = rest % chunks * chunk_bytes;
      const int64_t left = run.run_bytes - offset;
      move(transfer.target_base + run.target(transfer.target_pages.page(i), rest / chunks) + offset,
           transfer.source_base + run.source(transfer.source_pages.page(i), rest / chunks) + offset,
           left < chunk_bytes ? left : chunk_bytes, number);
    }
    item -= items;
  }
}

}  // namespace kvpool
