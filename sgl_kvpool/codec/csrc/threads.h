// Division of CPU work among threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#ifdef __linux__
#include <sched.h>

// Functions of the OpenMP library that torch has loaded. They are null without torch, as in the sanitizers' program.
extern "C" {
[[gnu::weak]] void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags);
[[gnu::weak]] int omp_get_max_threads();
}
#endif

namespace kvpool {

#ifdef __linux__
inline bool torch_has(int64_t threads) { return GOMP_parallel && threads <= omp_get_max_threads(); }

// Calls work() on each of torch's threads for the calling thread. Zero is their number: a smaller team would end the other
// threads, which torch would start again.
template <typename Work>
void on_torchs(Work&& work) {
  GOMP_parallel([](void* data) { (*static_cast<std::remove_reference_t<Work>*>(data))(); }, &work, 0, 0);
}

// Number of cores of torch's threads. SGLang's CPU backend binds each to one, the scheduler's thread too; those of a thread
// that was bound before they started are all bound to its cores.
inline int64_t cores_of_torchs() {
  static thread_local const int64_t count = [] {
    std::mutex mutex;
    cpu_set_t all = {};
    on_torchs([&] {
      const std::lock_guard lock(mutex);
      if (cpu_set_t own; sched_getaffinity(0, sizeof own, &own) == 0) CPU_OR(&all, &all, &own);
    });
    return CPU_COUNT(&all);
  }();
  return count;
}
#endif

// Number of threads for work on `bytes`: one, plus one for each `bytes_per_thread`, at most `most`, and at most the number
// of cores that they may run on.
inline int64_t threads_for(int64_t bytes, int64_t bytes_per_thread, int64_t most) {
  int64_t threads = std::min(most, bytes / bytes_per_thread + 1);
#ifdef __linux__
  cpu_set_t own;
  if (threads > 1 && sched_getaffinity(0, sizeof own, &own) == 0 && CPU_COUNT(&own) < threads) {
    threads = torch_has(threads) ? std::min(threads, cores_of_torchs()) : CPU_COUNT(&own);
  }
#endif
  return threads;
}

// Calls run(begin, end), which may not throw, for `threads` shares of [0, items) on at most as many threads, the calling
// thread included: on those of torch, unless it has fewer. They spin for milliseconds after each operation of torch, and
// other threads would wait for their cores. As in torch, a child that is forked after they have worked hangs, and a
// process for which torch cannot start a thread ends. The calling thread has called torch.get_num_threads(), which sets its
// number of OpenMP threads.
template <typename Run>
void share(int64_t items, int64_t threads, Run&& run) {
  threads = std::max<int64_t>(1, std::min(threads, items));
  std::atomic<int64_t> taken = 0;
  auto work = [&]() noexcept {
    for (int64_t part; (part = taken++) < threads;) run(items * part / threads, items * (part + 1) / threads);
  };
  if (threads == 1) return work();
#ifdef __linux__
  if (torch_has(threads)) return on_torchs(work);
#endif
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(threads));
  try {
    for (int64_t i = 1; i < threads; ++i) others.emplace_back(work);
  } catch (...) {
    // No more threads, or no memory for one: those that there are take all shares.
  }
  work();
  for (auto& thread : others) thread.join();
}

}  // namespace kvpool
