// Encoder and decoder of rows on a CPU. Arguments are checked in codec/checks.py.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include "row_decoder.h"
#include "threads.h"

namespace {

// Calls function.template operator()<kTo>() for a layout's latent encoding; bf16, a copy, is left to torch.
template <typename Function>
void for_latent(const kvpool::RowLayout& to, Function&& function) {
  switch (to.latent) {
    case kvpool::Latent::kE4m3:
      return function.template operator()<kvpool::Latent::kE4m3>();
    case kvpool::Latent::kE4m3Tiles:
      return function.template operator()<kvpool::Latent::kE4m3Tiles>();
    case kvpool::Latent::kE2m1:
      return function.template operator()<kvpool::Latent::kE2m1>();
    case kvpool::Latent::kBf16:
      break;
  }
  TVM_FFI_THROW(ValueError) << "no encoder for this row format";
}

template <kvpool::Latent kTo>
int64_t threads_of(const kvpool::RowLayout& to, int64_t tokens, int64_t most) {
  const int64_t bytes = tokens * (to.row_bytes + 2 * (to.latent_values + to.rope_values));
  return kvpool::threads_for(bytes, kvpool::kConvertedBytesPerThread<kTo>, most);
}

int64_t address(const uint8_t* pointer) { return reinterpret_cast<intptr_t>(pointer); }

// Number of threads that `encode_rows` uses.
int64_t encoding_threads(tvm::ffi::TensorView to, int64_t tokens, int64_t most) {
  const auto& layout = *static_cast<const kvpool::RowLayout*>(to.data_ptr());
  int64_t threads = 0;
  for_latent(layout, [&]<kvpool::Latent kTo>() { threads = threads_of<kTo>(layout, tokens, most); });
  return threads;
}

// `nope` and `rope` are bf16 with any stride between tokens (rope is empty without rotary values), `to` a RowLayout.
void encode_rows(tvm::ffi::TensorView rows, tvm::ffi::TensorView nope, tvm::ffi::TensorView rope,
                 tvm::ffi::TensorView to, double k_scale, int64_t threads) {
  const auto& to_layout = *static_cast<const kvpool::RowLayout*>(to.data_ptr());
  auto* first_row = static_cast<uint8_t*>(rows.data_ptr());
  const auto* first_nope = static_cast<const uint8_t*>(nope.data_ptr());
  const auto* first_rope = static_cast<const uint8_t*>(rope.data_ptr());
  const int64_t row_stride = rows.stride(0), nope_stride = 2 * nope.stride(0), rope_stride = 2 * rope.stride(0);
  const int64_t tokens = nope.size(0);
  const float scale = static_cast<float>(k_scale);

  // A token's values are a bf16 row whose rope lies at another address.
  kvpool::RowLayout from_layout = {};
  from_layout.latent = kvpool::Latent::kBf16;
  from_layout.rope = kvpool::Rope::kBf16;
  from_layout.latent_values = to_layout.latent_values;
  from_layout.rope_values = to_layout.rope_values;

  for_latent(to_layout, [&]<kvpool::Latent kTo>() {
    kvpool::share(tokens, threads_of<kTo>(to_layout, tokens, threads), [&](int64_t begin, int64_t end) {
      kvpool::RowLayout from = from_layout;
      for (int64_t token = begin; token < end; ++token) {
        const uint8_t* values = first_nope + token * nope_stride;
        from.rope_offset = address(first_rope + token * rope_stride) - address(values);
        kvpool::convert_row<kvpool::Latent::kBf16, kTo>(values, from, first_row + token * row_stride, to_layout, scale);
      }
    });
  });
}

// Writes up to kTile values times a scale, as bf16 or fp32; decode(to) writes them as bf16, whose bits are kept if nothing
// changes them.
template <typename Value, typename Decode>
void write_values(int64_t count, float scale, Value* out, Decode&& decode) {
  if (sizeof(Value) == 2 && scale == 1.0f) {
    decode(reinterpret_cast<uint16_t*>(out));
    return;
  }
  uint16_t values[kvpool::kTile];
  decode(values);
  for (int64_t i = 0; i < count; ++i) {
    const float value = kvpool::multiply(kvpool::bf16_value(values[i]), scale);
    if constexpr (sizeof(Value) == 2) {
      out[i] = kvpool::bf16_bits(value);
    } else {
      out[i] = value;
    }
  }
}

template <kvpool::Latent kFrom, typename Value>
void decode_row(const uint8_t* row, const kvpool::RowLayout& layout, float k_scale, Value* nope, Value* rope) {
  for (int64_t first = 0; first < layout.latent_values; first += kvpool::kTile) {
    const float scale = kvpool::latent_scale<kFrom>(row, layout, first / kvpool::kTile, k_scale);
    write_values(kvpool::kTile, scale, nope + first, [&](uint16_t* to) KVPOOL_LAMBDA {
      kvpool::decode_latent<kFrom>(row, layout, first, kvpool::kTile, to);
    });
  }
  write_values(layout.rope_values, layout.divisor(k_scale), rope,
               [&](uint16_t* to) KVPOOL_LAMBDA { kvpool::decode_rope(row, layout, to); });
}

// Decodes the rows of int64 `slots`, zeros for negative ones; `nope` and `rope` are both bf16 or both fp32 with any
// stride between tokens (rope is empty without rotary values).
void gather_rows(tvm::ffi::TensorView rows, tvm::ffi::TensorView slots, tvm::ffi::TensorView nope,
                 tvm::ffi::TensorView rope, tvm::ffi::TensorView from, double k_scale, int64_t threads) {
  const auto& layout = *static_cast<const kvpool::RowLayout*>(from.data_ptr());
  const auto* first_row = static_cast<const uint8_t*>(rows.data_ptr());
  const auto* slot = static_cast<const int64_t*>(slots.data_ptr());
  const int64_t row_stride = rows.stride(0), nope_stride = nope.stride(0), rope_stride = rope.stride(0),
                tokens = nope.size(0);
  const auto run = [&]<kvpool::Latent kFrom, typename Value>(Value* first_nope, Value* first_rope) {
    const int64_t bytes =
        tokens * (layout.row_bytes + static_cast<int64_t>(sizeof(Value)) * (layout.latent_values + layout.rope_values));
    kvpool::share(tokens, kvpool::threads_for(bytes, kvpool::kConvertedBytesPerThread<kvpool::Latent::kBf16>, threads),
                  [&](int64_t begin, int64_t end) {
                    constexpr int64_t kAhead = 8;  // rows whose lines are on their way from memory
                    for (int64_t token = begin; token < end; ++token) {
                      if (token + kAhead < end && slot[token + kAhead] >= 0) {
                        const uint8_t* ahead = first_row + slot[token + kAhead] * row_stride;
                        for (int64_t at = 0; at < layout.payload_bytes; at += 64) __builtin_prefetch(ahead + at);
                      }
                      Value* to_nope = first_nope + token * nope_stride;
                      Value* to_rope = first_rope + token * rope_stride;
                      if (slot[token] < 0) {
                        std::fill_n(to_nope, layout.latent_values, Value{});
                        std::fill_n(to_rope, layout.rope_values, Value{});
                      } else {
                        decode_row<kFrom>(first_row + slot[token] * row_stride, layout, static_cast<float>(k_scale),
                                          to_nope, to_rope);
                      }
                    }
                  });
  };
  kvpool::with_latent(layout, [&]<kvpool::Latent kFrom>() {
    if (nope.dtype().bits == 16) {
      run.template operator()<kFrom>(static_cast<uint16_t*>(nope.data_ptr()), static_cast<uint16_t*>(rope.data_ptr()));
    } else {
      run.template operator()<kFrom>(static_cast<float*>(nope.data_ptr()), static_cast<float*>(rope.data_ptr()));
    }
  });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(encode_rows, encode_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(encoding_threads, encoding_threads);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_rows, gather_rows);
