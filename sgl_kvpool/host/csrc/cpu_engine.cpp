// Transfers of pages with memcpy and threads, for machines without a GPU. No checks: plan.py has made them.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include "copy_run.h"

namespace {

// Work items are (copy run, page) pairs, pages fastest: threads take neighbouring pages of the same layers.
void copy_items(const kvpool::CopyRun* runs, const int64_t* source_pages, const int64_t* target_pages,
                int64_t pages, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) {
    const kvpool::CopyRun& run = runs[item / pages];
    const int64_t page = item % pages;
    for (int64_t i = 0; i < run.run_count; ++i) {
      std::memcpy(reinterpret_cast<void*>(run.target(target_pages[page], i)),
                  reinterpret_cast<const void*>(run.source(source_pages[page], i)),
                  static_cast<size_t>(run.run_bytes));
    }
  }
}

void copy_pages(tvm::ffi::TensorView runs, tvm::ffi::TensorView source_pages,
                tvm::ffi::TensorView target_pages, int64_t threads) {
  const auto* run = static_cast<const kvpool::CopyRun*>(runs.data_ptr());
  const auto* sources = static_cast<const int64_t*>(source_pages.data_ptr());
  const auto* targets = static_cast<const int64_t*>(target_pages.data_ptr());
  const int64_t pages = source_pages.size(0);
  const int64_t items = runs.size(0) * pages;
  threads = std::max<int64_t>(1, std::min(threads, items));
  std::vector<std::thread> others;
  for (int64_t t = 1; t < threads; ++t) {
    others.emplace_back(copy_items, run, sources, targets, pages, items * t / threads,
                        items * (t + 1) / threads);
  }
  copy_items(run, sources, targets, pages, 0, items / threads);
  for (auto& thread : others) thread.join();
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_pages, copy_pages);
