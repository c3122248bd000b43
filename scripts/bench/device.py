"""Clocks and memory of the device that is measured."""

import gc
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from scripts.kit.environment import driver_facts

Call = Callable[[], torch.Tensor]

#: Cycles that a GPU waits before its clock starts, some 0.5 ms. All launches of a call must be in the queue
#: by then: Triton's launch alone takes tens of microseconds, and a later launch would be timed as waiting.
_HEAD_START_CYCLES = 1_000_000
#: Least number of bytes that all rotating sets of lists read together, as a multiple of the L2 cache.
_L2_TIMES = 4
_MAX_SETS = 512
_SHORT_US = 1000.0


def seconds(call: Callable[[], object], device: str = "cpu") -> float:
    """Seconds of one call: on "cuda" between two events, without its launches; on "cpu" by the clock."""
    if device == "cuda":
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START_CYCLES)
        began.record()
        call()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) * 1e-3
    before = time.perf_counter()
    call()
    return time.perf_counter() - before


class CudaDevice:
    """One GPU.

    `seconds_per_timing`: Time for the repetitions of one timing; at least `min_rounds` are made.
    """

    def __init__(self, seconds_per_timing: float = 0.15, min_rounds: int = 11) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.properties = torch.cuda.get_device_properties(self.device)
        self.sm_count = self.properties.multi_processor_count
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

    def facts(self) -> dict[str, Any]:
        return {
            "device": self.properties.name,
            "sm_count": self.sm_count,
            "l2_bytes": self.properties.L2_cache_size,
            "memory_bytes": self.properties.total_memory,
            "cuda": torch.version.cuda,
            "driver": driver_facts(),
        }

    def _rounds(self, us: float) -> int:
        return max(self._min_rounds, min(100, int(self._seconds / max(us, 1.0) * 1e6)))

    def _one_us(self, call: Call) -> float:
        return seconds(call, "cuda") * 1e6


class CpuDevice:
    """A machine without a GPU, for dry runs on tiny workloads. Its times say nothing about a GPU."""

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
        return statistics.median(1e6 * seconds(calls[i % len(calls)]) for i in range(self._rounds))

    def graph_us(self, calls: Sequence[Call]) -> None:
        """None: a CPU has no graphs."""

    def facts(self) -> dict[str, Any]:
        return {"device": "cpu", "machine": platform.machine(), "threads": torch.get_num_threads()}
