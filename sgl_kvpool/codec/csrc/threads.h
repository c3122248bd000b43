// Division of CPU work among threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif

namespace kvpool {

// Number of threads for work on `bytes`: one, plus one for each `bytes_per_thread`, at most `most`, and at most the number
// of cores that the calling thread may run on, since its threads inherit its affinity.
inline int64_t threads_for(int64_t bytes, int64_t bytes_per_thread, int64_t most) {
  int64_t threads = std::min(most, bytes / bytes_per_thread + 1);
#ifdef __linux__
  cpu_set_t cores;
  if (threads > 1 && sched_getaffinity(0, sizeof cores, &cores) == 0) {
    threads = std::min<int64_t>(threads, CPU_COUNT(&cores));
  }
#endif
  return threads;
}

// Calls run(begin, end) for shares of [0, items) on at most `threads` threads, the calling thread included.
template <typename Run>
void share(int64_t items, int64_t threads, Run&& run) {
  threads = std::max<int64_t>(1, std::min(threads, items));
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(threads));
  int64_t begun = 1;  // shares that have a thread
  try {
    for (; begun < threads; ++begun) {
      const int64_t begin = items * begun / threads, end = items * (begun + 1) / threads;
      others.emplace_back([&run, begin, end] { run(begin, end); });
    }
  } catch (...) {
    // No more threads, or no memory for one: the calling thread does the remaining shares below.
  }
  run(int64_t{0}, items / threads);
  run(items * begun / threads, items);
  for (auto& thread : others) thread.join();
}

}  // namespace kvpool
