"""Measure attention on a device, one item at a time; an item that fails does not end the run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from scripts.bench.attention.cases import OURS, Item
from scripts.bench.attention.inputs import RANK, ROPE, Problem, WrongResult, buffer_bytes, check, make_problem
from scripts.bench.attention.limits import Peaks, limits_us, work_of
from scripts.bench.attention.peers import Prepared, Runner
from scripts.bench.attention.report import best_us, print_table
from sgl_kvpool import MLAKVCacheLayout

__all__ = ["Bench", "run"]

#: Share of the free memory that a pool may take; the rest is for the runners' own allocations.
MEMORY_SHARE = 0.85


class Bench:
    """Measurements of items on a device."""

    def __init__(self, device: Any, peaks: Peaks, everyone: dict[str, Runner]) -> None:
        self.device, self.peaks, self.everyone = device, peaks, everyone
        self._reasons: dict[str, str | None] = {}
        self._problem: tuple[Any, Problem] | None = None
        #: Reason why no more items can be measured, since a CUDA error is permanent.
        self.broken: str | None = None

    def measure(self, item: Item) -> dict:
        """A result row: the item's facts and its `status`, with a `reason` unless it is "measured"."""
        if self.broken:
            return _row(item, "not run", self.broken)
        reason = self.missing(item.runner) or self.everyone[item.runner].refusal(item.workload)
        if reason:
            return _row(item, "skipped", reason)
        try:
            problem = self.problem(item)
            if isinstance(problem, str):
                return _row(item, "skipped", problem)
            prepared = self.everyone[item.runner].prepare(problem)
            return _row(item, "measured", **self.timings(item, prepared))
        except WrongResult as error:
            return _row(item, "wrong", str(error))
        except torch.OutOfMemoryError as error:
            return _row(item, "skipped", _first_line(error))
        except Exception as error:  # a peer may fail in any way; ours is reported as a missed target
            row = _row(item, "failed", f"{type(error).__name__}: {_first_line(error)}")
            try:
                self.device.synchronize()
            except RuntimeError:
                self.broken = f"the device failed in {item.runner}, {item.workload.name}"
            return row

    def missing(self, name: str) -> str | None:
        """Reason why a runner cannot be loaded, or None; loading is tried once."""
        if name not in self._reasons:
            try:
                self.everyone[name].load(self.device)
                self._reasons[name] = None
            except Exception as error:  # peers fail to load in any way; the reason is in the report
                self._reasons[name] = f"{type(error).__name__}: {_first_line(error)}"
        return self._reasons[name]

    def peers(self) -> dict[str, str]:
        """ "loaded", or the reason of the failure, for every peer that was tried."""
        return {name: reason or "loaded" for name, reason in self._reasons.items() if name != OURS}

    def problem(self, item: Item) -> Problem | str:
        """Inputs of an item, shared by consecutive runners, or the reason why they do not fit into memory."""
        # The layout of an item of `sglang_fp4` is BF16: the peer encodes these rows into its own pool.
        key = (item.workload, item.layout)
        if self._problem is None or self._problem[0] != key:
            self._problem = None
            fmt = MLAKVCacheLayout(item.layout).row_format(RANK, ROPE)
            needed, free = buffer_bytes(item.workload, fmt, self.device), self.device.free_bytes()
            if needed > MEMORY_SHARE * free:
                return f"pool of {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB free"
            self._problem = key, make_problem(item.workload, fmt, self.device)
        return self._problem[1]

    def timings(self, item: Item, prepared: Prepared) -> dict:
        """Times of checked calls, with rates and limits."""
        calls, last = prepared.calls, len(prepared.calls) - 1
        error = 0.0
        for number in {0, last}:
            _poison(prepared)
            error = max(error, check(prepared.problem, calls[number](), number))
        for call in calls[1:last]:  # the first calls make the schedules
            call()
        us = self.device.median_us(calls)
        graph_us, no_graph = None, None
        try:
            graph = self.device.graph_us(calls)
            if graph is not None:
                graph_us, replay = graph
                _poison(prepared)
                error = max(error, check(prepared.problem, replay(), last))
        except WrongResult as caught:
            raise WrongResult(f"in a CUDA graph, {caught}") from None
        except Exception as caught:  # not every peer can be captured; the report says why
            no_graph = f"{type(caught).__name__}: {_first_line(caught)}"
            self.device.synchronize()
        return {
            **self.rates(item, us, graph_us),
            **({"no_graph": no_graph} if no_graph else {}),
            "relative_error": float(f"{error:.2g}"),
            "rotating_sets": len(calls),
            "pool_rows": len(prepared.problem.pool),
            "row_stride_bytes": prepared.problem.pool.stride(0),
            **prepared.facts,
        }

    def rates(self, item: Item, us: float, graph_us: float | None) -> dict:
        """Times of an item with its rates and limits."""
        fmt = MLAKVCacheLayout(item.layout).row_format(RANK, ROPE)
        work = work_of(item.workload, fmt)
        limits = limits_us(work, self.peaks, ours=item.runner == OURS)
        tightest = max(limits, key=limits.__getitem__)
        row = {"us": round(us, 2), "graph_us": None if graph_us is None else round(graph_us, 2)}
        seconds = max(best_us(row), 0.01) * 1e-6
        return {
            **row,
            "row_bytes": fmt.row_bytes,
            "rows_per_s": round(item.workload.rows / seconds),
            "row_gb_per_s": round(work.row_bytes / seconds / 1e9, 2),
            "of_copy_peak": round(work.row_bytes / seconds / self.peaks.copy_bytes_per_s, 4),
            "tflop_per_s": round(work.flop / seconds / 1e12, 3),
            "limits_us": {name: round(limit, 3) for name, limit in limits.items()},
            "tightest_limit": tightest,
            "of_tightest_limit": round(limits[tightest] * 1e-6 / seconds, 4),
        }


def _row(item: Item, status: str, reason: str | None = None, **more: Any) -> dict:
    return {**item.facts, "status": status, **({"reason": reason} if reason else {}), **more}


def _poison(prepared: Prepared) -> None:
    """Fill result buffers with NaN; if there are none, freed memory that torch may reuse for the result."""
    for buffer in prepared.buffers:
        buffer.fill_(float("nan"))
    if not prepared.buffers:
        torch.full_like(prepared.problem.new_out(), float("nan"))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else "no message"


def run(
    bench: Bench,
    chosen: Sequence[Item],
    minutes: float,
    clock: Any = time.monotonic,
    after_workload: Any = None,
) -> list[dict]:
    """Measure in order until the time is spent; each remaining item gets a "not run" row.

    `minutes`: Time limit from now; a measurement that has begun is finished.
    `clock`: Clock that returns seconds.
    `after_workload`: Called with all rows so far after each workload.
    """
    end = clock() + minutes * 60
    rows: list[dict] = []
    for number, item in enumerate(chosen):
        if clock() >= end:
            row = _row(item, "not run", f"the {minutes:g} minutes were spent")
        else:
            row = bench.measure(item)
        rows.append(row)
        if row["status"] != "not run":
            print_table(row)
            following = chosen[number + 1].workload if number + 1 < len(chosen) else None
            if after_workload is not None and following != item.workload:
                after_workload(rows)
    left_out = sum(row["status"] == "not run" for row in rows)
    if left_out:
        print(f"{left_out} of {len(rows)} measurements not run: {rows[-1].get('reason')}")
    return rows
