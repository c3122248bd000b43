// Attention over rows on a CPU. Arguments are checked in attention/decode.py.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include "attend.h"

namespace {

using tvm::ffi::TensorView;

int64_t item_bytes(TensorView tensor) { return tensor.dtype().bits / 8; }

// [tokens, heads, ...] with contiguous values of a head.
kvpool::Strided strided(TensorView tensor) {
  const int64_t size = item_bytes(tensor);
  return {static_cast<uint8_t*>(tensor.data_ptr()), tensor.stride(0) * size, tensor.stride(1) * size};
}

// Shapes: q [T, H, R] and q_rope [T, H, P], bf16 or both fp32; out [T, H, R], bf16 or fp32; lse [T, H], fp32;
// row_buffer [S, row_bytes]; kv_indices with the last stride; lists [N, 3] as RowList and kv_lens [T], int64.
// IndexError for a row of S or more.
void attend_rows(TensorView out, TensorView lse, TensorView q, TensorView q_rope, TensorView row_buffer,
                 TensorView kv_indices, TensorView lists, TensorView kv_lens, TensorView layout, double scale,
                 double k_scale, int64_t page_tokens, int64_t page_rows, int64_t dcp_size, bool batch_invariant,
                 int64_t threads) {
  kvpool::Attention call = {};
  call.layout = static_cast<const kvpool::RowLayout*>(layout.data_ptr());
  call.row_buffer = static_cast<const uint8_t*>(row_buffer.data_ptr());
  call.row_stride = row_buffer.stride(0);
  call.kv_indices = kv_indices.data_ptr();
  call.kv_indices_are_int64 = item_bytes(kv_indices) == 8;
  call.kv_indices_stride = kv_indices.stride(kv_indices.ndim() - 1);
  call.page_tokens = page_tokens;
  call.page_rows = page_rows;
  call.dcp_size = dcp_size;
  call.lists = static_cast<const kvpool::RowList*>(lists.data_ptr());
  call.list_count = lists.size(0);
  call.kv_lens = static_cast<const int64_t*>(kv_lens.data_ptr());
  call.q = strided(q);
  call.q_rope = strided(q_rope);
  call.out = strided(out);
  call.lse = strided(lse);
  call.q_is_bf16 = item_bytes(q) == 2;
  call.out_is_bf16 = item_bytes(out) == 2;
  call.heads = q.size(1);
  call.whole_lists = batch_invariant;
  call.scale = static_cast<float>(scale);
  call.k_scale = static_cast<float>(k_scale);
  for (int64_t number = 0; number < call.list_count; ++number) {
    const kvpool::RowList& list = call.lists[number];
    if (list.tokens == 0) continue;
    const int64_t* first = call.kv_lens + list.first_token;
    const int64_t most = *std::max_element(first, first + list.tokens);
    for (int64_t position = 0; position < most; ++position) {
      if (const int64_t row = call.row(list, position); row >= row_buffer.size(0)) {
        TVM_FFI_THROW(IndexError) << "entry " << position << " of list " << number << " is row " << row
                                  << ", outside of a pool of " << row_buffer.size(0)
                                  << " rows; mark entries without a row by -1";
      }
    }
  }
  kvpool::attend(call, threads);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_rows, attend_rows);
