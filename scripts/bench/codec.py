"""Speed of the codec beside a plain copy of as many bytes.

Every operation is timed in turn with a copy that moves as many bytes (read plus written), so that both see
the same machine: `ratio_to_copy` 0.1 means that rows are processed at a tenth of the speed of a copy. encode
and decode turn values to rows and back; store and gather do so into and out of scattered rows of a pool. On a
GPU the inputs rotate through more memory than its L2 cache holds; on a CPU one thread is measured.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from scripts.bench.device import seconds
from scripts.bench.measurements import what
from scripts.bench.sweep import Benchmark, verdict
from sgl_kvpool import MLAKVCacheLayout, RowFormat
from sgl_kvpool.codec import decode_rows, encode_rows, gather_rows, store_rows
from sgl_kvpool.commands.doctor.probes import machine
from sgl_kvpool.layout import Encoding

RANK, ROPE = 512, 64
OPERATIONS = ("encode", "decode", "store", "gather")

#: Least share of a copy's speed, by the encoding of latent values and the operation. Encoding is bound by
#: arithmetic, whose speed depends on the width of vectors; FP4 encoding tries five scales for each block.
CPU_TARGETS = {
    (Encoding.E2M1, "gather"): 0.35,
    (Encoding.E4M3, "gather"): 0.35,
    (Encoding.E2M1, "encode"): 0.10 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 0.04,
}
GPU_TARGET, GPU_TARGETS = 0.80, {(Encoding.E2M1, "encode"): 0.40, (Encoding.E2M1, "store"): 0.40}

Run = Callable[[int], Any]


def operations(fmt: RowFormat, tokens: int, device: str, sets: int) -> dict[str, Run]:
    """Operations as functions of a round number; round i works on input set i modulo `sets`."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(tokens, RANK + ROPE, generator=generator).to(torch.bfloat16)
    inputs = [values.to(device).clone() for _ in range(sets)]
    nope = [x[:, :RANK] for x in inputs]
    rope = [x[:, RANK:] for x in inputs]
    rows = encode_rows(nope[0], rope[0], fmt)
    # One pool; each set owns every `sets`-th row, in random order.
    pool = rows.repeat_interleave(sets, dim=0)
    order = torch.randperm(tokens, generator=generator) * sets
    slots = [(order + i).to(device) for i in range(sets)]
    dense = [rows.clone() for _ in range(sets)]
    out = [torch.empty_like(inputs[0]) for _ in range(sets)]
    return {
        "encode": lambda i: encode_rows(nope[i % sets], rope[i % sets], fmt),
        "decode": lambda i: decode_rows(dense[i % sets], fmt),
        "store": lambda i: store_rows(pool, slots[i % sets], nope[i % sets], rope[i % sets], fmt),
        "gather": lambda i: gather_rows(pool, slots[i % sets], fmt, out=out[i % sets]),
    }


def copy_of(size: int, device: str, sets: int) -> Run:
    """A copy that reads and writes `size` bytes in total."""
    source = [torch.ones(size // 2, dtype=torch.uint8, device=device) for _ in range(sets)]
    target = [torch.empty_like(x) for x in source]
    return lambda i: target[i % sets].copy_(source[i % sets])


class Codec(Benchmark):
    """Every operation in every layout."""

    schema = 2

    def start(self) -> dict[str, Any]:
        torch.set_num_threads(1)
        return machine()

    def cases(self, machine: dict[str, Any]) -> list[dict[str, Any]]:
        sizes = [65536, 262144] if self.on_gpu else [65536]
        if self.quick:
            sizes = sizes[:1] if self.on_gpu else [16384]
        return [
            {"layout": layout.value, "operation": operation, "tokens": tokens}
            for tokens in sizes
            for layout in MLAKVCacheLayout
            for operation in OPERATIONS
        ]

    def measure(self, case: dict[str, Any]) -> dict[str, Any]:
        layout, tokens = MLAKVCacheLayout(case["layout"]), case["tokens"]
        device, fmt = "cuda" if self.on_gpu else "cpu", layout.row_format(RANK, ROPE)
        size = tokens * (fmt.row_bytes + 2 * fmt.head_dim)  # a row on one side, bf16 on the other
        sets = 2 + 4 * torch.cuda.get_device_properties(0).L2_cache_size // size if self.on_gpu else 1
        runs, copy = self.kept(
            (layout, tokens),
            lambda: (operations(fmt, tokens, device, sets), copy_of(size, device, sets)),
        )
        run = runs[case["operation"]]
        for i in range(2):  # compile, fill tables, touch pages
            run(i), copy(i)
        rounds = 50 if self.on_gpu else 3 if self.quick else 7
        pairs = [(seconds(partial(copy, i), device), seconds(partial(run, i), device)) for i in range(rounds)]
        copy_s, run_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        found = {
            "gb_per_s": round(size / run_s / 1e9, 3),
            "copy_gb_per_s": round(size / copy_s / 1e9, 3),
            "ratio_to_copy": round(copy_s / run_s, 4),
        }
        key = (layout.latent.values, case["operation"])
        target = GPU_TARGETS.get(key, GPU_TARGET) if self.on_gpu else CPU_TARGETS.get(key)
        return found if target is None else {**found, "target": target}

    def targets(self, rows: Sequence[dict[str, Any]], machine: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            verdict(what(row["job"]), f"at least {row['target']} of a copy", ratio, ratio >= row["target"])
            for row in rows
            if "target" in row
            for ratio in [row["ratio_to_copy"]]
        ]
