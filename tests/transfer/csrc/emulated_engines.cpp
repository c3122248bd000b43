// The GPU engines on a machine without a GPU: the product's own plan of steps, address arithmetic and row arithmetic,
// with streams and events that are queues. `play` carries out what was enqueued in some order that CUDA allows:
// streams take turns at random, copies of a batch and warps of a kernel come in any order.
//
// The kernels that nvcc compiled, missing waits and calls that fail are the subject of tests/emulated_cuda.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include <tvm/ffi/function.h>

#include "engine_calls.h"

namespace {

struct Step {
  std::function<void()> work;     // null: a wait or a record
  int64_t event = 0;              // of a wait or a record
  int64_t generation = 0;         // which record of the event
  bool waits = false;
};

struct Machine {
  std::map<int64_t, std::deque<Step>> queues;
  std::map<int64_t, int64_t> recorded, reached;  // generations by event
  int64_t next_id = 1000;
  std::mt19937 random;
};

Machine machine;

struct EmulatedSteps {
  using Stream = int64_t*;  // any 8 bytes: the number of a queue
  using Event = int64_t;

  static int64_t id(Stream stream) { return reinterpret_cast<int64_t>(stream); }

  void run(const kvpool::KernelJob& job, const kvpool::Transfer& transfer, Stream stream) {
    // As at a launch, arguments are copied now, but not the memory that they point to.
    enqueue(stream, [job, transfer] {
      // Not a power of two, so that chunks of the emulated warps end anywhere.
      std::vector<int64_t> workers(37);
      for (size_t i = 0; i < workers.size(); ++i) workers[i] = static_cast<int64_t>(i);
      std::shuffle(workers.begin(), workers.end(), machine.random);
      const auto count = static_cast<int64_t>(workers.size());
      for (const int64_t worker : workers) {
        if (job.from == nullptr) {
          const int64_t chunk = 32 * 4 * job.word_bytes;
          kvpool::each_chunk(transfer, chunk, worker, count, [&](int64_t to, int64_t from, int64_t bytes, int64_t) {
            if ((to | from | bytes) % job.word_bytes) throw std::runtime_error("misaligned");
            std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), static_cast<size_t>(bytes));
          });
          continue;
        }
        const bool known = kvpool::for_formats(
            job.from->latent, job.to->latent, [&]<kvpool::Latent kFrom, kvpool::Latent kTo>() {
              kvpool::each_chunk(transfer, job.from->row_bytes, worker, count,
                                 [&](int64_t to, int64_t from, int64_t, int64_t number) {
                                   kvpool::convert_row<kFrom, kTo>(reinterpret_cast<const uint8_t*>(from), *job.from,
                                                                   reinterpret_cast<uint8_t*>(to), *job.to,
                                                                   job.k_scales[number]);
                                 });
            });
        if (!known) throw std::runtime_error("no conversion");
      }
    });
  }

  void copy(const kvpool::CopyJob& job, const kvpool::Transfer& transfer, bool host_is_source, Stream stream) {
    kvpool::FlatCopies copies;
    kvpool::flatten(transfer, host_is_source, job.chunks, copies);
    // Few at a time, so that transfers take several batches; the last is seldom a whole one.
    kvpool::each_batch(copies, 7, [&](size_t first, size_t count) {
      enqueue(stream, [copies, first, count] {
        std::vector<size_t> order(count);
        for (size_t i = 0; i < order.size(); ++i) order[i] = first + i;
        std::shuffle(order.begin(), order.end(), machine.random);
        for (const size_t i : order) std::memcpy(copies.targets[i], copies.sources[i], copies.sizes[i]);
      });
    });
  }

  void record(Event event, Stream stream) {
    Step step;
    step.event = event;
    step.generation = ++machine.recorded[event];
    machine.queues[id(stream)].push_back(step);
  }

  void wait(Stream stream, Event event) {
    Step step;
    step.event = event;
    step.generation = machine.recorded[event];  // 0: never recorded
    step.waits = true;
    machine.queues[id(stream)].push_back(step);
  }

  Stream make_stream() { return reinterpret_cast<Stream>(machine.next_id++); }
  Event make_event() { return machine.next_id++; }
  void free_stream(Stream) {}
  void free_event(Event) {}

 private:
  static void enqueue(Stream stream, std::function<void()> work) {
    Step step;
    step.work = std::move(work);
    machine.queues[id(stream)].push_back(std::move(step));
  }
};

// Carry out all queues in some order that streams and events allow; returns the number of steps. The seed decides for
// how many steps on average a stream goes on before the next is drawn: 1, 4, 16 or 64, where one runs far ahead.
int64_t play(int64_t seed) {
  machine.random.seed(static_cast<uint32_t>(seed));
  const uint32_t turns = 1u << (2 * (static_cast<uint32_t>(seed) % 4));
  int64_t done = 0, current = 0;
  while (true) {
    std::vector<int64_t> ready;
    bool waiting = false;
    for (auto& [stream, queue] : machine.queues) {
      if (queue.empty()) continue;
      const Step& step = queue.front();
      if (step.waits && machine.reached[step.event] < step.generation) {
        waiting = true;
      } else {
        ready.push_back(stream);
      }
    }
    if (ready.empty()) {
      if (waiting) throw std::runtime_error("all streams wait for each other");
      return done;
    }
    const bool goes_on = std::find(ready.begin(), ready.end(), current) != ready.end();
    if (!goes_on || machine.random() % turns == 0) current = ready[machine.random() % ready.size()];
    auto& queue = machine.queues[current];
    const Step step = queue.front();
    queue.pop_front();
    if (step.work) {
      step.work();
    } else if (!step.waits) {
      machine.reached[step.event] = step.generation;
    }
    ++done;
  }
}

// Forget what a test that failed has left.
void forget() { machine.queues.clear(); }

// Copies that the copy engine would be given.
int64_t count_copies(int64_t job, int64_t source_pages, int64_t target_pages, int64_t page_count,
                     int64_t host_is_source) {
  using Calls = kvpool::EngineCalls<EmulatedSteps>;
  const auto& copy = Calls::at<kvpool::CopyJob>(job);
  kvpool::FlatCopies copies;
  kvpool::flatten(kvpool::Transfer{copy.runs, copy.run_count, Calls::list(source_pages, 1),
                                   Calls::list(target_pages, 1), page_count, 0, 0},
                  host_is_source != 0, copy.chunks, copies);
  return static_cast<int64_t>(copies.sizes.size());
}

}  // namespace

#define BIND(name, ...) TVM_FFI_DLL_EXPORT_TYPED_FUNC(name, (__VA_ARGS__));
KVPOOL_ENGINE_CALLS(EmulatedSteps, BIND)
BIND(play, play)
BIND(forget, forget)
BIND(count_copies, count_copies)
