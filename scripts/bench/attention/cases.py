"""Measurements of `bench attention`: workloads in order of importance, and the runners of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from scripts.bench.measurements import OURS
from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.layout import Encoding

PAGE_SIZE = 64
#: Peers for dense lists and for top-k lists. All attend BF16 rows, except the last for top-k lists.
DENSE_PEERS = ("sglang_triton", "flashinfer", "flashmla")
SPARSE_PEERS = ("sglang_triton", "flashinfer", "flashmla_sparse_fp8")
#: The peer that dequantises the whole pool, then attends BF16 rows.
WHOLE_POOL_PEER = "sglang_fp4"

#: Layouts that are compared with SGLang's FP4 path.
FP4_LAYOUTS = tuple(x.value for x in MLAKVCacheLayout if x.latent.values is Encoding.E2M1)
#: Layout of the rows that a peer attends; BF16 for peers that are not listed.
_LAYOUT_OF_PEER = {"flashmla_sparse_fp8": MLAKVCacheLayout.FP8_NOPE_WITH_BLOCK_SCALE_BF16_ROPE}


@dataclass(frozen=True)
class Workload:
    """One batch of decode queries over lists of rows of one layer.

    `kind`: "dense": a list is a request's whole context, in order, in pages at random places. "sparse": a
      list is some tokens of a context, in random order. "whole_pool": dense, out of a much larger pool.
    `heads`, `batch`, `context`: Query heads of one rank, requests, tokens per request.
    `rows_per_list`: Rows that a query attends.
    `queries_per_list`: Queries of a request that share its list; the last query attends all rows, each other
      query one row less than the next.
    `layers`: Layers in the same buffer.
    `pool_tokens`: Slots of the pool beside its reserved page; 0 for as many as the lists need.
    """

    kind: str
    heads: int
    batch: int
    context: int
    rows_per_list: int
    queries_per_list: int = 1
    arrangement: str = "layer_major"
    layers: int = 1
    pool_tokens: int = 0

    @property
    def queries(self) -> int:
        return self.batch * self.queries_per_list

    @property
    def rows(self) -> int:
        """Rows in all lists of a call."""
        return self.batch * self.rows_per_list

    @classmethod
    def of(cls, case: dict[str, Any]) -> Workload:
        return cls(**{one.name: case[one.name] for one in fields(cls) if one.name in case})

    def as_case(self) -> dict[str, Any]:
        """Fields of a case; those with their usual values are left out."""
        usual = {one.name: one.default for one in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != usual[name]}


@dataclass(frozen=True)
class Grid:
    """Sizes that are combined into workloads.

    `target`: Heads, batch and context of the targets; measured first.
    `whole_pool`: Tokens of the pool, batch and context of the comparison with `sglang_fp4`.
    """

    heads: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    target: tuple[int, int, int]
    many_heads: int
    top_k: int
    layers: int
    whole_pool: tuple[int, int, int]

    def _dense(self, heads: int, batch: int, context: int, **more: Any) -> Workload:
        return Workload("dense", heads, batch, context, context, **more)

    def _sparse(self, heads: int, batch: int) -> Workload:
        return Workload("sparse", heads, batch, self.target[2], self.top_k)

    def workloads(self, *, quick: bool = False) -> list[Workload]:
        """All workloads without repetition, those of the targets first."""
        heads, batch, context = self.target
        pool_tokens, pool_batch, pool_context = self.whole_pool
        found = [
            self._dense(heads, batch, context),
            Workload("whole_pool", heads, pool_batch, pool_context, pool_context, pool_tokens=pool_tokens),
            self._dense(self.many_heads, batch, context),
            self._sparse(heads, batch),
            self._sparse(self.many_heads, batch),
        ]
        if quick:
            return found
        found.append(self._dense(heads, batch, context, queries_per_list=4))
        # With all layers the target's context may not fit into memory; a shorter one is compared as well.
        for shorter in (self.contexts[max(self.contexts.index(context) - 1, 0)], context):
            found.append(self._dense(heads, batch, shorter))
            found += [
                self._dense(heads, batch, shorter, arrangement=name, layers=self.layers)
                for name in ("token_major", "page_major")
            ]
        # First workloads that differ from the target in one size, then all combinations of sizes.
        found += [self._sparse(heads, other) for other in self.batches]
        found += [self._dense(heads, other, context) for other in self.batches]
        found += [self._dense(heads, batch, other) for other in self.contexts]
        found += [self._dense(other, batch, context) for other in self.heads]
        every = [(h, b) for h in self.heads for b in self.batches]
        found += [self._sparse(h, b) for h, b in every]
        found += [self._dense(h, b, c) for h, b in every for c in self.contexts]
        found.append(self._dense(self.many_heads, batch, context, queries_per_list=4))
        return list(dict.fromkeys(found))


GPU_GRID = Grid(
    heads=(16, 128, 8, 64), batches=(64, 1, 16, 128), contexts=(1024, 8192, 32768, 131072),
    target=(16, 64, 32768), many_heads=128, top_k=2048, layers=61, whole_pool=(1 << 20, 16, 4096),
)  # fmt: skip
#: Grid for a dry run on a machine without a GPU.
CPU_GRID = Grid(
    heads=(2,), batches=(2,), contexts=(64, 128), target=(2, 2, 128), many_heads=4, top_k=40, layers=3,
    whole_pool=(1024, 1, 64),
)  # fmt: skip


def _runners(workload: Workload) -> Iterator[tuple[str, str]]:
    """Pairs (runner, layout); pairs that share a pool are adjacent."""
    layouts = [layout.value for layout in MLAKVCacheLayout]
    wanted: tuple[str, ...] = ()
    ours = layouts
    if workload.kind == "whole_pool":
        ours, wanted = list(FP4_LAYOUTS), (WHOLE_POOL_PEER,)
    elif workload.arrangement == "layer_major":
        wanted = SPARSE_PEERS if workload.kind == "sparse" else DENSE_PEERS
    pairs = [(OURS, layout) for layout in ours]
    pairs += [(peer, _LAYOUT_OF_PEER.get(peer, MLAKVCacheLayout.BF16).value) for peer in wanted]
    yield from sorted(pairs, key=lambda pair: layouts.index(pair[1]))


def cases(grid: Grid, *, quick: bool = False) -> list[dict[str, Any]]:
    """Cases to measure, most important first; those of a workload are adjacent.

    `quick`: Whether to measure only the workloads of the targets, and top-k lists with many heads.
    """
    return [
        {"runner": runner, "layout": layout, **workload.as_case()}
        for workload in grid.workloads(quick=quick)
        for runner, layout in _runners(workload)
    ]
