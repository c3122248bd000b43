"""ptxrun's wgmma: operands laid out by hand in every swizzle and both orders; its hazards."""

import functools

import numpy as np
import ptxrun
import ptxrun_builds
import pytest
import torch

pytestmark = pytest.mark.skipif(ptxrun_builds.nvcc() is None, reason="needs nvcc")

#: One product of 64 rows, 8 columns and 16 values; both operands lie in `image`.
KERNEL = """
#include <cstdint>
__device__ uint32_t sh(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
template <int kTransposed>
__device__ void multiply(const uint4* image, float* d, uint64_t da, uint64_t db, int bytes) {
  extern __shared__ __align__(1024) uint4 s[];
  for (int i = threadIdx.x; i < bytes / 16; i += 128) s[i] = image[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  uint64_t at = sh(s) >> 4;
  float c[4] = {};
  asm volatile("wgmma.fence.sync.aligned;");
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3}, %4, %5, 1, 1, 1, %6, 0;"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "l"(da + at), "l"(db + at), "n"(kTransposed));
  asm volatile("wgmma.commit_group.sync.aligned;");
  asm volatile("wgmma.wait_group.sync.aligned 0;" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]));
  int w = threadIdx.x / 32, l = threadIdx.x % 32;
  for (int i = 0; i < 4; i++) d[(16 * w + l / 4 + 8 * (i / 2)) * 8 + 2 * (l % 4) + i % 2] = c[i];
}
extern "C" __global__ void k_major(const uint4* image, float* d, uint64_t da, uint64_t db, int bytes) {
  multiply<0>(image, d, da, db, bytes);
}
extern "C" __global__ void mn_major(const uint4* image, float* d, uint64_t da, uint64_t db, int bytes) {
  multiply<1>(image, d, da, db, bytes);
}
"""
FENCE, WAIT = "fence.proxy.async.shared::cta;", "wgmma.wait_group.sync.aligned 0;"
#: Width in bytes of a row of the swizzle's pattern (16: none) and its code in a descriptor.
SWIZZLES = {16: 0, 32: 3, 64: 2, 128: 1}


#: Stores to the operands after the issue.
OVERWRITES = (
    'asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(sh(s + threadIdx.x)), "r"(0) : "memory");'
)
COMMIT = 'asm volatile("wgmma.commit_group.sync.aligned;");'


@functools.cache
def module(without="", before="", after_commit=""):
    """The kernels without an instruction, or with it moved before another one, or with more code."""
    text = ptxrun_builds.nvcc_ptx(KERNEL.replace(COMMIT, COMMIT + after_commit))
    assert without in text
    assert before in text
    text = text.replace(without, "") if without else text
    return ptxrun.Module(text.replace(before, f"{without}\n{before}") if before else text)


def laid_out(x, width, mn_major, first):
    """(image, descriptor) of x [mn, 16], uint16, from byte `first` on."""
    image, chunks = np.zeros(8192, np.uint16), width // 16
    rows = len(x)
    if mn_major:
        lead, stride = (128, 256) if width == 16 else (16 * width, 8 * width)
    else:
        lead, stride = (16 * rows, 128) if width == 16 else (16, 8 * width)
    for i in range(rows):
        for k in range(16):
            if not mn_major:
                place = i % 8 * width + i // 8 * stride + k // 8 * lead + k % 8 * 2
            elif width == 16:
                place = k % 8 * width + i % 8 * 2 + i // 8 * stride + k // 8 * lead
            else:
                place = k % 8 * width + i % 8 * 2 + i // 8 % chunks * 16
                place += i // 8 // chunks * lead + k // 8 * stride
            place += first
            place ^= (place >> 7 & (chunks - 1)) << 4
            image[place // 2] = x[i, k]
    return image, first >> 4 | lead >> 4 << 16 | stride >> 4 << 32 | SWIZZLES[width] << 62


def product(width, mn_major, *, without="", before="", after_commit="", base_offset=0, seed=0):
    a, b = torch.randn(64, 16).bfloat16(), torch.randn(8, 16).bfloat16()
    bits = [x.view(torch.int16).numpy().view(np.uint16) for x in (a, b)]
    image_a, of_a = laid_out(bits[0], width, mn_major, 0)
    image_b, of_b = laid_out(bits[1], 16, False, 8192)
    image, found = image_a | image_b, np.full((64, 8), np.nan, np.float32)
    arguments = [image, found, of_a | base_offset << 49, of_b | base_offset << 49, image.nbytes]
    if width != 16:
        arguments[3] = of_b  # the base offset of A alone
    name = "mn_major" if mn_major else "k_major"
    module(without, before, after_commit).launch(name, 1, 128, arguments, image.nbytes, seed=seed)
    np.testing.assert_allclose(found, (a.double() @ b.double().T).numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize("width", SWIZZLES)
def test_swizzles_and_orders(width, mn_major):
    product(width, mn_major)


def test_base_offsets():
    """Ignored without a swizzle (Triton sets one for m64n8), refused with swizzles of 32 and 64 bytes."""
    product(16, False, base_offset=3)
    for width in (32, 64):
        with pytest.raises(ptxrun.PtxError, match="base offset"):
            product(width, False, base_offset=1)


def test_a_missing_proxy_fence():
    with pytest.raises(ptxrun.Races, match=r"fence\.proxy\.async"):
        product(128, False, without=FENCE)


@pytest.mark.parametrize("seed", [0, 24, 26, 111])  # all four warps read late with the last three
def test_a_proxy_fence_after_the_issue(seed):
    """Also if the operands are read as late as the wait, which depends on the seed."""
    with pytest.raises(ptxrun.Races, match=r"fence\.proxy\.async"):
        product(128, False, without=FENCE, before=WAIT, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_operands_that_are_overwritten_in_flight(seed):
    """Also if the product reads them before the store."""
    with pytest.raises(ptxrun.Races, match=r"not ordered after the|fence\.proxy\.async"):
        product(128, False, after_commit=OVERWRITES, seed=seed)


def test_results_in_flight():
    with pytest.raises(ptxrun.PtxError, match="in flight"):
        product(128, False, without=WAIT)
