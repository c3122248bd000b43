"""Checked times of attention on one device: what `bench attention` and `bench tiles` share."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from scripts.bench.attention.cases import Workload
from scripts.bench.attention.inputs import RANK, ROPE, Problem, buffer_bytes, check, make_problem
from scripts.bench.attention.peers import Prepared, Runner
from scripts.bench.measurements import is_ours
from scripts.bench.sweep import Benchmark, Skipped, WrongResult, first_line
from sgl_kvpool import MLAKVCacheLayout, RowFormat

#: Share of the free memory that a pool may take; the rest is for the runners' own allocations.
MEMORY_SHARE = 0.85


def best_us(row: Mapping[str, Any]) -> float:
    """Time of a row without launches: in a CUDA graph if it could be captured."""
    return row["graph_us"] if row.get("graph_us") is not None else row["us"]


class MeasuredAttention(Benchmark):
    """Measurement of a runner on a workload.

    Up to three queries of a result, for the first and the last set of lists, are compared with the float64
    reference, with buffers full of NaN before the call. Times are medians between CUDA events, without
    launches, over rotating sets of lists that together exceed the L2 cache; and again inside a CUDA graph.
    """

    devices = ("cuda", "cpu")
    #: The device, which `start` sets.
    device: Any

    def timed(self, case: dict[str, Any], runner: Runner) -> dict[str, Any]:
        """Times of a case; its layout's rows are made once for consecutive cases."""
        workload = Workload.of(case)
        if reason := runner.refusal(workload):
            raise Skipped(reason)
        fmt = MLAKVCacheLayout(case["layout"]).row_format(RANK, ROPE)
        problem = self.kept((workload, case["layout"]), partial(self._problem, workload, fmt))
        row = self._times(runner.prepare(problem), is_ours(case))
        seconds = max(best_us(row), 0.01) * 1e-6
        return {**row, "rows_per_s": round(workload.rows / seconds)}

    def _problem(self, workload: Workload, fmt: RowFormat) -> Problem:
        needed, free = buffer_bytes(workload, fmt, self.device), self.device.free_bytes()
        if needed > MEMORY_SHARE * free:
            raise Skipped(f"pool of {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB free")
        return make_problem(workload, fmt, self.device)

    def _times(self, prepared: Prepared, ours: bool) -> dict[str, Any]:
        calls, last = prepared.calls, len(prepared.calls) - 1
        error = 0.0
        for number in {0, last}:
            _poison(prepared)
            error = max(error, check(prepared.problem, calls[number](), number))
        for call in calls[1:last]:  # the first calls make the schedules
            call()
        row = {"us": round(self.device.median_us(calls), 2)}
        try:
            graph = self.device.graph_us(calls)
            if graph is not None:
                graph_us, replay = graph
                _poison(prepared)
                error = max(error, check(prepared.problem, replay(), last))
                row["graph_us"] = round(graph_us, 2)
        except WrongResult as caught:
            raise WrongResult(f"in a CUDA graph, {caught}") from None
        except Exception as caught:  # not every peer can be captured; the report says why
            prepared.facts["no_graph"] = reason = f"{type(caught).__name__}: {first_line(caught)}"
            if ours and not isinstance(caught, torch.OutOfMemoryError):
                raise WrongResult(f"in a CUDA graph, {reason}") from caught  # SGLang captures decode
            self.device.synchronize()
        return {
            **row,
            "relative_error": float(f"{error:.2g}"),
            "rotating_sets": len(calls),
            "pool_rows": len(prepared.problem.pool),
            "row_stride_bytes": prepared.problem.pool.stride(0),
            **prepared.facts,
        }


def _poison(prepared: Prepared) -> None:
    """Fill result buffers with NaN; for a case without buffers, the freed memory that its result may get."""
    for buffer in prepared.buffers:
        buffer.fill_(float("nan"))
    if not prepared.buffers:
        prepared.problem.new_out().fill_(float("nan"))
