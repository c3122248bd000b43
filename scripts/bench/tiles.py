"""Comparison of tiles and splits of `mla_decode`.

First every tile is compiled and checked on a small workload, several at a time. Then each is timed with the
splits that the rule of decode_config.py gives it, on dense contexts of 2k to 32k tokens and on top-k 2048,
batch 1 to 128. The fastest tile of each workload is timed with other splits, too. A tile that gives a wrong
result, hangs or faults is left out from then on.

At the end wrong tiles, the fastest ones and faster splits are printed. `--device cpu` runs
the kernels in Triton's interpreter on tiny workloads: a dry run whose times mean nothing.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from scripts.bench.attention.cases import Workload
from scripts.bench.attention.inputs import RANK, SCALE, Problem
from scripts.bench.attention.measure import MeasuredAttention, best_us
from scripts.bench.attention.peers import Prepared, Runner
from scripts.bench.device import CpuDevice, CudaDevice
from scripts.bench.tile_table import findings, tile_of
from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.attention.decode_checks import DecodeParams
from sgl_kvpool.attention.decode_config import (
    MAX_SPLITS,
    DecodeConfig,
    TileConfig,
    config_of_tile,
    partial_elements,
    table,
)
from sgl_kvpool.layout import SegmentEncoding

#: Query heads per list: those of DeepSeek, Kimi and GLM with TP 8, without drafts and with four.
HEADS = (16, 8, 32, 64)
CPU_HEADS = (2,)
_TOP_K = 2048
#: (block_rows, warps, stages, programs_per_sm). 128 decoded rows take 144 KB of shared memory, 64 take 72 KB;
#: two programs of 4 warps have 255 registers per thread.
_DECODED_SHAPES = ((64, 8, 1, 1), (128, 8, 1, 1), (64, 4, 1, 2))
#: The same for rows that need no decoding; with 3 stages two blocks of them wait in shared memory.
_BF16_SHAPES = ((64, 8, 3, 1), (128, 8, 1, 1), (64, 4, 1, 2), (64, 4, 3, 1))
#: Gluon tiles beside those of the table: (query_heads, warps, programs_per_sm, register_parts). A block of 4
#: warps has 64 rows, a block of 8 has 128.
_GLUON_SHAPES: dict[SegmentEncoding, tuple[tuple[int, int, int, int], ...]] = {
    SegmentEncoding.E4M3_BY_K_SCALE: ((8, 4, 2, 1), (8, 8, 1, 0), (16, 8, 1, 0)),
    SegmentEncoding.E4M3_IN_TILES: ((8, 8, 1, 1), (16, 4, 1, 0)),
    SegmentEncoding.E2M1_IN_BLOCKS: ((8, 4, 2, 1), (8, 8, 1, 0), (16, 4, 2, 1), (16, 8, 1, 0), (32, 8, 1, 0)),
}
#: Query heads per tile that are compared, by heads: those of the smallest tile that holds all heads, and the
#: next larger or two of the next smaller one. Tiles of 64 are `gluon_wide`'s alone.
_QUERY_HEADS = {8: (8, 16), 16: (16,), 32: (32, 16, 64), 64: (64, 32)}


def tiles(layout: MLAKVCacheLayout, heads: int, *, on_gpu: bool = True) -> list[TileConfig]:
    """Tiles to compare for a number of query heads, those of the table first; on a CPU only Triton's."""
    shapes = _BF16_SHAPES if layout.latent is SegmentEncoding.BF16 else _DECODED_SHAPES
    wanted = _QUERY_HEADS.get(heads, (16,))
    kernels = ("gluon", "triton") if on_gpu else ("triton",)
    found = [
        tile
        for kernel in kernels
        for name, tile in table(kernel)
        if name is layout and tile.query_heads in wanted
    ]
    if on_gpu:
        found += [
            TileConfig(query_heads, 16 * warps, warps, 1, programs, "gluon", register_parts)
            for query_heads, warps, programs, register_parts in _GLUON_SHAPES.get(layout.latent, ())
            if query_heads == heads
        ]
    for query_heads in (own for own in wanted if own < 64):
        for rows, warps, stages, programs in shapes:
            found.append(TileConfig(query_heads, rows, warps, stages, programs))
    return list(dict.fromkeys(found))


def workloads(heads: int, *, on_gpu: bool = True) -> list[Workload]:
    """Workloads for a number of query heads, most important first, alternating dense and top-k lists."""
    if not on_gpu:
        return [Workload("sparse", heads, 1, 192, 136)]  # the interpreter takes 0.1 s per block of rows
    found = []
    for batch, context in ((64, 32768), (1, 32768), (16, 8192), (128, 2048)):
        found.append(Workload("dense", heads, batch, context, context))
        found.append(Workload("sparse", heads, batch, 32768, _TOP_K))
    return found


def _job(
    workload: Workload, layout: MLAKVCacheLayout, tile: TileConfig, splits: int, min_blocks: int, part: str
) -> dict[str, Any]:
    return {
        "part": part,
        "layout": layout.value,
        **workload.as_case(),
        "tile": asdict(tile),
        "splits": splits,
        "min_blocks": min_blocks,
    }


def checks(heads: Iterable[int], *, on_gpu: bool = True) -> list[dict[str, Any]]:
    """Jobs that compile and check every tile on a small workload, with splits, and on a GPU also without.

    The sizes select the same kernels as the larger workloads.
    """
    batch, context = (3, 1024) if on_gpu else (1, 40)
    found = []
    for count in heads:
        workload = Workload("dense", count, batch, context, context)
        found += [
            _job(workload, layout, tile, splits, tile.min_blocks, "check")
            for layout in MLAKVCacheLayout
            for tile in tiles(layout, count, on_gpu=on_gpu)
            for splits in ((2, 1) if on_gpu else (2,))
        ]
    return found


def jobs(heads: Iterable[int], sm_count: int, *, on_gpu: bool = True) -> list[dict[str, Any]]:
    """Jobs of every tile on every workload, with the rule's splits, grouped by workload and layout."""
    found = []
    for count in heads:
        for workload in workloads(count, on_gpu=on_gpu):
            for layout in MLAKVCacheLayout:
                for tile in tiles(layout, count, on_gpu=on_gpu):
                    config = config_of_tile(tile, count, workload.batch, workload.rows_per_list, sm_count)
                    found.append(_job(workload, layout, tile, config.splits, config.min_blocks, "tile"))
    return found


def other_splits(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The same tile and workload with half and twice the splits, and the next smaller and larger number.

    Only numbers of splits without an empty split are used. The rule's minimum of rows per split is left out,
    so that a smaller minimum is measured too.
    """
    blocks = -(-job["rows_per_list"] // job["tile"]["block_rows"])
    filled = {n: -(-blocks // -(-blocks // n)) for n in range(1, min(MAX_SPLITS, blocks) + 1)}
    now = -(-blocks // max(-(-blocks // job["splits"]), job["min_blocks"]))
    others = (
        filled[max(1, now // 2)],
        *[n for n in filled.values() if n < now][-1:],
        *[n for n in filled.values() if n > now][:1],
        filled[min(2 * now, len(filled))],
    )
    return [
        {**job, "part": "splits", "splits": n, "min_blocks": 1} for n in dict.fromkeys(others) if n != now
    ]


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
            q=problem.q[..., :RANK], q_rope=problem.q[..., RANK:], row_buffer=problem.pool,
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
        return findings(rows).wrong_in_table

    def text(self, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
        found = findings(rows)
        yield from (*found.wrong, *found.fastest, *found.splits)


def _workload(case: dict[str, Any]) -> dict[str, Any]:
    own = ("tile", "splits", "min_blocks", "part")
    return {name: value for name, value in case.items() if name not in own}
