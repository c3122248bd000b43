"""Faults that no change in `test_ptx_mutants` or `test_ptx_gluon` causes; CUDA kernels, in one module."""

import functools

import numpy as np
import ptxrun
import ptxrun_builds
import pytest

pytestmark = pytest.mark.skipif(ptxrun_builds.nvcc() is None, reason="needs nvcc")

FAULTY = """
extern "C" __global__ void misaligned(float* y) { *(float4*)(y + 1 + threadIdx.x) = float4{1, 2, 3, 4}; }
extern "C" __global__ void same_byte(int* x) { x[threadIdx.x + blockIdx.x * 31] = blockIdx.x; }
extern "C" __global__ void shared(float* y, int written, int read) {
  __shared__ float s[64];
  s[threadIdx.x + written] = 1;
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x + read];
}
extern "C" __global__ void alone(float* y) {
  if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;");
  y[threadIdx.x] = 1;
}
extern "C" __global__ void endless() { asm volatile("AGAIN: bra AGAIN;"); }
"""


@functools.cache
def module():
    return ptxrun.Module(ptxrun_builds.nvcc_ptx(FAULTY))


def launch(name, grid, block, *args, **options):
    return module().launch(name, grid, block, args, **options)


def test_a_race_between_ctas():
    with pytest.raises(ptxrun.Races, match="global race"):
        launch("same_byte", 2, 32, np.zeros(63, np.int32))


def test_invalid_accesses_of_global_memory():
    y = np.zeros(64, np.float32)
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
