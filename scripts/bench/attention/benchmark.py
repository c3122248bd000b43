"""Decode attention straight from stored rows, beside SGLang, FlashInfer and FlashMLA in the same run.

FlashInfer compiles on first use, and the time limit includes it: run `--quick` once on a fresh machine. A
workload that does not fit into memory is skipped. The workloads of the targets come first. docs/attention.md
has the limit of rows per second that each tile's machine code sets.

`--device cpu` runs tiny workloads through the CPU path of `mla_decode`: a dry run whose times mean nothing
and neither pass nor miss a target.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scripts.bench.attention.cases import (
    CPU_GRID,
    DENSE_PEERS,
    FP4_LAYOUTS,
    GPU_GRID,
    SPARSE_PEERS,
    WHOLE_POOL_PEER,
    Grid,
    Workload,
    cases,
)
from scripts.bench.attention.inputs import RANK, ROPE
from scripts.bench.attention.measure import MeasuredAttention, best_us
from scripts.bench.attention.peers import Runner, runners
from scripts.bench.device import CpuDevice, CudaDevice
from scripts.bench.measurements import OURS, is_ours, what
from scripts.bench.sweep import Row, Skipped, first_line, verdict
from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.layout import SegmentEncoding

#: Our kernel on BF16 rows, among the runners with which ours on other rows is compared.
OURS_ON_BF16 = f"{OURS} bf16"

#: Least speedup over the best BF16 peer, by the encoding of latents.
BEST_PEER_SPEEDUPS = {SegmentEncoding.E2M1_IN_BLOCKS: 1.4, SegmentEncoding.E4M3_IN_TILES: 1.2}
#: Least speedups of FP4, and the largest slowdown with many heads.
WHOLE_POOL_SPEEDUP, SPARSE_SPEEDUP, MANY_HEADS_SLOWDOWN = 10.0, 1.0, 1.3


class Attention(MeasuredAttention):
    """Every workload of a grid, with our kernel in every layout and with the peers."""

    schema = 2
    #: FlashInfer's first call compiles.
    case_limit_s = 240.0
    minutes = 8.0

    def start(self) -> dict[str, Any]:
        self.device = CudaDevice() if self.on_gpu else CpuDevice()
        self.runners = runners()
        self._missing: dict[str, str] = {}
        return self.device.facts()

    def cases(self, machine: dict[str, Any]) -> list[dict[str, Any]]:
        return cases(GPU_GRID if self.on_gpu else CPU_GRID, quick=self.quick)

    def measure(self, case: dict[str, Any]) -> dict[str, Any]:
        row = self.timed(case, self._loaded(case["runner"]))
        row_bytes = MLAKVCacheLayout(case["layout"]).row_format(RANK, ROPE).row_bytes
        return {**row, "row_gb_per_s": round(row["rows_per_s"] * row_bytes / 1e9, 2)}

    def _loaded(self, name: str) -> Runner:
        """A runner whose kernel is loaded, once. Skipped: if it cannot be."""
        runner = self.runners[name]
        if runner.needs_cuda and not self.on_gpu:
            raise Skipped("needs a CUDA device")
        if name not in self._missing:
            try:
                runner.load(self.device)
                self._missing[name] = ""
            except Exception as error:  # peers fail to load in any way; the rows have the reason
                self._missing[name] = f"{type(error).__name__}: {first_line(error)}"
        if self._missing[name]:
            raise Skipped(self._missing[name])
        return runner

    def targets(self, rows: Sequence[dict[str, Any]], machine: dict[str, Any]) -> list[dict[str, Any]]:
        add_ratios(rows)
        return targets(rows, GPU_GRID) if self.on_gpu else []


def _measured(rows: Sequence[Row]) -> Iterator[tuple[Row, Workload]]:
    return ((row, Workload.of(row["job"])) for row in rows if row["status"] == "measured")


def add_ratios(rows: Sequence[Row]) -> None:
    """Add the speedup over each peer to our rows, for the same workload in the same run.

    `times_as_fast_as` has an entry per measured peer and "kvpool bf16", our kernel on BF16 rows.
    `time_to_layer_major` is an arrangement's time divided by the layer-major time of the same rows.
    """
    by_case = {(row["job"]["runner"], row["job"]["layout"], work): row for row, work in _measured(rows)}
    for (runner, layout, work), row in by_case.items():
        if runner != OURS:
            continue
        row["times_as_fast_as"] = {
            other if other != OURS else OURS_ON_BF16: round(best_us(theirs) / best_us(row), 3)
            for (other, its, same), theirs in by_case.items()
            if same == work and (other != OURS or (its == "bf16" and layout != its))
        }
        if work.arrangement != "layer_major":
            base = by_case.get((OURS, layout, replace(work, arrangement="layer_major", layers=1)))
            row["time_to_layer_major"] = round(best_us(row) / best_us(base), 3) if base else None


@dataclass(frozen=True)
class _Target:
    """A least speedup of a layout, which the slowest of some workloads must reach.

    `where`: Sizes of the workloads that are judged.
    `must`: Sizes of which one must have been measured for the target to be met.
    `peers`: The speedup is that over the fastest of these; without the last, the target is not met.
    """

    layout: str
    what: str
    least: float
    where: dict[str, Any]
    must: dict[str, Any]
    peers: Sequence[str]

    def judge(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Verdict from rows with ratios: missed if the ratio to any peer is too low."""
        name, need = f"{self.layout}, {self.what}", f"at least {self.least:.3g}x"
        found = []
        for row, work in _measured(rows):
            plain = {"arrangement": "layer_major", "queries_per_list": 1}
            ours = is_ours(row["job"]) and row["job"]["layout"] == self.layout
            if ours and _fits(work, {**plain, **self.where}):
                ratios = {p: row["times_as_fast_as"][p] for p in self.peers if p in row["times_as_fast_as"]}
                found += [(min(ratios.values()), ratios, work, row)] if ratios else []
        if not found:
            return verdict(name, need, None, None, f"our kernel or {', '.join(self.peers)} was not measured")
        slowest, ratios, _, row = min(found, key=lambda one: one[0])
        note = f"worst of {len(found)}: {what(row['job'])}"
        passed: bool | None = slowest >= self.least
        if passed and self.peers[-1] not in ratios:
            passed, note = None, f"{self.peers[-1]} was not measured; {note}"
        if passed and not any(_fits(work, self.must) for _, _, work, _ in found):
            passed, note = None, f"{self.must} was not measured; {note}"
        return verdict(name, need, slowest, passed, note)


def _fits(work: Workload, sizes: dict[str, Any]) -> bool:
    return all(getattr(work, name) == value for name, value in sizes.items())


def targets(rows: Sequence[Row], grid: Grid) -> list[dict[str, Any]]:
    """Speed targets of the project, judged by rows after `add_ratios`."""
    heads, batch, context = grid.target
    dense, sparse, at = (
        {"kind": "dense"},
        {"kind": "sparse", "heads": heads},
        {"batch": batch, "context": context},
    )
    wanted = []
    for layout in MLAKVCacheLayout:
        name = layout.value
        if least := BEST_PEER_SPEEDUPS.get(layout.latent):
            where = {**dense, "heads": heads, **at}
            wanted.append(_Target(name, f"{heads} heads: best BF16 peer", least, where, {}, DENSE_PEERS))
        if layout.is_narrow:
            where, least = {**dense, "heads": grid.many_heads}, 1 / MANY_HEADS_SLOWDOWN
            text = f"{grid.many_heads} heads: same kernel on BF16 rows"
            wanted.append(_Target(name, text, least, where, at, (OURS_ON_BF16,)))
        if name in FP4_LAYOUTS:
            where, text = {"kind": "whole_pool"}, "large pool: SGLang's FP4 path"
            wanted.append(_Target(name, text, WHOLE_POOL_SPEEDUP, where, {}, (WHOLE_POOL_PEER,)))
            text = f"{heads} heads, sparse: FlashMLA on fp8_block_scale rows"
            wanted.append(_Target(name, text, SPARSE_SPEEDUP, sparse, {"batch": batch}, SPARSE_PEERS[-1:]))
    return [one.judge(rows) for one in wanted]
