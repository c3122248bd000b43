// The steps of staging.h with CUDA.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "staging.h"

namespace kvpool {

constexpr int kWarp = 32;
constexpr int kCopyThreads = 512;     // up to 64 registers each, those of one decode program where an SM has two
constexpr int kConvertThreads = 512;  // up to 128 registers each
constexpr int kLoadsInFlight = 4;     // per lane: 2 KB per warp with words of 16 bytes

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears the error, which the next launch in this process would report
  throw std::runtime_error(std::string("sgl-kvpool: ") + what + ": " + cudaGetErrorString(status));
}

template <typename Word>
__global__ void __launch_bounds__(kCopyThreads, 2) copy_pages_kernel(Transfer transfer) {
  const int lane = threadIdx.x % kWarp;
  const int64_t warp = (blockIdx.x * static_cast<int64_t>(kCopyThreads) + threadIdx.x) / kWarp;
  const int64_t warps = gridDim.x * static_cast<int64_t>(kCopyThreads / kWarp);
  constexpr int64_t kChunkBytes = kWarp * kLoadsInFlight * sizeof(Word);
  each_chunk(transfer, kChunkBytes, warp, warps, [lane](int64_t target, int64_t source, int64_t bytes, int64_t) {
    const auto* from = reinterpret_cast<const uint8_t*>(source) + lane * sizeof(Word);
    auto* to = reinterpret_cast<uint8_t*>(target) + lane * sizeof(Word);
    constexpr int kStep = kWarp * sizeof(Word);
    const int words = static_cast<int>(bytes / static_cast<int64_t>(sizeof(Word)));
    Word held[kLoadsInFlight];
    KVPOOL_UNROLL
    for (int i = 0; i < kLoadsInFlight; ++i) {
      if (i * kWarp + lane < words) held[i] = load<Word>(from + i * kStep);
    }
    KVPOOL_UNROLL
    for (int i = 0; i < kLoadsInFlight; ++i) {
      if (i * kWarp + lane < words) store(to + i * kStep, held[i]);
    }
  });
}

// One warp per row. A lane takes a block of 16 latent values, but only two rope values, so that lanes access adjacent
// words of the rope: 4 sector accesses for 64 values in bf16 (with 16 values per lane it would be 32).
template <Latent kFrom, Latent kTo>
__global__ void __launch_bounds__(kConvertThreads, 1)
    convert_pages_kernel(Transfer transfer, RowLayout from, RowLayout to, const float* k_scales) {
  const int lane = threadIdx.x % kWarp;
  const int64_t warp = (blockIdx.x * static_cast<int64_t>(kConvertThreads) + threadIdx.x) / kWarp;
  const int64_t warps = gridDim.x * static_cast<int64_t>(kConvertThreads / kWarp);
  each_chunk(transfer, from.row_bytes, warp, warps, [&](int64_t target, int64_t source, int64_t, int64_t number) {
    const auto* from_row = reinterpret_cast<const uint8_t*>(source);
    auto* to_row = reinterpret_cast<uint8_t*>(target);
    const float k_scale = k_scales[number];
    for (int first = 0; first < from.latent_blocks(); first += kWarp) {
      const int block = first + lane;
      const bool mine = block < from.latent_blocks();
      if constexpr (kFrom == kTo) {
        if (mine) copy_latent<kTo>(from_row, from, to_row, to, block);
      } else {
        uint16_t values[kBlock];
        if (mine) read_latent<kFrom, 1>(from_row, from, block, k_scale, values);
        float largest = 0.0f;
        if constexpr (kTo == Latent::kE4m3Tiles) {
          // Eight neighbouring lanes hold a tile. The latent has a multiple of 128 values, so all eight have a block
          // or all eight lack one.
          if (mine) largest = largest_of<kBlock>(values);
          KVPOOL_UNROLL
          for (int step = 1; step < kTileBlocks; step *= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, step));
          }
        }
        if (mine) write_latent<kTo, 1>(to_row, to, block, k_scale, &largest, values);
      }
    }
    for (int64_t first = 2 * lane; first < from.rope_values; first += 2 * kWarp) {
      convert_rope<2>(from_row, from, to_row, to, first, k_scale);
    }
    if (lane == 0) clear_padding(to_row, to);
  });
}

// Whether cudaMemcpyBatchAsync can be called: headers, runtime and driver are CUDA 12.8 or later, and registered memory
// has one address for CPU and GPU, because batches take no direction. Cleared for good when CUDA reports that batches
// are not supported.
inline bool& has_batches() {
  static bool found = [] {
#if CUDART_VERSION >= 12080
    int driver = 0, runtime = 0, device = 0, one_address = 0;
    return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12080 &&
           cudaRuntimeGetVersion(&runtime) == cudaSuccess && runtime >= 12080 && cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&one_address, cudaDevAttrCanUseHostPointerForRegisteredMem, device) == cudaSuccess &&
           one_address != 0;
#else
    return false;
#endif
  }();
  return found;
}

inline bool uses_batches() { return has_batches(); }

#if CUDART_VERSION >= 12080
inline cudaError_t copy_batch(FlatCopies& copies, size_t begin, size_t count, bool host_is_source, cudaStream_t stream) {
  cudaMemcpyAttributes attributes = {};
  // A load may read its host pages at any time, even before earlier steps of the stream. Those steps do not write these
  // pages: SGLang loads a page only after its backup was acknowledged, and frees no page that is being loaded.
  // A store has to read in stream order: earlier steps write its sources on the device, and later steps may overwrite
  // them.
  attributes.srcAccessOrder = host_is_source ? cudaMemcpySrcAccessOrderAny : cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  size_t first = 0;
  void** targets = copies.targets.data() + begin;
  void** sources = copies.sources.data() + begin;
  size_t* sizes = copies.sizes.data() + begin;
#if CUDART_VERSION >= 13000
  return cudaMemcpyBatchAsync(const_cast<const void**>(targets), const_cast<const void**>(sources), sizes, count,
                              &attributes, &first, 1, stream);
#else
  size_t failed = 0;
  return cudaMemcpyBatchAsync(targets, sources, sizes, count, &attributes, &first, 1, &failed, stream);
#endif
}
#endif

struct CudaSteps {
  using Stream = cudaStream_t;
  using Event = cudaEvent_t;

  void run(const KernelJob& job, const Transfer& transfer, Stream stream) {
    if (job.from != nullptr) {
      const bool known = for_formats(job.from->latent, job.to->latent, [&]<Latent kFrom, Latent kTo>() {
        launch(convert_pages_kernel<kFrom, kTo>, job.blocks, kConvertThreads, stream, transfer, *job.from, *job.to,
               job.k_scales);
      });
      if (!known) throw std::runtime_error("sgl-kvpool: no conversion between these row formats");
    } else if (job.word_bytes == 16) {
      launch(copy_pages_kernel<Bytes16>, job.blocks, kCopyThreads, stream, transfer);
    } else if (job.word_bytes == 8) {
      launch(copy_pages_kernel<Bytes8>, job.blocks, kCopyThreads, stream, transfer);
    } else if (job.word_bytes == 4) {
      launch(copy_pages_kernel<uint32_t>, job.blocks, kCopyThreads, stream, transfer);
    } else {
      launch(copy_pages_kernel<uint8_t>, job.blocks, kCopyThreads, stream, transfer);
    }
  }

  // Checks the launch's own status: cudaGetLastError may hold the error of another library.
  template <typename... Parameters, typename... Arguments>
  void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, Stream stream, Arguments... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.stream = stream;
    check(cudaLaunchKernelEx(&config, kernel, arguments...), "a kernel of the transfer engines");
  }

  // `stream` must not be the default stream, which batches refuse.
  void copy(const CopyJob& job, const Transfer& transfer, bool host_is_source, Stream stream) {
    thread_local FlatCopies copies;  // reused to avoid allocations
    copies.clear();
    flatten(transfer, host_is_source, job.chunks, copies);
    const auto kind = host_is_source ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
    each_batch(copies, kBatchCopies, [&](size_t first, size_t count) {
#if CUDART_VERSION >= 12080
      if (has_batches()) {
        const cudaError_t status = copy_batch(copies, first, count, host_is_source, stream);
        if (status != cudaErrorNotSupported && status != cudaErrorCallRequiresNewerDriver) {
          check(status, "cudaMemcpyBatchAsync");
          return;
        }
        cudaGetLastError();
        has_batches() = false;  // copies are submitted one by one from here on
      }
#endif
      for (size_t i = first; i < first + count; ++i) {
        check(cudaMemcpyAsync(copies.targets[i], copies.sources[i], copies.sizes[i], kind, stream), "cudaMemcpyAsync");
      }
    });
  }

  void record(Event event, Stream stream) { check(cudaEventRecord(event, stream), "cudaEventRecord"); }
  void wait(Stream stream, Event event) { check(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent"); }

  Stream make_stream() {
    Stream stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    return stream;
  }
  Event make_event() {
    Event event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    return event;
  }
  // At the end of a process, the context may be gone before these calls. The page buffer is freed after its stream,
  // whose steps are done by then.
  void free_stream(Stream stream) {
    cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
  }
  void free_event(Event event) { cudaEventDestroy(event); }
};

}  // namespace kvpool
