"""Comparison of tiles and splits of `mla_decode`, and the tile table that follows from their times.

First every tile is compiled and checked on a small workload, several at a time. Then each is timed with the
splits that the rule of decode_config.py gives it, on dense contexts of 2k to 32k tokens and on top-k 2048,
batch 1 to 128. The fastest tile of each workload is timed with other splits, too. A tile that gives a wrong
result, hangs or faults is left out from then on.

At the end wrong tiles, reasons, faster splits and the tile table to commit are printed. `--device cpu` runs
the kernels in Triton's interpreter on tiny workloads: a dry run whose times mean nothing.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from scripts.bench.attention.device import CpuDevice, CudaDevice
from scripts.bench.attention.inputs import RANK, SCALE, Problem
from scripts.bench.attention.measure import MeasuredAttention, best_us
from scripts.bench.attention.peers import Prepared, Runner
from scripts.bench.tiles.cases import CPU_HEADS, HEADS, checks, jobs, other_splits, tile_of
from scripts.bench.tiles.tile_table import choose, split_findings, table_text
from sgl_kvpool.attention.decode_checks import DecodeParams
from sgl_kvpool.attention.decode_config import DecodeConfig, TileConfig, partial_elements


class _TileRunner(Runner):
    """Launches one configuration; `splits` and `min_blocks` are those of `DecodeConfig`."""

    def __init__(self, tile: TileConfig, splits: int, min_blocks: int) -> None:
        self.tile, self.splits, self.min_blocks = tile, splits, min_blocks

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


class Tiles(MeasuredAttention):
    """Every tile on every workload, with the splits of the rule and with others."""

    schema = 3
    case_limit_s = 45.0
    has_workers = True

    @property
    def heads(self) -> tuple[int, ...]:
        return HEADS if self.on_gpu else CPU_HEADS

    def start(self) -> dict[str, Any]:
        if not self.on_gpu:
            os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, by the first launch
            self.device = CpuDevice(rounds=1)
        else:
            self.device = CudaDevice(seconds_per_timing=0.02, min_rounds=7)
        return {**self.device.facts(), "sm_count": self.device.sm_count or 4}

    def checks(self) -> list[dict[str, Any]]:
        return checks(self.heads, on_gpu=self.on_gpu)

    def cases(self, machine: dict[str, Any]) -> list[dict[str, Any]]:
        self.planned = jobs(self.heads, machine["sm_count"], on_gpu=self.on_gpu)
        return self.planned

    def is_ruled_out(self, case: dict[str, Any], rows: Sequence[dict[str, Any]]) -> bool:
        return any(
            row["status"] in ("wrong", "failed")
            and (row["job"]["layout"], row["job"]["tile"]) == (case["layout"], case["tile"])
            for row in rows
        )

    def measure(self, case: dict[str, Any]) -> dict[str, Any]:
        return self.timed(case, _TileRunner(tile_of(case), case["splits"], case["min_blocks"]))

    def following(self, row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Cases with other splits for the fastest tile, once all tiles of a workload have been tried."""
        if row["job"]["part"] != "tile":
            return []
        group = [other for other in self.planned if _workload(other) == _workload(row["job"])]
        tried = [one for one in rows if one["job"] in group]
        jobs = [one["job"] for one in tried]
        left = any(other not in jobs and not self.is_ruled_out(other, rows) for other in group)
        measured = [one for one in tried if one["status"] == "measured"]
        if left or not measured:
            return []
        return other_splits(min(measured, key=best_us)["job"])

    def wrong(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        return choose(rows).wrong_in_table

    def text(self, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
        choice = choose(rows)
        yield from (*choice.wrong, *choice.reasons, *split_findings(rows))
        yield f"\nthe tile table to commit, in sgl_kvpool/attention/decode_config.py:\n\n{table_text(choice)}"


def _workload(case: dict[str, Any]) -> dict[str, Any]:
    own = ("tile", "splits", "min_blocks", "part")
    return {name: value for name, value in case.items() if name not in own}
