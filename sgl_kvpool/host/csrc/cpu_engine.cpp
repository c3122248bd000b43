// Transfers of pages with streaming stores and threads, for machines without a GPU. No checks: plan.py has
// made them.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "copy_run.h"

namespace {

// A thread takes about 20 us to start, in which memory moves as many bytes.
constexpr int64_t kBytesPerThread = 256 * 1024;

#if defined(__SSE2__)
// Past this size stores go around the caches. What memcpy stores is first read into them, a third of all
// traffic, and it does so for runs as short as a page; the bytes are not needed soon on either side.
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
    // Ahead of the hardware, which begins anew with every run and stops at every page of 4 KB.
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

// Streamed stores are not ordered with those that tell another thread of them.
void finish_stores() { _mm_sfence(); }
#else
void copy_run(char* target, const char* source, int64_t size) {
  std::memcpy(target, source, static_cast<size_t>(size));
}
void finish_stores() {}
#endif

// Work items are (copy run, page) pairs. Threads take neighbouring ones, so these should lie close together in
// the target: where a page holds several copy runs (layers), those of a page come one after the other.
struct Work {
  const kvpool::CopyRun* runs;
  int64_t run_count;
  const int64_t* source_pages;
  const int64_t* target_pages;
  int64_t page_count;

  int64_t items() const { return run_count * page_count; }

  void copy(int64_t begin, int64_t end) const {
    const bool runs_fastest = runs->target_page_stride > runs->run_bytes * runs->run_count;
    for (int64_t item = begin; item < end; ++item) {
      const kvpool::CopyRun& run = runs[runs_fastest ? item % run_count : item / page_count];
      const int64_t page = runs_fastest ? item / run_count : item % page_count;
      for (int64_t i = 0; i < run.run_count; ++i) {
        copy_run(reinterpret_cast<char*>(run.target(target_pages[page], i)),
                 reinterpret_cast<const char*>(run.source(source_pages[page], i)), run.run_bytes);
      }
    }
    finish_stores();
  }
};

void copy_pages(tvm::ffi::TensorView runs, tvm::ffi::TensorView source_pages,
                tvm::ffi::TensorView target_pages, int64_t threads) {
  const Work work{static_cast<const kvpool::CopyRun*>(runs.data_ptr()), runs.size(0),
                  static_cast<const int64_t*>(source_pages.data_ptr()),
                  static_cast<const int64_t*>(target_pages.data_ptr()), source_pages.size(0)};
  const int64_t items = work.items();
  int64_t page_bytes = 0;
  for (int64_t i = 0; i < work.run_count; ++i) page_bytes += work.runs[i].run_bytes * work.runs[i].run_count;
  threads = std::min({threads, items, page_bytes * work.page_count / kBytesPerThread + 1});
  threads = std::max<int64_t>(1, threads);

  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(threads));
  int64_t begun = 1;  // shares that have somebody to copy them; the first is ours
  try {
    for (; begun < threads; ++begun) {
      others.emplace_back(&Work::copy, &work, items * begun / threads, items * (begun + 1) / threads);
    }
  } catch (...) {
    // The machine grants no more threads, or no memory for one: what is left over is copied here, below.
  }
  work.copy(0, items / threads);
  work.copy(items * begun / threads, items);
  for (auto& thread : others) thread.join();
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_pages, copy_pages);
