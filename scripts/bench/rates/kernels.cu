// The operations of decode attention, one at a time: instructions that decode, small wgmma, row gathers.
// library.py calls the functions at the end. Clocks are SM clocks, read by the kernel itself, so they do not
// depend on the frequency.
#include <cuda_runtime.h>

#include <cstdint>

#define DEVICE __device__ __forceinline__

namespace {

// ------------------------------------------------------------------------------------- instructions

constexpr int kChains = 8;   // registers per thread; each is a dependency chain, in decoders two or four are one
constexpr int kUnrolled = 8; // operations per register and round

enum Op {
  kLop3, kShift, kImad, kPrmt, kMulBf16, kMulF16, kCvtE4m3, kLop3Imad, kLop3Mul, kLop3Cvt,
  kDecodeFp4, kDecodeFp4ByE4m3, kDecodeE4m3, kDecodeE4m3ByCvt,
};

// `a` and `b` are kernel arguments: with constants the assembler would simplify the instructions.
#define INSTRUCTION(NAME, TEXT)                                                                          \
  DEVICE void NAME(uint32_t& r, uint32_t a, uint32_t b) { asm volatile(TEXT : "+r"(r) : "r"(a), "r"(b)); }
INSTRUCTION(lop3, "lop3.b32 %0,%0,%1,%2,0x6A;")
INSTRUCTION(shift, "shf.r.wrap.b32 %0,%0,%1,3;")
INSTRUCTION(imad, "mad.lo.u32 %0,%0,%1,%2;")
INSTRUCTION(prmt, "prmt.b32 %0,%0,%1,%2;")
INSTRUCTION(mul_bf16, "mul.rn.bf16x2 %0,%0,%1;")
INSTRUCTION(mul_f16, "mul.rn.f16x2 %0,%0,%1;")
// r += a * b
INSTRUCTION(fma_bf16, "fma.rn.bf16x2 %0,%1,%2,%0;")
INSTRUCTION(fma_f16, "fma.rn.f16x2 %0,%1,%2,%0;")
// Converts the two e4m3 in one half of a register to fp16.
#define CONVERSION(NAME, HALF)                                                                 \
  DEVICE uint32_t NAME(uint32_t r) {                                                           \
    uint32_t x;                                                                                \
    asm volatile("{.reg .b16 low,high; mov.b32 {low,high},%1; cvt.rn.f16x2.e4m3x2 %0," HALF ";}" \
                 : "=r"(x) : "r"(r));                                                          \
    return x;                                                                                  \
  }
CONVERSION(e4m3_low, "low")
CONVERSION(e4m3_high, "high")

// Decoding as in triton_operands.py. The product with the scale is replaced by a multiply-add on the same unit:
// the sum keeps all results alive, and is the next input word.
DEVICE uint32_t fp4_bits(uint32_t magnitudes, uint32_t signs) {
  return (magnitudes & 0x01C001C0u) | (signs & 0x80008000u);
}
DEVICE void decode_fp4(uint32_t (&s)[4], uint32_t scale) {
  uint32_t w = s[0];
  fma_bf16(s[0], fp4_bits(w << 6, w << 12), scale);
  fma_bf16(s[1], fp4_bits(w << 2, w << 8), scale);
  fma_bf16(s[2], fp4_bits(w >> 2, w << 4), scale);
  fma_bf16(s[3], fp4_bits(w >> 6, w), scale);
}
// Alternative decoder: codes as e4m3 bytes, which the GPU converts to fp16.
DEVICE void decode_fp4_by_e4m3(uint32_t (&s)[4], uint32_t scale) {
  uint32_t w = s[0];
  uint32_t even = ((w << 2) & 0x1C1C1C1Cu) | ((w << 4) & 0x80808080u);
  uint32_t odd = ((w >> 2) & 0x1C1C1C1Cu) | (w & 0x80808080u);
  fma_f16(s[0], e4m3_low(even), scale);
  fma_f16(s[1], e4m3_high(even), scale);
  fma_f16(s[2], e4m3_low(odd), scale);
  fma_f16(s[3], e4m3_high(odd), scale);
}
DEVICE uint32_t e4m3_bits(uint32_t magnitudes, uint32_t signs) {
  return (magnitudes & 0x07F007F0u) | (signs & 0x80008000u);
}
DEVICE void decode_e4m3(uint32_t (&s)[4], uint32_t scale) {  // two words of four values
  for (int i = 0; i < 4; i += 2) {
    uint32_t w = s[i];
    fma_bf16(s[i], e4m3_bits(w << 4, w << 8), scale);
    fma_bf16(s[i + 1], e4m3_bits(w >> 4, w), scale);
  }
}
DEVICE void decode_e4m3_by_cvt(uint32_t (&s)[4], uint32_t scale) {
  for (int i = 0; i < 4; i += 2) {
    uint32_t w = s[i];
    fma_f16(s[i], e4m3_low(w), scale);
    fma_f16(s[i + 1], e4m3_high(w), scale);
  }
}

template <int OP>
DEVICE void apply(uint32_t (&r)[kChains], uint32_t a, uint32_t b) {
  if constexpr (OP >= kDecodeFp4) {
    auto& low = reinterpret_cast<uint32_t (&)[4]>(r[0]);
    auto& high = reinterpret_cast<uint32_t (&)[4]>(r[4]);
    if constexpr (OP == kDecodeFp4) decode_fp4(low, a), decode_fp4(high, a);
    if constexpr (OP == kDecodeFp4ByE4m3) decode_fp4_by_e4m3(low, a), decode_fp4_by_e4m3(high, a);
    if constexpr (OP == kDecodeE4m3) decode_e4m3(low, a), decode_e4m3(high, a);
    if constexpr (OP == kDecodeE4m3ByCvt) decode_e4m3_by_cvt(low, a), decode_e4m3_by_cvt(high, a);
  } else {
#pragma unroll
    for (int i = 0; i < kChains; ++i) {
      constexpr bool mixed = OP == kLop3Imad || OP == kLop3Mul || OP == kLop3Cvt;
      if (OP == kLop3 || (mixed && i % 2)) lop3(r[i], a, b);
      else if (OP == kShift) shift(r[i], a, b);
      else if (OP == kImad || OP == kLop3Imad) imad(r[i], a, b);
      else if (OP == kPrmt) prmt(r[i], a, b);
      else if (OP == kMulBf16 || OP == kLop3Mul) mul_bf16(r[i], a, b);
      else if (OP == kMulF16) mul_f16(r[i], a, b);
      else r[i] = e4m3_low(r[i]);
    }
  }
}

template <int OP>
__global__ void instructions(uint32_t a, uint32_t b, uint32_t* out, long long* clocks, int rounds) {
  uint32_t r[kChains];
  for (int i = 0; i < kChains; ++i) r[i] = (threadIdx.x * kChains + i) * 0x9E3779B9u;
  __syncthreads();
  long long began = clock64();
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) apply<OP>(r, a, b);
  }
  __syncthreads();
  long long took = clock64() - began;
  uint32_t all = 0;
  for (int i = 0; i < kChains; ++i) all ^= r[i];
  out[blockIdx.x * blockDim.x + threadIdx.x] = all;
  if (threadIdx.x == 0) clocks[blockIdx.x] = took;
}

// ------------------------------------------------------------------------------------------ products

#define REGISTERS4(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define REGISTERS8(d) REGISTERS4(d), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define REGISTERS16(d)                                                                               \
  REGISTERS8(d), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), \
      "+f"(d[15])
#define NAMES4 "{%0,%1,%2,%3}"
#define NAMES8 "{%0,%1,%2,%3,%4,%5,%6,%7}"
#define NAMES16 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
// A in registers, or in shared memory, transposed or not. B is [N, K] in shared memory. A0 to B name the operands
// behind the accumulators if A is in registers, AT and BT name them if A is in shared memory.
#define PRODUCT(N, REGISTERS, NAMES, A0, A1, A2, A3, B, AT, BT)                                             \
  template <int KIND>                                                                                       \
  DEVICE void product(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t at, uint64_t b) {                 \
    if constexpr (KIND == kRegisters)                                                                       \
      asm volatile(WGMMA(N) NAMES ",{" A0 "," A1 "," A2 "," A3 "}," B ",1,1,1,0;"                           \
                   : REGISTERS(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                    \
    else if constexpr (KIND == kShared)                                                                     \
      asm volatile(WGMMA(N) NAMES "," AT "," BT ",1,1,1,0,0;" : REGISTERS(d) : "l"(at), "l"(b));            \
    else                                                                                                    \
      asm volatile(WGMMA(N) NAMES "," AT "," BT ",1,1,1,1,0;" : REGISTERS(d) : "l"(at), "l"(b));            \
  }
#define WGMMA(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "
enum Kind { kRegisters, kShared, kTransposed };
PRODUCT(8, REGISTERS4, NAMES4, "%4", "%5", "%6", "%7", "%8", "%4", "%5")
PRODUCT(16, REGISTERS8, NAMES8, "%8", "%9", "%10", "%11", "%12", "%8", "%9")
PRODUCT(32, REGISTERS16, NAMES16, "%16", "%17", "%18", "%19", "%20", "%16", "%17")

constexpr int kSteps = 16;               // products of 16 values of K each, per round: K is 256
constexpr int kTileBytes = 64 * 128;     // 64 rows of 64 bf16; transposed, 64 values of K, each for 64 rows
constexpr int kOperandBytes = 4 * kTileBytes;
constexpr int kGroups = 2;               // largest number of warp groups

// Descriptor of a tile in shared memory with swizzled rows of 128 bytes, in consecutive groups of eight rows.
DEVICE uint64_t descriptor(uint32_t address) {
  return (uint64_t(address & 0x3FFFF) >> 4) | (1ull << 62) | (64ull << 32) | (1ull << 16);
}

// All warp groups multiply with the same B; each has its own A. `operands` is the content of shared memory: one A
// per group, then B.
template <int N, int KIND, int SUMS>
__global__ void products(const uint4* operands, float* out, long long* clocks, int rounds) {
  extern __shared__ __align__(1024) uint8_t memory[];
  // Broadcast from one lane, so that descriptors are in uniform registers.
  int groups = blockDim.x / 128, group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  for (int i = threadIdx.x; i < (groups + 1) * kOperandBytes / 16; i += blockDim.x)
    reinterpret_cast<uint4*>(memory)[i] = operands[i];
  float sums[SUMS][N / 2];
  for (auto& sum : sums) for (auto& x : sum) x = 0;
  uint32_t a[4];
  for (int i = 0; i < 4; ++i) a[i] = reinterpret_cast<const uint32_t*>(operands)[threadIdx.x * 4 + i];
  uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  uint64_t at = descriptor(base + group * kOperandBytes), b = descriptor(base + groups * kOperandBytes);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  long long began = clock64();
  for (int round = 0; round < rounds; ++round) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      // 16 values of K are 32 bytes of each row, or 16 rows of a transposed tile.
      int along = step / 4 * kTileBytes + step % 4 * 32, down = step * 16 * 128;
      product<KIND>(sums[step % SUMS], a, at + ((KIND == kTransposed ? down : along) >> 4), b + (along >> 4));
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // waits for the previous round
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  __syncthreads();
  long long took = clock64() - began;
  for (int i = 0; i < N / 2; ++i) {
    float all = 0;
    for (auto& sum : sums) all += sum[i];
    out[(blockIdx.x * blockDim.x + threadIdx.x) * (N / 2) + i] = all;
  }
  if (threadIdx.x == 0) clocks[blockIdx.x] = took;
}

// ------------------------------------------------------------------------------------------- gathers

constexpr int kTogether = 32;  // rows per stage, one per lane of the only warp
constexpr int kStages = 4;
enum How { kBulk, kChunks, kLoads };

DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
DEVICE void wait_for(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{.reg .pred p;\nAGAIN%=: mbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1;\n@!p bra AGAIN%=;}"
      ::"r"(barrier), "r"(phase) : "memory");
}

// Copies rows into shared memory, kStages of kTogether rows in flight, by one bulk copy per row or by chunks of 16
// bytes; or loads them into registers. Each lane returns the exclusive or of the last words of its rows, or of all
// words that it has loaded, as proof of their arrival.
template <int ROW, int HOW>
__global__ void gather(const uint8_t* pool, const int* ids, int rows, uint32_t* out) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ uint64_t full[kStages];
  constexpr int kStride = (ROW + 31) / 32 * 32 + 16, kChunksOfRow = ROW / 16;
  int lane = threadIdx.x, count = rows / kTogether / gridDim.x;
  const int* own = ids + static_cast<int64_t>(blockIdx.x) * count * kTogether;
  if (HOW == kBulk) {
    if (lane == 0) {
      for (int i = 0; i < kStages; ++i)
        asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(shared_address(full + i)), "r"(1) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
  }
  uint32_t sum = 0;
  if constexpr (HOW == kLoads) {
    for (int block = 0; block < count; ++block) {
      int id = own[block * kTogether + lane];
#pragma unroll 8
      for (int k = 0; k < kChunksOfRow; ++k) {
        int i = k * 32 + lane;
        int row = __shfl_sync(~0u, id, i / kChunksOfRow), chunk = i % kChunksOfRow;
        uint4 x = *reinterpret_cast<const uint4*>(pool + static_cast<int64_t>(row) * ROW + chunk * 16);
        sum ^= x.x ^ x.y ^ x.z ^ x.w;
      }
    }
  } else {
    for (int block = 0; block < count + kStages - 1; ++block) {
      if (block < count) {
        int id = own[block * kTogether + lane];
        uint8_t* to = memory + block % kStages * kTogether * kStride;
        uint32_t barrier = shared_address(full + block % kStages);
        if constexpr (HOW == kBulk) {
          if (lane == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;"
                         ::"r"(barrier), "r"(kTogether * ROW) : "memory");
          __syncwarp();
          asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"
                       ::"r"(shared_address(to + lane * kStride)), "l"(pool + static_cast<int64_t>(id) * ROW),
                       "r"(ROW), "r"(barrier) : "memory");
        } else {
#pragma unroll 8
          for (int k = 0; k < kChunksOfRow; ++k) {
            int i = k * 32 + lane, row = i / kChunksOfRow, chunk = i % kChunksOfRow;
            int64_t from = static_cast<int64_t>(__shfl_sync(~0u, id, row)) * ROW + chunk * 16;
            asm volatile("cp.async.cg.shared.global [%0],[%1],16;"
                         ::"r"(shared_address(to + row * kStride + chunk * 16)), "l"(pool + from) : "memory");
          }
        }
      }
      if (HOW == kChunks) asm volatile("cp.async.commit_group;" ::: "memory");
      int done = block - (kStages - 1);
      if (done >= 0) {
        if constexpr (HOW == kBulk) wait_for(shared_address(full + done % kStages), done / kStages & 1);
        else asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
        __syncwarp();
        const uint8_t* row = memory + (done % kStages * kTogether + lane) * kStride;
        sum ^= *reinterpret_cast<const uint32_t*>(row + ROW - 4);
        __syncwarp();
      }
    }
  }
  out[blockIdx.x * 32 + lane] = sum;
}

// ------------------------------------------------------------------------------------------- launches

using Instructions = void (*)(uint32_t, uint32_t, uint32_t*, long long*, int);
constexpr Instructions kInstructions[] = {
    instructions<kLop3>, instructions<kShift>, instructions<kImad>, instructions<kPrmt>, instructions<kMulBf16>,
    instructions<kMulF16>, instructions<kCvtE4m3>, instructions<kLop3Imad>, instructions<kLop3Mul>,
    instructions<kLop3Cvt>, instructions<kDecodeFp4>, instructions<kDecodeFp4ByE4m3>, instructions<kDecodeE4m3>,
    instructions<kDecodeE4m3ByCvt>,
};

using Products = void (*)(const uint4*, float*, long long*, int);
template <int N>
Products products_of(int kind, int sums) {
  constexpr Products all[] = {products<N, kRegisters, 1>, products<N, kShared, 1>, products<N, kTransposed, 1>,
                              products<N, kRegisters, 2>, products<N, kShared, 2>, products<N, kTransposed, 2>};
  return all[(sums - 1) * 3 + kind];
}

using Gather = void (*)(const uint8_t*, const int*, int, uint32_t*);
template <int ROW>
Gather gather_of(int how) {
  constexpr Gather all[] = {gather<ROW, kBulk>, gather<ROW, kChunks>, gather<ROW, kLoads>};
  return all[how];
}

// Gather kernel for a row size; null if the size is not in ROWS.
template <int... ROWS>
Gather gather_of_one_of(int row_bytes, int how) {
  Gather found = nullptr;
  ((row_bytes == ROWS ? void(found = gather_of<ROWS>(how)) : void()), ...);
  return found;
}

int launched(const void* kernel, int blocks, int threads, int shared_bytes, void** arguments, cudaStream_t stream) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess) error = cudaLaunchKernel(kernel, blocks, threads, arguments, shared_bytes, stream);
  return error;
}

}  // namespace

// All three functions return a cudaError_t.
extern "C" int kvpool_instructions(int op, uint32_t a, uint32_t b, uint32_t* out, long long* clocks, int rounds,
                                   int blocks, int threads, cudaStream_t stream) {
  void* arguments[] = {&a, &b, &out, &clocks, &rounds};
  return launched(reinterpret_cast<const void*>(kInstructions[op]), blocks, threads, 0, arguments, stream);
}

extern "C" int kvpool_products(int n, int kind, int sums, const uint4* operands, float* out, long long* clocks,
                               int rounds, int blocks, int groups, cudaStream_t stream) {
  Products kernel = n == 8    ? products_of<8>(kind, sums)
                    : n == 16 ? products_of<16>(kind, sums)
                              : products_of<32>(kind, sums);
  void* arguments[] = {&operands, &out, &clocks, &rounds};
  // A program takes more than half of an SM's shared memory for any number of groups, so one runs per SM.
  int shared_bytes = (kGroups + 2) * kOperandBytes;
  return launched(reinterpret_cast<const void*>(kernel), blocks, 128 * groups, shared_bytes, arguments, stream);
}

extern "C" int kvpool_gather(int row_bytes, int how, const uint8_t* pool, const int* ids, int rows, uint32_t* out,
                             int blocks, cudaStream_t stream) {
  Gather kernel = gather_of_one_of<352, 416, 576, 656, 1152>(row_bytes, how);  // measure.ROW_BYTES
  if (kernel == nullptr) return cudaErrorInvalidValue;
  void* arguments[] = {&pool, &ids, &rows, &out};
  int shared_bytes = how == kLoads ? 0 : kStages * kTogether * ((row_bytes + 31) / 32 * 32 + 16);
  return launched(reinterpret_cast<const void*>(kernel), blocks, 32, shared_bytes, arguments, stream);
}

extern "C" const char* kvpool_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
