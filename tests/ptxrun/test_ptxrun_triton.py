"""Kernels of Triton on ptxrun against float64: wgmma and mma.sync, pipelines of copies."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


def test_a_sum(runs):
    x, y = torch.randn(2, 1000)
    out = torch.zeros(1000)
    add_kernel[(4,)](x, y, out, 1000, BLOCK=256)
    assert torch.equal(out, x + y)
    assert runs.last.total("bytes", "ld_global") == 2 * 4 * 1000


@triton.jit
def softmax_kernel(x, out, columns, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + at, mask=at < columns, other=float("-inf"))
    e = tl.exp(v - tl.max(v, 0))
    tl.store(out + row * columns + at, e / tl.sum(e, 0), mask=at < columns)


@pytest.mark.parametrize("approx", [0, 1])
def test_softmax(runs, approx):
    x = torch.randn(5, 777)
    out = torch.zeros_like(x)
    with runs.using(approx=approx):
        softmax_kernel[(5,)](x, out, 777, BLOCK=1024)
    torch.testing.assert_close(out.double(), x.double().softmax(-1), rtol=2e-6, atol=1e-8)


@triton.jit
def matmul_kernel(
    a, b, c, M, N, K, am, ak, bk, bn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    m, n, k = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    total = tl.zeros([BM, BN], tl.float32)
    for first in range(0, K, BK):
        inside = first + k < K
        x = tl.load(a + m[:, None] * am + (first + k)[None, :] * ak, mask=inside[None, :], other=0.0)
        y = tl.load(b + (first + k)[:, None] * bk + n[None, :] * bn, mask=inside[:, None], other=0.0)
        total = tl.dot(x, y, total)
    tl.store(c + m[:, None] * N + n[None, :], total, mask=(m[:, None] < M) & (n[None, :] < N))


#: dtype, rows, columns and depth of a tile, warps, stages, transposed a, transposed b. Tiles of at least 64
#: rows use wgmma, smaller ones mma.sync.
MATMULS = [
    (torch.bfloat16, 128, 128, 64, 8, 3, 0, 0),
    (torch.float16, 64, 32, 32, 4, 3, 0, 1),
    (torch.bfloat16, 64, 64, 16, 4, 2, 0, 1),
    (torch.bfloat16, 64, 64, 64, 4, 3, 1, 0),
    (torch.bfloat16, 32, 32, 32, 4, 3, 0, 0),
]


@pytest.mark.parametrize("case", MATMULS, ids=lambda c: "-".join(map(str, c)).replace("torch.", ""))
def test_products(runs, case):
    dtype, rows, columns, depth, warps, stages, transposed_a, transposed_b = case
    sizes = M, N, K = 2 * rows, columns, 5 * depth
    a, b = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype)
    x = a.t().contiguous().t() if transposed_a else a
    y = b.t().contiguous().t() if transposed_b else b
    for seed in range(2):
        c = torch.zeros(M, N)
        with runs.using(seed=seed):
            matmul_kernel[(2,)](
                x, y, c, *sizes, *x.stride(), *y.stride(), BM=rows, BN=columns, BK=depth,
                num_warps=warps, num_stages=stages,
            )  # fmt: skip
        assert runs.last.total("units", "wgmma" if rows >= 64 else "mma") == 2 * M * N * K
        torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)
