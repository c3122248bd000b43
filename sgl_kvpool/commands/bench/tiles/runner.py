"""`mla_decode` with a tile and splits that are given, for `bench.attention`'s measurements."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.attention.decode_checks import DecodeParams
from sgl_kvpool.attention.decode_config import DecodeConfig, TileConfig, partial_elements
from sgl_kvpool.commands.bench.attention.cases import OURS, Item, Workload
from sgl_kvpool.commands.bench.attention.inputs import RANK, SCALE, Problem
from sgl_kvpool.commands.bench.attention.measure import Bench
from sgl_kvpool.commands.bench.attention.peers import Prepared
from sgl_kvpool.commands.bench.tiles.cases import tile_of, workload_of

__all__ = ["TileRunner", "measure"]


class TileRunner:
    """A `Runner` of `bench.attention` that launches one configuration.

    Parameters
    ----------
    tile : TileConfig
    splits : int
    """

    def __init__(self, tile: TileConfig, splits: int) -> None:
        self.tile, self.splits = tile, splits

    def load(self, device: Any) -> None:
        """Nothing that may be missing."""

    def refusal(self, workload: Workload) -> str | None:
        return None

    def prepare(self, problem: Problem) -> Prepared:
        from sgl_kvpool.attention.decode_launch import launch

        w, fmt = problem.workload, problem.fmt
        tiles = -(-w.heads * w.queries_per_list // self.tile.query_heads)
        config = DecodeConfig(self.tile, tiles, self.splits, self.tile.min_blocks)
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


def measure(bench: Bench, job: dict[str, Any]) -> dict[str, Any]:
    """A row of a job of `cases`: status, and time and rate or a reason."""
    bench.everyone[OURS] = TileRunner(tile_of(job), job["splits"])
    row = bench.measure(Item(workload_of(job), OURS, MLAKVCacheLayout(job["layout"]).value))
    kept = ("status", "reason", "us", "graph_us", "rows_per_s", "row_gb_per_s", "relative_error", "no_graph")
    return {name: row[name] for name in kept if name in row}
