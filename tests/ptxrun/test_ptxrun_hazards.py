"""ptxrun raises an error, with its place, where a GPU faults, hangs or races; correct kernels give no error.

The kernels are CUDA, in one module; the wrong ones are those of `FAULTY`, and right ones with a line left out
or changed.
"""

import functools

import numpy as np
import ptxrun
import ptxrun_builds
import pytest

pytestmark = pytest.mark.skipif(ptxrun_builds.nvcc() is None, reason="needs nvcc")

HEAD = """
#include <cstdint>
__device__ uint32_t sh(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
#define ASM(...) asm volatile(__VA_ARGS__)
"""
REDUCE = """
extern "C" __global__ void NAME(const float* x, float* out, int n) {
  __shared__ float part[256];
  float s = 0;
  for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256) s += x[i];
  part[threadIdx.x] = s;
  SYNC;
  for (int k = 128; k > 0; k >>= 1) {
    if (threadIdx.x < k) part[threadIdx.x] += part[threadIdx.x + k];
    SYNC;
  }
  if (threadIdx.x == 0) out[blockIdx.x] = part[0];
}
"""
#: A warp copies what another sums up, through two buffers.
PIPELINE = """
extern "C" __global__ void NAME(const float4* x, float* y, int steps) {
  __shared__ alignas(16) float4 buf[2][32];
  __shared__ alignas(8) uint64_t full[2], empty[2];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) for (int i = 0; i < 2; i++) {
    ASM("mbarrier.init.shared::cta.b64 [%0], 32;" ::"r"(sh(&full[i])));
    ASM("mbarrier.init.shared::cta.b64 [%0], 32;" ::"r"(sh(&empty[i])));
  }
  __syncthreads();
  auto wait = [](uint64_t* b, int parity) {
    ASM("{.reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra W;}"
        ::"r"(sh(b)), "r"(parity) : "memory");
  };
  auto arrive = [](uint64_t* b) {
    ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(sh(b)) : "memory");
  };
  if (warp == 0) for (int s = 0; s < steps; s++) {
    EMPTY;
    ASM("cp.async.cg.shared.global [%0], [%1], 16;"
        ::"r"(sh(&buf[s % 2][lane])), "l"(x + s * 32 + lane) : "memory");
    FULL;
  } else {
    float sum = 0;
    for (int s = 0; s < steps; s++) {
      wait(&full[s % 2], s / 2 & 1);
      float4 v = buf[s % 2][31 - lane];
      sum += v.x + v.y + v.z + v.w;
      arrive(&empty[s % 2]);
    }
    y[lane] = sum;
  }
}
"""
DIVERGENT = """
extern "C" __global__ void divergent(int* y, const int* x) {
  int v = x[threadIdx.x], r = 0;
  while (v > 0) {
    if (v & 1) r += 3; else if (v % 5 == 1) r -= x[v % 32]; else r += 1;
    v >>= 1;
    if (r > 12) { r = -r; break; }
  }
  y[threadIdx.x] = r;
}
"""
FAULTY = """
extern "C" __global__ void beyond(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x + 33]; }
extern "C" __global__ void misaligned(float* y) { *(float4*)(y + 1 + threadIdx.x) = float4{1, 2, 3, 4}; }
extern "C" __global__ void same_byte(int* x) { x[threadIdx.x + blockIdx.x * 31] = blockIdx.x; }
extern "C" __global__ void shared(float* y, int written, int read) {
  __shared__ float s[64];
  s[threadIdx.x + written] = 1;
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x + read];
}
extern "C" __global__ void alone(float* y) {
  if (threadIdx.x < 32) ASM("bar.sync 1, 64;");
  y[threadIdx.x] = 1;
}
extern "C" __global__ void endless() { ASM("AGAIN: bra AGAIN;"); }
"""


def _variant(text, name, **pieces):
    for piece, code in {"NAME": name, **pieces}.items():
        text = text.replace(piece, code)
    return text


@functools.cache
def module():
    empty, full = "if (s >= 2) wait(&empty[s % 2], (s / 2 - 1) & 1)", "arrive(&full[s % 2])"
    copied = 'ASM("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory"); ' + full
    kernels = [
        _variant(REDUCE, "reduce", SYNC="__syncthreads()"),
        _variant(REDUCE, "reduce_without_barriers", SYNC=""),
        _variant(PIPELINE, "pipeline", EMPTY=empty, FULL=copied),
        _variant(PIPELINE, "pipeline_early", EMPTY=empty, FULL=full),
        _variant(PIPELINE, "pipeline_overwrites", EMPTY="", FULL=copied),
        DIVERGENT,
        FAULTY,
    ]
    return ptxrun.Module(ptxrun_builds.nvcc_ptx(HEAD + "".join(kernels)))


def launch(name, grid, block, *args, **options):
    return module().launch(name, grid, block, args, **options)


@pytest.mark.parametrize("seed", range(3))
def test_a_reduction(seed):
    x, out = np.arange(3001, dtype=np.float32) % 17, np.zeros(3, np.float32)
    result = launch("reduce", 3, 256, x, out, 3001, seed=seed)
    assert out.sum() == x.sum()
    assert result.total("bytes", "ld_global") == 4 * 3001
    assert result.total("count", "barrier") > 0


def test_a_race_in_shared_memory():
    x, out = np.ones(256, np.float32), np.zeros(1, np.float32)
    with pytest.raises(ptxrun.Races, match=r"race.*not ordered after"):
        launch("reduce_without_barriers", 1, 256, x, out, 256, uninit_shared=False)


def test_a_race_between_ctas():
    with pytest.raises(ptxrun.Races, match="global race"):
        launch("same_byte", 2, 32, np.zeros(63, np.int32))


def test_invalid_accesses_of_global_memory():
    x, y = np.zeros((2, 64), np.float32).copy()
    x, y = x.copy(), y.copy()
    with pytest.raises(ptxrun.PtxError, match=r"out of all regions.*offset 256") as error:
        launch("beyond", 1, 32, x, y)
    assert "thread 31" in str(error.value)
    assert "PTX line" in str(error.value)
    with pytest.raises(ptxrun.PtxError, match="writes read-only region"):
        launch("shared", 1, 32, y, 0, 0, readonly=[y])
    with pytest.raises(ptxrun.PtxError, match="misaligned"):
        launch("misaligned", 1, 1, y)


def test_unwritten_shared_memory_and_bounds():
    y = np.zeros(32, np.float32)
    launch("shared", 1, 32, y, 32, 32)
    with pytest.raises(ptxrun.PtxError, match="never written"):
        launch("shared", 1, 32, y, 0, 1)
    with pytest.raises(ptxrun.PtxError, match="outside of"):
        launch("shared", 1, 32, y, 33, 0)


def test_kernels_that_do_not_end():
    y = np.zeros(64, np.float32)
    with pytest.raises(ptxrun.PtxError, match="deadlock"):
        launch("alone", 1, 64, y)
    with pytest.raises(ptxrun.PtxError, match="endless"):
        launch("endless", 1, 32, limit=100_000)


def _divergent(v, x):
    r = 0
    while v > 0:
        r += 3 if v & 1 else -x[v % 32] if v % 5 == 1 else 1
        v >>= 1
        if r > 12:
            return -r
    return r


def test_divergent_lanes():
    x = np.random.default_rng(0).integers(0, 100_000, 32).astype(np.int32)
    y = np.zeros(32, np.int32)
    launch("divergent", 1, 32, y, x)
    np.testing.assert_array_equal(y, [_divergent(v, x.tolist()) for v in x.tolist()])


@pytest.mark.parametrize("seed", range(4))
def test_a_pipeline(seed):
    x = np.random.default_rng(seed).integers(-9, 9, (5, 32, 4)).astype(np.float32)
    y = np.zeros(32, np.float32)
    launch("pipeline", 1, 64, x, y, 5, seed=seed)
    np.testing.assert_array_equal(y, x.sum((0, 2))[::-1])


def test_copies_that_are_not_awaited():
    x, y = np.zeros((5, 32, 4), np.float32), np.zeros(32, np.float32)
    with pytest.raises(ptxrun.Races, match=r"cp\.async"):
        launch("pipeline_early", 1, 64, x, y, 5, uninit_shared=False)


def test_a_buffer_that_is_overwritten_while_it_is_read():
    x, y = np.zeros((5, 32, 4), np.float32), np.zeros(32, np.float32)

    def some_schedule():
        for seed in range(5):
            launch("pipeline_overwrites", 1, 64, x, y, 5, seed=seed)

    with pytest.raises(ptxrun.PtxError):
        some_schedule()
