"""Speed of decode over rows on a CPU: the compiled attention beside torch's, in one run.

Every case attends some contexts beyond the caches, one query each, and is timed in turn with its peers: the
torch path of `mla_decode`, in which rows are decoded to float32 (`torch`); and over rows that are decoded
already and lie one after the other, torch.matmul on float32, the two products alone without softmax
(`matmul`), and scaled_dot_product_attention, with which SGLang's torch_native attends (`sdpa`). Times are CPU
time and time by the clock. float32 queries show what a CPU without bfloat16 products does;
ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 shows AVX2.

Two threads are timed in turn with one, and beside them what the machine allows: sums of the stored rows in
the order of the lists (`read`), and products of matrices that fit a cache (`multiply`).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from scripts.bench.measurements import what
from scripts.bench.sweep import Benchmark, verdict
from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.attention import cpu
from sgl_kvpool.attention.decode import mla_decode
from sgl_kvpool.codec import decode_rows, encode_rows
from sgl_kvpool.commands.doctor.probes import machine

RANK, ROPE, SCALE = 512, 64, 0.04
#: Least ratio of CPU times to the torch path, for packed rows and for bf16 rows, and to torch.matmul on
#: float32; with bfloat16 products and without.
_LEAST = {"bfloat16": (4.0, 2.5, 1.2), "float32": (2.5, 1.6, 0.8)}
_LEAST_OF_BF16, _LEAST_OF_ONE_THREAD = 0.9, 1.8


def in_turn(
    calls: dict[str, Callable[[], Any]], rounds: int, threads: Sequence[int], other: torch.Tensor
) -> dict[tuple[str, int], tuple[float, float]]:
    """Median microseconds of CPU time and by the clock of each call with each number of threads.

    Before each call `other` is read: beyond the caches, it leaves there neither rows nor, as a product does,
    changed lines that the next call would have to write back.
    """
    found: dict[tuple[str, int], list[tuple[float, float]]]
    found = {(name, number): [] for number in threads for name in calls}
    for turn in range(rounds + 1):
        for (name, number), times in found.items():
            torch.set_num_threads(number)
            other.sum()
            began = time.process_time(), time.perf_counter()
            calls[name]()
            if turn:  # not the first call, which allocates
                times.append((time.process_time() - began[0], time.perf_counter() - began[1]))
    return {
        key: tuple(1e6 * statistics.median(column) for column in zip(*times, strict=True))
        for key, times in found.items()
    }


class CpuAttention(Benchmark):
    """Every layout, with 16 heads and one, on two threads, and with 16 heads on one."""

    schema = 2
    devices = ("cpu",)
    case_limit_s = 300.0

    def start(self) -> dict[str, Any]:
        cpu.module(required=True)
        return {**machine(), "torch": torch.__version__, "instructions": cpu.capability()}

    def cases(self, machine: dict[str, Any]) -> list[dict[str, Any]]:
        size = {"lists": 2, "context": 2048} if self.quick else {"lists": 4, "context": 16384}
        shapes = [(16, 1, "bfloat16"), (16, 1, "float32"), (16, 2, "bfloat16"), (1, 2, "bfloat16")]
        return [
            {"layout": layout.value, "heads": heads, "threads": threads, "queries": queries, **size}
            for heads, threads, queries in shapes
            for layout in MLAKVCacheLayout
        ]  # fmt: skip

    def measure(self, case: dict[str, Any]) -> dict[str, Any]:
        lists, context, heads = case["lists"], case["context"], case["heads"]
        fmt = MLAKVCacheLayout(case["layout"]).row_format(RANK, ROPE)
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(lists * context, RANK + ROPE, generator=generator).bfloat16()
        pool = encode_rows(values[:, :RANK], values[:, RANK:], fmt)
        order = torch.randperm(len(pool), generator=generator).view(lists, context)
        q = torch.randn(lists, heads, RANK + ROPE, generator=generator).to(getattr(torch, case["queries"]))
        lens = torch.full((lists,), context)
        exact = decode_rows(pool, fmt, torch.float32).view(lists, context, -1)
        rounded = exact.bfloat16()

        def ours() -> torch.Tensor:
            return mla_decode(q, pool, order, lens, fmt, SCALE)[0]

        def in_torch() -> torch.Tensor:
            with mock.patch.object(cpu, "module", return_value=None):
                return ours()

        def products() -> torch.Tensor:
            return torch.matmul(torch.matmul(q.float(), exact.mT), exact[..., :RANK])

        def sdpa() -> torch.Tensor:
            keys, attend = rounded[:, None], torch.nn.functional.scaled_dot_product_attention
            queries = q.bfloat16()[:, :, None]
            return attend(queries, keys, keys[..., :RANK], scale=SCALE, enable_gqa=True)

        def read() -> torch.Tensor:
            return torch.nn.functional.embedding_bag(order, pool.view(torch.float32), mode="sum")

        square = torch.rand(512, 512)
        calls = {"kvpool": ours, "matmul": products}
        if case["threads"] == 1:
            calls["torch"] = in_torch
        else:
            calls |= {"read": read, "multiply": lambda: square @ square}
        before, several = torch.get_num_threads(), case["threads"]
        try:
            times = in_turn(calls, 3 if self.quick else 15, range(1, several + 1), exact)
            if (case["layout"], heads, several, case["queries"]) == ("bf16", 16, 1, "bfloat16"):
                times |= in_turn({"sdpa": sdpa}, 1, [1], exact)  # takes seconds, and is the same for all
        finally:
            torch.set_num_threads(before)
        took = {name: one for (name, number), one in times.items() if number == several}
        ratios = {
            name: round(one[0] / took["kvpool"][0], 2) for name, one in took.items() if name != "kvpool"
        }
        of_one = {name: round(times[name, 1][1] / one[1], 2) for name, one in took.items()}
        return {
            "million_rows_per_s": round(len(pool) / took["kvpool"][1], 3),
            "cpu_us": {name: round(one[0], 1) for name, one in took.items()},
            "clock_us": {name: round(one[1], 1) for name, one in took.items()},
            **({"times_as_fast_as": ratios} if several == 1 else {"times_as_fast_as_one_thread": of_one}),
        }

    def targets(self, rows: Sequence[dict[str, Any]], machine: dict[str, Any]) -> list[dict[str, Any]]:
        measured = {
            (job["layout"], job["heads"], job["threads"], job["queries"]): row
            for row in rows
            if row["status"] == "measured"
            for job in [row["job"]]
        }
        has_products = machine["instructions"].endswith("BF16")
        found = []
        for (layout, heads, threads, queries), row in measured.items():
            name = what(row["job"])

            def at_least(least: float, of: str, ratio: float, note: str = "", name: str = name) -> None:
                found.append(verdict(name, f"at least {least} times {of}", ratio, ratio >= least, note))

            plain = measured.get(("bf16", heads, threads, queries))
            if (heads, threads) == (16, 1):
                packed, bf16, matmul = _LEAST[queries if has_products else "float32"]
                ratios = row["times_as_fast_as"]
                at_least(bf16 if layout == "bf16" else packed, "torch", ratios["torch"])
                at_least(matmul, "torch.matmul", ratios["matmul"])
            if layout in ("fp4", "fp8_block_scale") and plain and (heads, threads) in ((16, 1), (1, 2)):
                least = _LEAST_OF_BF16 if heads == 16 else 1.0
                at_least(least, "bf16", plain["clock_us"]["kvpool"] / row["clock_us"]["kvpool"])
            if threads == 2:
                ours, *others = row["times_as_fast_as_one_thread"].items()
                note = ", ".join(f"{peer} {ratio}" for peer, ratio in others)
                at_least(_LEAST_OF_ONE_THREAD, "one thread", ours[1], note)
        return found
