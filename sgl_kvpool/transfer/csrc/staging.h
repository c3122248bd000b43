// Transfers of GPU pools as steps on streams. CUDA carries out the steps (cuda_steps.cuh), or a test without a GPU,
// which also tries orders that streams permit but CUDA seldom takes.
//
// `Steps` has types Stream and Event, and
//   run(KernelJob, Transfer, Stream)              a kernel
//   copy(CopyJob, Transfer, bool, Stream)         copies by the copy engine; true: the source is the host
//   record(Event, Stream), wait(Stream, Event)    as CUDA's; a wait for an event never recorded returns at once
//   make_stream(), make_event(), free_stream(Stream), free_event(Event)
#pragma once

#include <vector>

#include "../../codec/csrc/row_conversion.h"
#include "copies.h"

namespace kvpool {

// Work of a kernel, as seven int64 in host memory. The formats are in host memory, too; everything else that it points
// to is in device memory. Without formats, bytes are copied in words of `word_bytes`, which divides all addresses and
// sizes.
struct KernelJob {
  const CopyRun* runs;
  int64_t run_count;
  int64_t word_bytes;
  int64_t blocks;
  const RowLayout* from;
  const RowLayout* to;
  const float* k_scales;  // one per copy run
};

// Work of the copy engine, as four int64 in host memory; the runs are in host memory, too.
struct CopyJob {
  const CopyRun* runs;
  int64_t run_count;
  RegisteredChunks chunks;
};

static_assert(sizeof(KernelJob) == 7 * sizeof(int64_t) && sizeof(CopyJob) == 4 * sizeof(int64_t), "numbers");

// A page buffer of several slots in device memory. A kernel accesses one side of it and the copy engine the other, each
// on its own stream so that they overlap. Two events order the use of a slot:
//
//   filled[slot]   recorded when pages have been put into the slot; the step that takes them out waits for it.
//   drained[slot]  recorded when they have been taken out; the next step that fills the slot waits for it, in this call
//                  or in a later one.
//
// One of the two streams is the caller's. SGLang lets it wait for the compute that wrote the rows (a store), or for the
// last use of the destination (a load), and takes an event recorded behind our steps as their end. Therefore the other
// stream begins behind `entry`, an event of the caller's stream, and every step that decides the end (the last copy of
// a store, the last kernel of a load) is on the caller's stream, behind the step that filled its slot.
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

  // Called once before a transfer, which consists of one or more calls of `store` or `load`. The transfer's sources are
  // written and its targets are free when the caller's stream gets here; the other stream must not begin earlier. With
  // a call before each `store` or `load`, a gather would wait for the previous copies, and a layer's copies for the
  // previous kernel.
  void begin(Stream caller) {
    steps_.record(entry_, caller);
    steps_.wait(side_, entry_);
  }

  // Device pages to host pages, `slot_pages` at a time: gathered on the other stream, copied on the caller's stream.
  void store(const KernelJob& gather, const CopyJob& copy, PageIndices device, PageIndices host, int64_t page_count,
             int64_t slot_pages, Stream caller) {
    joined(caller, [&] { store_slots(gather, copy, device, host, page_count, slot_pages, caller); });
  }

  // Host pages to device pages, `slot_pages` at a time: copied on the other stream, scattered on the caller's stream.
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

  // If steps fail half way, the caller's stream waits for the other stream: the retry with torch runs behind the steps
  // there, and the lists that they still read are not freed earlier.
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
