"""Rates of the engines that transfer pages between a pool and a host tier.

On a GPU: engines staged, copy_engine and kernel beside SGLang's backends, as ratios to a pinned copy in the
same run; see transfer_gpu.py. On a CPU, for each layout and arrangement of the pool: the rate of the `cpu`
engine to and from a page-major host tier, as a ratio to torch's contiguous copy of as many bytes in the same
run, which is the limit. The target is 70 % of it, except for `token_major`, whose rows move one by one.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from scripts.bench import transfer_gpu
from scripts.bench.device import seconds
from scripts.bench.measurements import what
from scripts.bench.sweep import Benchmark, verdict
from scripts.bench.transfer_gpu import LAYERS, PAGE_SIZE, caches
from sgl_kvpool import KVArrangement, MLAKVCacheLayout
from sgl_kvpool.commands.doctor.probes import machine
from sgl_kvpool.transfer.conversion import narrower_layouts
from sgl_kvpool.transfer.cpu_engine import CpuEngine
from sgl_kvpool.transfer.plan import TransferPlan
from sgl_kvpool.transfer.slots import Transfer

#: Bytes of a pool, and number of rounds.
FULL, QUICK = (1 << 30, 24), (200 << 20, 4)
#: Least share of a contiguous copy's speed.
TARGET = 0.7
DIRECTIONS = ("to_host", "to_device")


def measure_engine(
    layout: MLAKVCacheLayout, arrangement: KVArrangement, pool_bytes: int, rounds: int
) -> dict[str, Any]:
    """Rates of the `cpu` engine in both directions beside a contiguous copy, in alternation.

    Every round uses another quarter of the pages and of the contiguous buffers, so that no round finds its
    bytes in a cache.
    """
    page_bytes = PAGE_SIZE * layout.row_format(512, 64).row_bytes
    moved = max(1, pool_bytes // 4 // (LAYERS * page_bytes))
    pages = 4 * moved
    device, host = (caches(a, pages, page_bytes) for a in (arrangement, KVArrangement.PAGE_MAJOR))
    plans = {"to_host": TransferPlan(device, host, "kv"), "to_device": TransferPlan(host, device, "kv")}
    engines = {name: CpuEngine(plan) for name, plan in plans.items()}
    generator = np.random.default_rng(0)
    lists = [generator.permutation(pages).reshape(4, moved) for _ in range(2)]
    source = torch.ones(4, moved * LAYERS * page_bytes, dtype=torch.int8)
    target = torch.ones_like(source)

    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        mine, other = number % 4, (number + 2) % 4
        on_device, on_host = lists[0][mine], lists[1][other]
        calls: dict[str, Callable[[], object]] = {"copy": partial(target[other].copy_, source[mine])}
        for name in plans:
            transfer = Transfer(on_host, on_device, to_host=name == "to_host")
            calls[name] = partial(engines[name].copy, transfer)
        for name, call in calls.items():
            took = seconds(call)
            if number:  # the first round is a warm-up and does not count
                times.setdefault(name, []).append(took)

    def ratio(name: str) -> float:
        """Median over rounds of the rate divided by the copy's rate."""
        return round(statistics.median(p / t for p, t in zip(times["copy"], times[name], strict=True)), 3)

    return {
        "run_bytes": min(run.run_bytes for run in plans["to_host"].copy_runs),
        "pages": moved,
        "moved_bytes": source[0].nbytes,
        "copy_gb_per_s": round(source[0].nbytes / statistics.median(times["copy"]) / 1e9, 2),
        **{f"{name}_of_copy": ratio(name) for name in engines},
    }


class Transfers(Benchmark):
    """Every layout and arrangement, on a GPU also every pair of layouts."""

    schema = 7
    #: The first transfer, and SGLang's, compile.
    case_limit_s = 240.0

    def start(self) -> dict[str, Any]:
        if self.on_gpu:
            self._gpu = transfer_gpu.GpuTransfers(transfer_gpu.Gpu(), self.kept, quick=self.quick)
        return machine()

    def cases(self, machine: dict[str, Any]) -> list[dict[str, Any]]:
        shapes = [
            {"layout": layout.value, "arrangement": each.value}
            for layout in MLAKVCacheLayout
            for each in KVArrangement.of_rows()
        ]
        if not self.on_gpu:
            return shapes
        conversions = [
            {"layout": layout.value, "host_layout": host.value}
            for layout in MLAKVCacheLayout
            for host in narrower_layouts(layout.row_format(512, 64))
        ]
        return transfer_gpu.cases([*shapes, *conversions], quick=self.quick)

    def measure(self, case: dict[str, Any]) -> dict[str, Any]:
        if self.on_gpu:
            return self._gpu.measure(case)
        layout = MLAKVCacheLayout(case["layout"])
        pool_bytes, rounds = QUICK if self.quick else FULL
        return measure_engine(layout, KVArrangement(case["arrangement"]), pool_bytes, rounds)

    def targets(self, rows: Sequence[dict[str, Any]], machine: dict[str, Any]) -> list[dict[str, Any]]:
        if self.on_gpu:
            return transfer_gpu.targets(rows)
        return [
            verdict(what(row["job"]), f"{name} at least {TARGET} of a copy", rate, rate >= TARGET)
            for row in rows
            if row["job"]["arrangement"] != KVArrangement.TOKEN_MAJOR
            for name in DIRECTIONS
            if (rate := row.get(f"{name}_of_copy")) is not None
        ]
