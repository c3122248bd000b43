"""Decode attention straight from stored rows, beside SGLang, FlashInfer and FlashMLA in the same run.

FlashInfer compiles on first use, and the time limit includes it: run `--quick` once on a fresh machine. A
workload that does not fit into memory is skipped. The workloads of the targets come first. docs/attention.md
has the limit of rows per second that each tile's machine code sets.

`--device cpu` runs tiny workloads through the CPU path of `mla_decode`: a dry run whose times mean nothing
and neither pass nor miss a target.
"""

from collections.abc import Sequence
from typing import Any

from scripts.bench.attention.cases import CPU_GRID, GPU_GRID, cases
from scripts.bench.attention.device import CpuDevice, CudaDevice
from scripts.bench.attention.inputs import RANK, ROPE
from scripts.bench.attention.measure import MeasuredAttention
from scripts.bench.attention.peers import Runner, runners
from scripts.bench.attention.targets import add_ratios, targets
from scripts.bench.sweep import Skipped, first_line
from sgl_kvpool import MLAKVCacheLayout


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
