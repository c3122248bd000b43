// Work of a CPU shared among threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace kvpool {

// A thread takes about 20 us to start, in which a core converts some ten rows.
constexpr int64_t kConvertedBytesPerThread = 16 * 1024;

// Calls run(begin, end) for shares of 0 to `items`, by at most `threads` threads, of which this one is the first.
template <typename Run>
void share(int64_t items, int64_t threads, Run&& run) {
  threads = std::max<int64_t>(1, std::min(threads, items));
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(threads));
  int64_t begun = 1;  // shares that have somebody to run them
  try {
    for (; begun < threads; ++begun) {
      const int64_t begin = items * begun / threads, end = items * (begun + 1) / threads;
      others.emplace_back([&run, begin, end] { run(begin, end); });
    }
  } catch (...) {
    // The machine grants no more threads, or no memory for one: what is left over is done here, below.
  }
  run(int64_t{0}, items / threads);
  run(items * begun / threads, items);
  for (auto& thread : others) thread.join();
}

}  // namespace kvpool
