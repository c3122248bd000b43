"""Time of one decode layer on the CPU by the size of its pool.

    python -m scripts.bench host_attention [--quick] [--check] [--json PATH]

The time of attention over stored rows must be proportional to the rows of a batch, not to the pool. So the
same number of rows is attended in a small pool and in one 100 times larger, alternating in one run. For
comparison, the whole layer is dequantised with our codec, as SGLang's FP4 pool does in every attention call.
`--check` fails if the large pool takes more than 1.5 times as long as the small pool.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from scripts.kit.outputs import require_writable
from scripts.kit.timing import seconds
from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.attention.cpu import Request, RowReader
from sgl_kvpool.codec import decode_rows, encode_rows

SCHEMA = 1
#: Size of the large pool divided by that of the small pool.
FACTOR = 100
LIMIT = 1.5


def make_pool(fmt, slots: int) -> torch.Tensor:
    """1024 rows of random values, repeated to fill the pool."""
    generator = torch.Generator().manual_seed(0)
    nope = torch.randn(1024, fmt.kv_lora_rank, generator=generator).bfloat16()
    rope = torch.randn(1024, fmt.qk_rope_head_dim, generator=generator).bfloat16()
    rows = encode_rows(nope, rope, fmt)
    return rows.repeat(-(-slots // 1024), 1)[:slots].contiguous()


def measure(layout: MLAKVCacheLayout, *, slots: int, requests: int, context: int, rounds: int):
    """Median time of one layer over a small and over a large pool, microseconds."""
    fmt = layout.row_format(512, 64)
    small, large = make_pool(fmt, slots), make_pool(fmt, slots * FACTOR)
    reader = RowReader(fmt)
    batch = [Request(i, 1, context - 1, i * context, context) for i in range(requests)]
    plan = reader.plan(batch)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randperm(slots, generator=generator)[: requests * context]
    # The same number of rows, spread over the whole large pool.
    spread = rows * FACTOR
    q = torch.randn(requests, 16, 576)

    def decode(pool, ids):
        return reader.attend(q, pool, ids, plan, 0.04)

    times: dict[str, list[float]] = {"small": [], "large": []}
    for _ in range(rounds):
        times["small"].append(1e6 * seconds(lambda: decode(small, rows)))
        times["large"].append(1e6 * seconds(lambda: decode(large, spread)))
    whole = 1e6 * seconds(lambda: decode_rows(large, fmt))
    small_us, large_us = statistics.median(times["small"]), statistics.median(times["large"])
    return {
        "layout": layout.value,
        "requests": requests,
        "context_tokens": context,
        "pool_slots": [slots, slots * FACTOR],
        "small_us": round(small_us, 1),
        "large_us": round(large_us, 1),
        "large_over_small": round(large_us / small_us, 3),
        "decode_whole_large_pool_us": round(whole, 1),
        "whole_over_rows": round(whole / large_us, 1),
    }


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Measure, print, write; returns the exit status."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller pools, fewer rounds")
    parser.add_argument("--check", action="store_true", help=f"exit 1 above a ratio of {LIMIT}")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args(argv)
    require_writable(parser, arguments.json)
    size = {"slots": 2048, "requests": 4, "context": 256, "rounds": 9}
    if not arguments.quick:
        size = {"slots": 8192, "requests": 8, "context": 1024, "rounds": 15}

    results = []
    print(f"{'layout':16} {'small pool':>12} {'100x pool':>12} {'ratio':>6} {'whole pool':>12}")
    for layout in MLAKVCacheLayout:
        row = measure(layout, **size)
        results.append(row)
        print(
            f"{row['layout']:16} {row['small_us']:9.0f} us {row['large_us']:9.0f} us "
            f"{row['large_over_small']:6.2f} {row['decode_whole_large_pool_us']:9.0f} us",
            flush=True,
        )
    if arguments.json:
        report = {
            "schema": SCHEMA,
            "script": "scripts/bench/host_attention.py",
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "limit_large_over_small": LIMIT,
            "results": results,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    missed = [r["layout"] for r in results if r["large_over_small"] > LIMIT]
    if arguments.check and missed:
        print(f"ratio above {LIMIT}: {', '.join(missed)}")
        return 1
    return 0
