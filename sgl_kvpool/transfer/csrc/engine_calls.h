// Functions that Python calls. They take integers, also for addresses, so that tvm-ffi and pybind11 can bind the same
// functions. Python has checked the arguments. All steps are enqueued, on the given stream or on the page buffer's own
// (staging.h); only free_staging waits.
#pragma once

#include "staging.h"

namespace kvpool {

template <typename Steps>
struct EngineCalls {
  using Stream = typename Steps::Stream;

  template <typename T>
  static const T& at(int64_t address) {
    return *reinterpret_cast<const T*>(address);
  }
  static PageIndices list(int64_t slots, int64_t stride) { return {reinterpret_cast<const int64_t*>(slots), stride}; }
  static Staging<Steps>& staging(int64_t handle) { return *reinterpret_cast<Staging<Steps>*>(handle); }

  // Moves pages with a kernel; the lists are in device memory, the pages in any memory that the device can access.
  static void kernel_pages(int64_t job, int64_t source_slots, int64_t source_stride, int64_t target_slots,
                           int64_t target_stride, int64_t page_count, int64_t stream) {
    const auto& kernel = at<KernelJob>(job);
    Steps().run(kernel,
                Transfer{kernel.runs, kernel.run_count, list(source_slots, source_stride),
                         list(target_slots, target_stride), page_count, 0, 0},
                reinterpret_cast<Stream>(stream));
  }

  // Moves pages with the copy engine; the lists are page indices in host memory.
  static void copy_pages(int64_t job, int64_t source_pages, int64_t target_pages, int64_t page_count,
                         int64_t host_is_source, int64_t stream) {
    const auto& copy = at<CopyJob>(job);
    Steps().copy(copy,
                 Transfer{copy.runs, copy.run_count, list(source_pages, 1), list(target_pages, 1), page_count, 0, 0},
                 host_is_source != 0, reinterpret_cast<Stream>(stream));
  }

  static int64_t make_staging(int64_t buffer, int64_t slot_bytes, int64_t slot_count) {
    return reinterpret_cast<int64_t>(new Staging<Steps>(Steps(), buffer, slot_bytes, slot_count));
  }
  static void free_staging(int64_t handle) { delete &staging(handle); }

  // The device's slots are in device memory, the host's page indices in host memory.
  static void staged_store(int64_t handle, int64_t gather, int64_t copy, int64_t device_slots, int64_t device_stride,
                           int64_t host_pages, int64_t page_count, int64_t slot_pages, int64_t stream) {
    staging(handle).store(at<KernelJob>(gather), at<CopyJob>(copy), list(device_slots, device_stride),
                          list(host_pages, 1), page_count, slot_pages, reinterpret_cast<Stream>(stream));
  }
  static void begin(int64_t handle, int64_t stream) {
    staging(handle).begin(reinterpret_cast<Stream>(stream));
  }
  static void staged_load(int64_t handle, int64_t copy, int64_t scatter, int64_t host_pages, int64_t device_slots,
                          int64_t device_stride, int64_t page_count, int64_t slot_pages, int64_t stream) {
    staging(handle).load(at<CopyJob>(copy), at<KernelJob>(scatter), list(host_pages, 1),
                         list(device_slots, device_stride), page_count, slot_pages,
                         reinterpret_cast<Stream>(stream));
  }
};

// Calls BIND(name, pointer) for each function.
#define KVPOOL_ENGINE_CALLS(STEPS, BIND)                          \
  BIND(kernel_pages, kvpool::EngineCalls<STEPS>::kernel_pages)    \
  BIND(copy_pages, kvpool::EngineCalls<STEPS>::copy_pages)        \
  BIND(make_staging, kvpool::EngineCalls<STEPS>::make_staging)    \
  BIND(free_staging, kvpool::EngineCalls<STEPS>::free_staging)    \
  BIND(staged_store, kvpool::EngineCalls<STEPS>::staged_store)    \
  BIND(begin, kvpool::EngineCalls<STEPS>::begin)                  \
  BIND(staged_load, kvpool::EngineCalls<STEPS>::staged_load)

}  // namespace kvpool
