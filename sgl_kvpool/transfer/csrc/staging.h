// Transfers of GPU pools as steps on streams, for whatever carries the steps out: CUDA (cuda_steps.cuh), or a test
// without a GPU, which also plays through what streams may do that CUDA seldom does.
//
// `Steps` has types Stream and Event, and
//   run(KernelJob, Transfer, Stream)              a kernel
//   copy(CopyJob, Transfer, bool, Stream)         copies by the copy engine; true: the source is the host
//   record(Event, Stream), wait(Stream, Event)    as CUDA's; an event that was never recorded holds nobody up
//   make_stream(), make_event(), and the same with `free_`
#pragma once

#include <vector>

#include "../../codec/csrc/row_conversion.h"
#include "copies.h"

namespace kvpool {

// What a kernel does with pages, as seven int64 in host memory; all that they point to is in device memory, but the
// formats. Without formats, bytes are copied in words of `word_bytes`, which divides all addresses and sizes.
struct KernelJob {
  const CopyRun* runs;
  int64_t run_count;
  int64_t word_bytes;
  int64_t blocks;
  const RowLayout* from;
  const RowLayout* to;
  const float* k_scales;  // one per copy run
};

// What the copy engine does with pages, as four int64 in host memory, as the runs are.
struct CopyJob {
  const CopyRun* runs;
  int64_t run_count;
  RegisteredChunks chunks;
};

static_assert(sizeof(KernelJob) == 7 * sizeof(int64_t) && sizeof(CopyJob) == 4 * sizeof(int64_t), "numbers");

// A page buffer of some slots in device memory, through which pages go on their way: kernels on the one side, the
// copy engine on the other, each on a stream of its own so that they overlap. Order, for a slot:
//
//   filled[slot]   recorded when somebody has put pages into it; whoever takes them out waits for it.
//   drained[slot]  recorded when they are out; the next to fill the slot waits for it, in this call or a later one.
//
// One of the two sides is the caller's stream. SGLang lets that wait for the compute that wrote the rows (a store),
// or for whatever used the destination last (a load), and takes an event recorded behind our steps for their end.
// So: the other stream begins behind `entry`, an event of the caller's stream; and every step of ours that counts
// for the end (the last copy of a store, the last kernel of a load) is on the caller's stream, behind its fill.
template <typename Steps>
class Staging {
 public:
  using Stream = typename Steps::Stream;

  Staging(Steps steps, int64_t buffer, int64_t slot_bytes, int64_t slot_count)
      : steps_(steps), buffer_(buffer), slot_bytes_(slot_bytes), side_(steps_.make_stream()),
        entry_(steps_.make_event()) {
    for (int64_t i = 0; i < slot_count; ++i) {
      filled_.push_back(steps_.make_event());
      drained_.push_back(steps_.make_event());
    }
  }

  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  ~Staging() {
    for (auto event : filled_) steps_.free_event(event);
    for (auto event : drained_) steps_.free_event(event);
    steps_.free_event(entry_);
    steps_.free_stream(side_);
  }

  // Before a transfer, which is one `store` or `load` or several: what it reads is there, and what it writes free, when
  // the caller's stream gets here, and the other stream must not begin before. Not before each of them: the gathering
  // of one would wait for the copies of the one before, and the copies of a layer for the kernel of the layer before.
  void begin(Stream caller) {
    steps_.record(entry_, caller);
    steps_.wait(side_, entry_);
  }

  // Device pages to host pages, `slot_pages` at a time: gathered aside, copied on the caller's stream.
  void store(const KernelJob& gather, const CopyJob& copy, PageIndices device, PageIndices host, int64_t page_count,
             int64_t slot_pages, Stream caller) {
    joined(caller, [&] { store_slots(gather, copy, device, host, page_count, slot_pages, caller); });
  }

  // Host pages to device pages, `slot_pages` at a time: copied aside, scattered on the caller's stream.
  void load(const CopyJob& copy, const KernelJob& scatter, PageIndices host, PageIndices device, int64_t page_count,
            int64_t slot_pages, Stream caller) {
    joined(caller, [&] { load_slots(copy, scatter, host, device, page_count, slot_pages, caller); });
  }

 private:
  static constexpr PageIndices kBuffer{nullptr, 1};

  struct Slot {
    size_t index;
    int64_t base;
  };

  void store_slots(const KernelJob& gather, const CopyJob& copy, PageIndices device, PageIndices host, int64_t page_count,
                   int64_t slot_pages, Stream caller) {
    for (int64_t first = 0; first < page_count; first += slot_pages) {
      const int64_t count = page_count - first < slot_pages ? page_count - first : slot_pages;
      const Slot slot = next();
      steps_.wait(side_, drained_[slot.index]);
      steps_.run(gather, Transfer{gather.runs, gather.run_count, device.from(first), kBuffer, count, 0, slot.base},
                 side_);
      steps_.record(filled_[slot.index], side_);
      steps_.wait(caller, filled_[slot.index]);
      steps_.copy(copy, Transfer{copy.runs, copy.run_count, kBuffer, host.from(first), count, slot.base, 0}, false,
                  caller);
      steps_.record(drained_[slot.index], caller);
    }
  }

  void load_slots(const CopyJob& copy, const KernelJob& scatter, PageIndices host, PageIndices device, int64_t page_count,
                  int64_t slot_pages, Stream caller) {
    for (int64_t first = 0; first < page_count; first += slot_pages) {
      const int64_t count = page_count - first < slot_pages ? page_count - first : slot_pages;
      const Slot slot = next();
      steps_.wait(side_, drained_[slot.index]);
      steps_.copy(copy, Transfer{copy.runs, copy.run_count, host.from(first), kBuffer, count, 0, slot.base}, true,
                  side_);
      steps_.record(filled_[slot.index], side_);
      steps_.wait(caller, filled_[slot.index]);
      steps_.run(scatter,
                 Transfer{scatter.runs, scatter.run_count, kBuffer, device.from(first), count, slot.base, 0}, caller);
      steps_.record(drained_[slot.index], caller);
    }
  }

  // Steps that failed half way: whoever carries on (torch, on the caller's stream) comes behind what the other stream
  // was given, and so does the memory of lists that it still reads.
  template <typename Work>
  void joined(Stream caller, Work&& work) {
    try {
      work();
    } catch (...) {
      steps_.record(entry_, side_);
      steps_.wait(caller, entry_);
      throw;
    }
  }

  Slot next() {
    const size_t index = next_++ % filled_.size();
    return {index, buffer_ + static_cast<int64_t>(index) * slot_bytes_};
  }

  Steps steps_;
  int64_t buffer_, slot_bytes_;
  Stream side_;
  typename Steps::Event entry_;
  std::vector<typename Steps::Event> filled_, drained_;
  size_t next_ = 0;
};

}  // namespace kvpool
