"""Clocks, memory and peaks of the device that `bench attention` runs on."""

from __future__ import annotations

import gc
import platform
import shutil
import statistics
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import torch

from scripts.bench.attention.limits import Peaks
from scripts.kit.timing import seconds

__all__ = ["CpuDevice", "CudaDevice"]

Call = Callable[[], torch.Tensor]

#: Least number of bytes that all rotating sets of lists read together, as a multiple of the L2 cache.
_L2_TIMES = 4
_MAX_SETS = 512
_SHORT_US = 1000.0


class CudaDevice:
    """One GPU.

    `seconds_per_timing`: Time for the repetitions of one timing; at least `min_rounds` are made.
    """

    kind = "cuda"

    def __init__(self, seconds_per_timing: float = 0.15, min_rounds: int = 11) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.properties = torch.cuda.get_device_properties(self.device)
        self.sm_count = self.properties.multi_processor_count
        self.clocks = _nvidia_smi(self.properties)
        self._seconds, self._min_rounds = seconds_per_timing, min_rounds

    def sets(self, bytes_per_call: int) -> int:
        """Number of sets of lists to rotate through, so that no call finds its rows in the L2 cache."""
        l2 = self.properties.L2_cache_size
        if bytes_per_call >= _L2_TIMES * l2:
            return 1
        return min(_MAX_SETS, 1 + -(-_L2_TIMES * l2 // bytes_per_call))

    def free_bytes(self) -> int:
        """Device memory that a new pool may take, after unused memory has been released."""
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def median_us(self, calls: Sequence[Call]) -> float:
        """Median time of one call without its launch; the calls take turns. All must have run before."""
        rounds = self._rounds(self._one_us(calls[0]))
        return statistics.median(self._one_us(calls[i % len(calls)]) for i in range(rounds))

    def graph_us(self, calls: Sequence[Call]) -> tuple[float, Call]:
        """Median time of one call inside a CUDA graph of all calls in sequence.

        Returns: microseconds per call.
        Returns: function that replays the graph and returns the result of its last call.
        """
        single = self._one_us(calls[0])
        repeated = list(calls) * (max(1, 8 // len(calls)) if single < _SHORT_US else 1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in repeated:
                out = call()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        replay()
        rounds = self._rounds(single * len(repeated))
        times = [self._one_us(replay) for _ in range(rounds)]
        return statistics.median(times) / len(repeated), replay

    def peaks(self) -> Peaks:
        """Measure the peaks now: a copy of 2 GiB and a product of 8192 x 8192 matrices."""
        copy = self._copy_bytes_per_s(2 << 30)
        matmul = self._matmul_flop_per_s(8192)
        self.clocks = _nvidia_smi(self.properties) or self.clocks  # clocks right after load
        return Peaks(copy, matmul, self.sm_count, _highest_mhz(self.clocks) * 1e6)

    def facts(self) -> dict[str, Any]:
        return {
            "device": self.properties.name,
            "sm_count": self.sm_count,
            "l2_bytes": self.properties.L2_cache_size,
            "memory_bytes": self.properties.total_memory,
            "cuda": torch.version.cuda,
            **self.clocks,
        }

    def _copy_bytes_per_s(self, size_bytes: int) -> float:
        source = torch.ones(size_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size_bytes / self._peak_us(lambda: target.copy_(source)) * 1e6

    def _matmul_flop_per_s(self, n: int) -> float:
        a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        c = torch.empty_like(a)
        return 2 * n**3 / self._peak_us(lambda: torch.mm(a, b, out=c)) * 1e6

    def _peak_us(self, call: Call) -> float:
        for _ in range(3):
            call()
        return statistics.median(self._one_us(call) for _ in range(20))

    def _rounds(self, us: float) -> int:
        return max(self._min_rounds, min(100, int(self._seconds / max(us, 1.0) * 1e6)))

    def _one_us(self, call: Call) -> float:
        return seconds(call, "cuda") * 1e6


class CpuDevice:
    """A machine without a GPU, for dry runs on tiny workloads. Its times say nothing about a GPU."""

    kind = "cpu"

    def __init__(self, rounds: int = 3) -> None:
        self.device = torch.device("cpu")
        self.sm_count = 0
        self._rounds = rounds

    def sets(self, bytes_per_call: int) -> int:
        """Two sets, so that the rotation is exercised."""
        return 2

    def free_bytes(self) -> int:
        return 1 << 30

    def synchronize(self) -> None:
        pass

    def median_us(self, calls: Sequence[Call]) -> float:
        return statistics.median(self._one_us(calls[i % len(calls)]) for i in range(self._rounds))

    def graph_us(self, calls: Sequence[Call]) -> None:
        """None: a CPU has no graphs."""

    def peaks(self) -> Peaks:
        source = torch.ones(8 << 20, dtype=torch.uint8)
        target = torch.empty_like(source)
        a = torch.ones(128, 128, dtype=torch.bfloat16)
        copy_us = self.median_us([lambda: target.copy_(source)])
        matmul_us = self.median_us([lambda: a @ a])
        return Peaks(2 * source.numel() / copy_us * 1e6, 2 * 128**3 / matmul_us * 1e6, 0, 0.0)

    def facts(self) -> dict[str, Any]:
        return {"device": "cpu", "machine": platform.machine(), "threads": torch.get_num_threads()}

    def _one_us(self, call: Call) -> float:
        return seconds(call) * 1e6


def _highest_mhz(clocks: dict[str, str]) -> float:
    """Highest clock; that of an H100 if nvidia-smi does not report it, as in some containers."""
    try:
        return float(clocks.get("clocks.max.sm", 0)) or 1980.0
    except ValueError:  # "[N/A]"
        return 1980.0


_SMI_FIELDS = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")


def _nvidia_smi(properties: Any) -> dict[str, str]:
    """Driver, clocks in MHz and power limit in W; empty without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    done = subprocess.run(
        [
            program,
            f"--id=GPU-{properties.uuid}",
            f"--query-gpu={','.join(_SMI_FIELDS)}",
            "--format=csv,noheader,nounits",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    values = [value.strip() for value in done.stdout.strip().splitlines()[:1] for value in value.split(",")]
    if done.returncode or len(values) != len(_SMI_FIELDS):
        return {}
    return dict(zip(_SMI_FIELDS, values, strict=True))
