"""Time of one decode layer on the CPU by the size of its pool.

The time of attention over stored rows must be proportional to the rows of a batch, not to the pool. So the
same number of rows is attended in a small pool and in one 100 times larger, alternating in one run. For
comparison, the whole layer is dequantised with our codec, as SGLang's FP4 pool does in every attention call.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from scripts.bench.measurements import what
from scripts.bench.sweep import Benchmark, verdict
from scripts.kit.timing import seconds
from sgl_kvpool import MLAKVCacheLayout, RowFormat
from sgl_kvpool.attention.cpu import Request, RowReader
from sgl_kvpool.codec import decode_rows, encode_rows
from sgl_kvpool.commands.machine import machine

#: Size of the large pool divided by that of the small pool, and the largest ratio of the times.
FACTOR, LIMIT = 100, 1.5


def make_pool(fmt: RowFormat, slots: int) -> torch.Tensor:
    """1024 rows of random values, repeated to fill the pool."""
    generator = torch.Generator().manual_seed(0)
    nope = torch.randn(1024, fmt.kv_lora_rank, generator=generator).bfloat16()
    rope = torch.randn(1024, fmt.qk_rope_head_dim, generator=generator).bfloat16()
    rows = encode_rows(nope, rope, fmt)
    return rows.repeat(-(-slots // 1024), 1)[:slots].contiguous()


class HostAttention(Benchmark):
    """One layer of every layout."""

    schema = 2
    devices = ("cpu",)

    def start(self) -> dict[str, Any]:
        return machine()

    def cases(self, machine: dict[str, Any]) -> list[dict[str, Any]]:
        slots, requests, context = (2048, 4, 256) if self.quick else (8192, 8, 1024)
        size = {"requests": requests, "context": context, "pool_slots": slots}
        return [{"layout": layout.value, **size} for layout in MLAKVCacheLayout]

    def measure(self, case: dict[str, Any]) -> dict[str, Any]:
        slots, requests, context = case["pool_slots"], case["requests"], case["context"]
        fmt = MLAKVCacheLayout(case["layout"]).row_format(512, 64)
        small, large = make_pool(fmt, slots), make_pool(fmt, slots * FACTOR)
        reader = RowReader(fmt)
        plan = reader.plan([Request(i, 1, context - 1, i * context, context) for i in range(requests)])
        generator = torch.Generator().manual_seed(1)
        rows = torch.randperm(slots, generator=generator)[: requests * context]
        q = torch.randn(requests, 16, 576)
        # The same number of rows, spread over the whole large pool.
        calls = [
            lambda pool=pool, ids=ids: reader.attend(q, pool, ids, plan, 0.04)
            for pool, ids in ((small, rows), (large, rows * FACTOR))
        ]
        times = [[1e6 * seconds(call) for call in calls] for _ in range(9 if self.quick else 15)]
        small_us, large_us = (statistics.median(column) for column in zip(*times, strict=True))
        whole_us = 1e6 * seconds(lambda: decode_rows(large, fmt))
        return {
            "small_us": round(small_us, 1),
            "large_us": round(large_us, 1),
            "large_over_small": round(large_us / small_us, 3),
            "decode_whole_large_pool_us": round(whole_us, 1),
            "whole_over_rows": round(whole_us / large_us, 1),
        }

    def targets(self, rows: Sequence[dict[str, Any]], machine: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            verdict(what(row["job"]), f"the large pool takes at most {LIMIT}x", ratio, ratio <= LIMIT)
            for row in rows
            if (ratio := row.get("large_over_small")) is not None
        ]
