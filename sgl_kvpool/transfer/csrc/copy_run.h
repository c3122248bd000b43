// Address arithmetic of transfers, the only place for it in compiled code; compiles with nvcc and g++.
// The fields are documented at CopyRun in ../plan.py.
#pragma once

#include "../../codec/csrc/portable.h"

namespace kvpool {

// A row of an int64 tensor [runs, 8], with the fields in this order.
struct CopyRun {
  int64_t source_address;
  int64_t target_address;
  int64_t source_page_stride;
  int64_t target_page_stride;
  int64_t run_bytes;
  int64_t run_count;
  int64_t source_run_stride;
  int64_t target_run_stride;

  KVPOOL_HD int64_t source(int64_t page, int64_t run) const {
    return source_address + page * source_page_stride + run * source_run_stride;
  }
  KVPOOL_HD int64_t target(int64_t page, int64_t run) const {
    return target_address + page * target_page_stride + run * target_run_stride;
  }
};

static_assert(sizeof(CopyRun) == 8 * sizeof(int64_t), "a row of the tensor of runs");

}  // namespace kvpool
