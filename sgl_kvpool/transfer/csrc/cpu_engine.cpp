// Transfers of pages with streaming stores and threads, for machines without a GPU. Arguments are not checked here:
// plan.py has checked them.

#include <cstdint>
#include <cstring>

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "../../codec/csrc/row_conversion.h"
#include "../../codec/csrc/threads.h"
#include "copy_run.h"

namespace {

// Starting a thread takes about 20 us, in which memory moves this many bytes.
constexpr int64_t kBytesPerThread = 256 * 1024;

#if defined(__SSE2__)
// From this size on, stores bypass the caches. memcpy first reads the target into the caches, a third of all traffic,
// even for runs as long as a page; the CPU needs neither source nor target soon.
constexpr int64_t kStreamedBytes = 4 * 1024;
constexpr int64_t kAheadBytes = 2 * 1024;

void copy_run(char* target, const char* source, int64_t size) {
  if (size < kStreamedBytes) {
    std::memcpy(target, source, static_cast<size_t>(size));
    return;
  }
  const int64_t head = -reinterpret_cast<intptr_t>(target) & 15;
  std::memcpy(target, source, static_cast<size_t>(head));
  int64_t at = head;
  for (; at + 64 <= size; at += 64) {
    // Prefetches further ahead than the hardware, which restarts at every run and stops at every page of 4 KB.
    _mm_prefetch(source + at + kAheadBytes, _MM_HINT_NTA);
    const auto* from = reinterpret_cast<const __m128i*>(source + at);
    auto* to = reinterpret_cast<__m128i*>(target + at);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  std::memcpy(target + at, source + at, static_cast<size_t>(size - at));
}

// Streaming stores are not ordered with the stores that signal completion to another thread.
void finish_stores() { _mm_sfence(); }
#else
void copy_run(char* target, const char* source, int64_t size) {
  std::memcpy(target, source, static_cast<size_t>(size));
}
void finish_stores() {}
#endif

// Work items are (copy run, page) pairs. A thread takes consecutive items, which should be close together in the
// target: where a target page holds several copy runs (layers), the runs of a page are consecutive items.
struct Work {
  const kvpool::CopyRun* runs;
  int64_t run_count;
  const int64_t* source_pages;
  const int64_t* target_pages;
  int64_t page_count;

  Work(tvm::ffi::TensorView runs_, tvm::ffi::TensorView source_pages_, tvm::ffi::TensorView target_pages_)
      : runs(static_cast<const kvpool::CopyRun*>(runs_.data_ptr())),
        run_count(runs_.size(0)),
        source_pages(static_cast<const int64_t*>(source_pages_.data_ptr())),
        target_pages(static_cast<const int64_t*>(target_pages_.data_ptr())),
        page_count(source_pages_.size(0)) {}

  int64_t items() const { return run_count * page_count; }

  // Bytes that are read.
  int64_t bytes() const {
    int64_t page_bytes = 0;
    for (int64_t i = 0; i < run_count; ++i) page_bytes += runs[i].run_bytes * runs[i].run_count;
    return page_bytes * page_count;
  }

  // Calls move(target, source, copy run, its number) for every run of the items from begin to end.
  template <typename Move>
  void each(int64_t begin, int64_t end, Move&& move) const {
    const bool runs_fastest = runs->target_page_stride > runs->run_bytes * runs->run_count;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t number = runs_fastest ? item % run_count : item / page_count;
      const int64_t page = runs_fastest ? item / run_count : item % page_count;
      const kvpool::CopyRun& run = runs[number];
      for (int64_t i = 0; i < run.run_count; ++i) {
        move(reinterpret_cast<char*>(run.target(target_pages[page], i)),
             reinterpret_cast<const char*>(run.source(source_pages[page], i)), run, number);
      }
    }
    finish_stores();
  }

  // Calls move as `each` does, for all items, on several threads.
  template <typename Move>
  void share(int64_t threads, Move&& move) const {
    kvpool::share(items(), threads,
                  [&](int64_t begin, int64_t end) { each(begin, end, move); });
  }
};

void copy_pages(tvm::ffi::TensorView runs, tvm::ffi::TensorView source_pages,
                tvm::ffi::TensorView target_pages, int64_t threads) {
  const Work work(runs, source_pages, target_pages);
  work.share(kvpool::threads_for(work.bytes(), kBytesPerThread, threads),
             [](char* target, const char* source, const kvpool::CopyRun& run, int64_t) {
               copy_run(target, source, run.run_bytes);
             });
}

// Converts each run, a row of `from`, into a row of `to`; `k_scales` has one number per copy run.
void convert_pages(tvm::ffi::TensorView runs, tvm::ffi::TensorView source_pages,
                   tvm::ffi::TensorView target_pages, tvm::ffi::TensorView from, tvm::ffi::TensorView to,
                   tvm::ffi::TensorView k_scales, int64_t threads) {
  const Work work(runs, source_pages, target_pages);
  const auto& from_layout = *static_cast<const kvpool::RowLayout*>(from.data_ptr());
  const auto& to_layout = *static_cast<const kvpool::RowLayout*>(to.data_ptr());
  const float* scales = static_cast<const float*>(k_scales.data_ptr());
  // Read plus written, as kConvertedBytesPerThread counts them.
  const int64_t bytes = work.bytes() / from_layout.row_bytes * (from_layout.row_bytes + to_layout.row_bytes);
  const bool known = kvpool::for_formats(
      from_layout.latent, to_layout.latent, [&]<kvpool::Latent kFrom, kvpool::Latent kTo>() {
        work.share(kvpool::threads_for(bytes, kvpool::kConvertedBytesPerThread<kTo>, threads),
                   [&](char* target, const char* source, const kvpool::CopyRun&, int64_t number) {
                     kvpool::convert_row<kFrom, kTo>(reinterpret_cast<const uint8_t*>(source), from_layout,
                                                     reinterpret_cast<uint8_t*>(target), to_layout,
                                                     scales[number]);
                   });
      });
  if (!known) TVM_FFI_THROW(ValueError) << "no conversion between these row formats";
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_pages, copy_pages);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(convert_pages, convert_pages);
