"""Decode on the CPU costs time for the rows referred to, not for the pool."""

import statistics
import time

import pytest
import torch

from sgl_kvpool.attention.decode import mla_decode
from sgl_kvpool.codec import encode_rows
from sgl_kvpool.layout import MLAKVCacheLayout

REQUESTS, CONTEXT, SLOTS, FACTOR = 4, 256, 2048, 100
#: Other work on the machine raises a ratio for as long as it lasts; a cost in proportion to the pool shows in
#: every run.
RUNS = 3


def seconds(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@pytest.mark.parametrize("layout", list(MLAKVCacheLayout), ids=str)
def test_a_pool_100_times_larger_costs_the_same(layout):
    """A cost in proportion to the pool would show as a ratio near 100."""
    fmt = layout.row_format(512, 64)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(SLOTS, 576, generator=generator).bfloat16()
    small = encode_rows(values[:, :512], values[:, 512:], fmt)
    large = small.repeat(FACTOR, 1)
    ids = torch.randperm(SLOTS, generator=generator)[: REQUESTS * CONTEXT].view(REQUESTS, CONTEXT)
    lens = torch.full((REQUESTS,), CONTEXT)
    q = torch.randn(REQUESTS, 16, 576, generator=generator)
    seen = []
    for _ in range(RUNS):
        times = [
            # The same number of rows, spread over the whole large pool.
            [
                seconds(lambda: mla_decode(q, small, ids, lens, fmt, 0.04)),
                seconds(lambda: mla_decode(q, large, ids * FACTOR, lens, fmt, 0.04)),
            ]
            for _ in range(9)
        ]
        of_small, of_large = (statistics.median(column) for column in zip(*times, strict=True))
        seen.append(of_large / of_small)
        if min(seen) < 5:
            return
    pytest.fail(f"time with the large pool over that with the small one in {RUNS} runs: {seen}")
