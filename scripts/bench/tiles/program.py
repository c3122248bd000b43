"""Comparison of tiles and splits of `mla_decode`, and the tile table that follows from their times.

    python -m scripts.bench tiles [--heads 16,8,32] [--layouts ...] [--json PATH] [--continue]
        [--device cuda|cpu]

First every tile is compiled and checked on a small workload, several at a time. Then each is timed with the
splits that the rule of decode_config.py gives it, on dense contexts of 2k to 32k tokens and on top-k 2048,
batch 1 to 128. The fastest tile of each workload is timed with other splits, too. Every measurement is
checked against the float64 reference in up to three queries. A tile that hangs or faults is left out and
loses only its own result.

At the end wrong tiles, reasons, faster splits and the tile table to commit are printed. `--device cpu` runs
the kernels in Triton's interpreter on tiny workloads: a dry run whose times mean nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scripts.bench.attention.cases import OURS, Item, Workload
from scripts.bench.attention.device import CpuDevice, CudaDevice
from scripts.bench.attention.inputs import RANK, SCALE, Problem
from scripts.bench.attention.limits import Peaks
from scripts.bench.attention.measure import Bench
from scripts.bench.attention.peers import Prepared
from scripts.bench.attention.report import best_us
from scripts.bench.tiles.cases import CPU_HEADS, HEADS, checks, jobs, other_splits, tile_of, workload_of
from scripts.bench.tiles.tile_table import choose, split_findings, table_text
from scripts.kit.arguments import names, numbers
from scripts.kit.outputs import Report, commit, require_writable
from scripts.kit.workers import Jobs, Outcome, cuda_is_broken, run_jobs
from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.attention.decode_checks import DecodeParams
from sgl_kvpool.attention.decode_config import DecodeConfig, TileConfig, partial_elements

__all__ = ["main"]

SCHEMA = 2
_JOB_LIMIT_S = 45.0
_MOST_WORKERS = 12


class TileRunner:
    """A `Runner` of `bench.attention` that launches one configuration.

    `splits`, `min_blocks`: As in `DecodeConfig`.
    """

    def __init__(self, tile: TileConfig, splits: int, min_blocks: int) -> None:
        self.tile, self.splits, self.min_blocks = tile, splits, min_blocks

    def load(self, device: Any) -> None:
        """No import is needed."""

    def refusal(self, workload: Workload) -> str | None:
        return None

    def prepare(self, problem: Problem) -> Prepared:
        from sgl_kvpool.attention.decode_launch import launch

        w, fmt = problem.workload, problem.fmt
        tiles = -(-w.heads * w.queries_per_list // self.tile.query_heads)
        config = DecodeConfig(self.tile, tiles, self.splits, self.min_blocks)
        out = problem.new_out()
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
        room = torch.empty(
            partial_elements(fmt, w.queries, w.heads, self.splits), dtype=torch.float32, device=out.device
        )
        params = DecodeParams(
            q=problem.q[..., :RANK], q_rope=problem.q[..., RANK:], pool=problem.pool,
            kv_indices=problem.kv_indices[0], kv_lens=problem.kv_lens, list_index=None, fmt=fmt, scale=SCALE,
            k_scale=1.0, queries_per_list=w.queries_per_list, page=problem.page, out=out, lse=lse,
        )  # fmt: skip

        def call(kv_indices: torch.Tensor) -> torch.Tensor:
            launch(replace(params, kv_indices=kv_indices), room, config)
            return out

        return Prepared([partial(call, ids) for ids in problem.kv_indices], [out, lse, room], problem)


def _measured(bench: Bench, job: dict[str, Any]) -> dict[str, Any]:
    """Result row of a job of `cases`: its status, and the time and rate or the reason."""
    bench.everyone[OURS] = TileRunner(tile_of(job), job["splits"], job["min_blocks"])
    row = bench.measure(Item(workload_of(job), OURS, MLAKVCacheLayout(job["layout"]).value))
    kept = ("status", "reason", "us", "graph_us", "rows_per_s", "row_gb_per_s", "relative_error", "no_graph")
    return {name: row[name] for name in kept if name in row}


def _worker(name: str) -> int:
    sent = Jobs()
    if name == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, by the first launch
    device: Any = CpuDevice(rounds=1) if name == "cpu" else CudaDevice(seconds_per_timing=0.02, min_rounds=7)
    # The limits are not used here.
    bench = Bench(device, Peaks(1e12, 1e12, 0, 0.0), {})
    for job in sent.begin({**device.facts(), "sm_count": device.sm_count or 4}):
        sent.answer(_measured(bench, job), usable=not (bench.broken or cuda_is_broken()))
    return 0


class _Sweep:
    """Remaining jobs of a sweep, and their order."""

    def __init__(self, report: Report, arguments: argparse.Namespace) -> None:
        self.report, self.arguments = report, arguments
        self.on_gpu = arguments.device == "cuda"

    def left(self, wanted: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Jobs without a result row, for tiles that have been correct so far."""
        return [job for job in wanted if not self.report.has(job) and not self._is_bad(job)]

    def tile_jobs(self, machine: dict[str, Any]) -> list[dict[str, Any]]:
        self.report.facts["machine"] = machine
        a = self.arguments
        self.planned = jobs(a.heads, a.layouts, machine["sm_count"], on_gpu=self.on_gpu)
        return self.left(self.planned)

    def ended(self, outcome: Outcome) -> list[dict[str, Any]]:
        """Add a result; returns the jobs to run next."""
        row = {"job": outcome.job, **(outcome.value or {"status": "failed", "reason": outcome.failure})}
        self.report.add(row)
        print(_line(row), flush=True)
        return self._splits_of_the_fastest(outcome.job) if outcome.job["part"] == "tile" else []

    def _splits_of_the_fastest(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """Jobs with other splits for the fastest tile, once all tiles of a workload are measured."""
        group = [other for other in self.planned if _group(other) == _group(job)]
        if self.left(group):
            return []
        rows = [r for r in self.report.rows if r["job"] in group and r["status"] == "measured"]
        if not rows:
            return []
        return self.left(other_splits(min(rows, key=best_us)["job"]))

    def _is_bad(self, job: dict[str, Any]) -> bool:
        """Whether this tile gave a wrong result or failed on rows of this layout."""
        return any(
            row["status"] in ("wrong", "failed")
            and (row["job"]["layout"], row["job"]["tile"]) == (job["layout"], job["tile"])
            for row in self.report.rows
        )


def _group(job: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in job.items() if name not in ("tile", "splits", "min_blocks", "part")
    }


def _line(row: dict[str, Any]) -> str:
    job, tile = row["job"], tile_of(row["job"])
    head = (
        f"{job['part']:7}{job['kind']:7}{job['heads']:4} heads, batch {job['batch']:4}, {job['context']:6} "
        f"{job['layout']:16}{tile.kernel:7}{tile.query_heads:3} x {tile.block_rows:3} rows, "
        f"{tile.warps} warps, {tile.programs_per_sm} per SM, {tile.register_parts} register parts, "
        f"{job['splits']:3} splits"
    )
    if row["status"] != "measured":
        return f"{head}  {row['status']}: {row['reason']}"
    return f"{head}{best_us(row):10.1f} us {row['rows_per_s'] / 1e9:7.2f} G rows/s"


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Measure, print, write.

    Returns 1 if a tile of the table is wrong or fails, if jobs were not run, or if no tile was measured.
    """
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--heads", type=numbers, help="query heads per rank, separated by commas (16,8,32)")
    parser.add_argument(
        "--layouts", type=names([*MLAKVCacheLayout]), default=tuple(MLAKVCacheLayout), help="layouts (all)"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file after each measurement")
    parser.add_argument("--continue", action="store_true", dest="goes_on", help="keep the results in --json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        return _worker(arguments.device)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu is a dry run")
    arguments.heads = arguments.heads or (HEADS if arguments.device == "cuda" else CPU_HEADS)
    require_writable(parser, arguments.json)
    facts = {"benchmark": "tiles", "schema": SCHEMA, "commit": commit(), "device": arguments.device}
    report = Report(arguments.json, facts, arguments.goes_on)
    sweep = _Sweep(report, arguments)
    command = [sys.executable, "-m", "scripts.bench", "tiles", "--worker", "--device", arguments.device]
    small = sweep.left(checks(arguments.heads, arguments.layouts, on_gpu=sweep.on_gpu))
    workers = min(_MOST_WORKERS, max(1, (os.cpu_count() or 2) - 2)) if sweep.on_gpu else 1
    left = run_jobs(command, small, ended=sweep.ended, workers=workers, job_limit_s=2 * _JOB_LIMIT_S)
    left = left or run_jobs(command, sweep.tile_jobs, ended=sweep.ended, job_limit_s=_JOB_LIMIT_S)
    choice = choose(report.rows)
    for line in (*choice.wrong, *choice.reasons, *split_findings(report.rows)):
        print(line)
    print(f"\nthe tile table to commit, in sgl_kvpool/attention/decode_config.py:\n\n{table_text(choice)}")
    if not left and not any(row["status"] == "measured" for row in report.rows):
        left = "no tile was measured"
    if left:
        print(left)
    return int(bool(left) or bool(choice.wrong_in_table))
