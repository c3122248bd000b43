"""Measurements of `bench attention`: workloads in order of importance, and the runners of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.layout import Encoding

__all__ = [
    "CPU_GRID",
    "FP4_LAYOUTS",
    "GPU_GRID",
    "GROUPS",
    "OURS",
    "PAGE_SIZE",
    "PEERS",
    "Grid",
    "Item",
    "Workload",
    "items",
]

PAGE_SIZE = 64
OURS = "kvpool"
#: Peers for dense lists and for top-k lists. All attend BF16 rows, except the last two for top-k lists.
DENSE_PEERS = ("sglang_triton", "flashinfer", "flashinfer_page64", "flashmla")
SPARSE_PEERS = ("sglang_triton", "flashinfer", "flashmla_sparse_fp8", "gather_flashmla")
#: The peer that dequantises the whole pool, then attends BF16 rows.
WHOLE_POOL_PEER = "sglang_fp4"
PEERS = (*DENSE_PEERS, *SPARSE_PEERS[2:], WHOLE_POOL_PEER)
GROUPS = ("dense", "sparse", "whole_pool", "mtp", "arrangement")

#: Layouts that are compared with SGLang's FP4 path.
FP4_LAYOUTS = tuple(x.value for x in MLAKVCacheLayout if x.latent.values is Encoding.E2M1)
#: Layout of the rows that a peer attends; BF16 for peers that are not listed.
_LAYOUT_OF_PEER = {
    "flashmla_sparse_fp8": MLAKVCacheLayout.FP8_NOPE_WITH_BLOCK_SCALE_BF16_ROPE,
    "gather_flashmla": MLAKVCacheLayout.FP4,
}


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

    @property
    def group(self) -> str:
        """One of `GROUPS`."""
        if self.queries_per_list > 1:
            return "mtp"
        return self.kind if self.arrangement == "layer_major" else "arrangement"

    @property
    def name(self) -> str:
        context = f"{self.context // 1024}k" if self.context % 1024 == 0 else str(self.context)
        parts = [self.kind, f"{self.heads} heads", f"batch {self.batch}", f"context {context}"]
        if self.queries_per_list > 1:
            parts.append(f"{self.queries_per_list} queries")
        if self.arrangement != "layer_major":
            parts.append(self.arrangement)
        return ", ".join(parts)


@dataclass(frozen=True)
class Grid:
    """Sizes that are combined into workloads.

    `target`: Heads, batch and context of the targets; measured first.
    `whole_pool`: Tokens of the pool, batch and context of the comparison with `sglang_fp4`.
    """

    heads: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    sparse_contexts: tuple[int, ...]
    target: tuple[int, int, int]
    many_heads: int
    top_k: int
    mtp_queries: int
    layers: int
    whole_pool: tuple[int, int, int]

    def dense(self, heads: int, batch: int, context: int, **more: Any) -> Workload:
        return Workload("dense", heads, batch, context, context, **more)

    def sparse(self, heads: int, batch: int, context: int) -> Workload:
        return Workload("sparse", heads, batch, context, min(self.top_k, context))

    def workloads(self, *, quick: bool = False) -> list[Workload]:
        """All workloads without repetition, those of the targets first."""
        heads, batch, context = self.target
        pool_tokens, pool_batch, pool_context = self.whole_pool
        found = [
            self.dense(heads, batch, context),
            Workload("whole_pool", heads, pool_batch, pool_context, pool_context, pool_tokens=pool_tokens),
            self.dense(self.many_heads, batch, context),
            self.sparse(heads, batch, context),
            self.sparse(self.many_heads, batch, context),
        ]
        if quick:
            return found
        found.append(self.dense(heads, batch, context, queries_per_list=self.mtp_queries))
        # With all layers the target's context may not fit into memory; a shorter one is compared as well.
        for shorter in (self.contexts[max(self.contexts.index(context) - 1, 0)], context):
            found.append(self.dense(heads, batch, shorter))
            found += [
                self.dense(heads, batch, shorter, arrangement=name, layers=self.layers)
                for name in ("token_major", "page_major")
            ]
        found += [self.sparse(heads, other, context) for other in self.batches]
        # First workloads that differ from the target in one size, then all combinations of sizes.
        found += [self.dense(heads, other, context) for other in self.batches]
        found += [self.dense(heads, batch, other) for other in self.contexts]
        found += [self.dense(other, batch, context) for other in self.heads]
        every = [(h, b) for h in self.heads for b in self.batches]
        found += [self.sparse(h, b, c) for h, b in every for c in self.sparse_contexts]
        found += [self.dense(h, b, c) for h, b in every for c in self.contexts]
        found.append(self.dense(self.many_heads, batch, context, queries_per_list=self.mtp_queries))
        return list(dict.fromkeys(found))


GPU_GRID = Grid(
    heads=(16, 128, 8, 64),
    batches=(64, 1, 16, 128),
    contexts=(1024, 8192, 32768, 131072),
    sparse_contexts=(32768,),
    target=(16, 64, 32768),
    many_heads=128,
    top_k=2048,
    mtp_queries=4,
    layers=61,
    whole_pool=(1 << 20, 16, 4096),
)
#: Grid for a dry run on a machine without a GPU.
CPU_GRID = Grid(
    heads=(2,),
    batches=(2,),
    contexts=(64, 128),
    sparse_contexts=(128,),
    target=(2, 2, 128),
    many_heads=4,
    top_k=40,
    mtp_queries=4,
    layers=3,
    whole_pool=(1024, 1, 64),
)


@dataclass(frozen=True)
class Item:
    """One measurement: a workload, its runner (`OURS` or a peer), and the layout of the rows."""

    workload: Workload
    runner: str
    layout: str

    @property
    def facts(self) -> dict:
        """Fields of a result row that identify the measurement."""
        w = self.workload
        return {
            "runner": self.runner,
            "layout": self.layout,
            "group": w.group,
            "kind": w.kind,
            "heads": w.heads,
            "batch": w.batch,
            "context_tokens": w.context,
            "rows_per_list": w.rows_per_list,
            "queries_per_list": w.queries_per_list,
            "arrangement": w.arrangement,
            "layers": w.layers,
        }


def _runners(workload: Workload, layouts: Sequence[str], peers: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pairs (runner, layout); pairs that share a pool are adjacent."""
    if workload.kind == "whole_pool":
        layouts = [layout for layout in layouts if layout in FP4_LAYOUTS]
        wanted: tuple[str, ...] = (WHOLE_POOL_PEER,)
    elif workload.arrangement != "layer_major":
        wanted = ()
    else:
        wanted = SPARSE_PEERS if workload.kind == "sparse" else DENSE_PEERS
    pairs = [(OURS, layout) for layout in layouts]
    stored = MLAKVCacheLayout.BF16
    pairs += [(peer, _LAYOUT_OF_PEER.get(peer, stored).value) for peer in wanted if peer in peers]
    names = [layout.value for layout in MLAKVCacheLayout]
    yield from sorted(pairs, key=lambda pair: names.index(pair[1]))


def items(
    grid: Grid,
    *,
    quick: bool = False,
    only: Iterable[str] = (),
    layouts: Iterable[str] = (),
    heads: Iterable[int] = (),
    batches: Iterable[int] = (),
    contexts: Iterable[int] = (),
    peers: Iterable[str] = PEERS,
) -> list[Item]:
    """Items to measure, most important first; an empty filter of workloads or layouts selects all of them.

    `quick`: Whether to measure only the workloads of the targets, and top-k lists with many heads.
    `only`: Names of `GROUPS`.
    `layouts`: Layouts of our kernel; peers have fixed layouts.
    `peers`: Names of `PEERS`; if empty, no peer is measured.
    Returns: items of the same workload are adjacent.
    """
    layouts = tuple(layouts) or tuple(layout.value for layout in MLAKVCacheLayout)
    only, heads = tuple(only), tuple(heads)
    batches, contexts = tuple(batches), tuple(contexts)
    chosen = [
        workload
        for workload in grid.workloads(quick=quick)
        if (not only or workload.group in only)
        and (not heads or workload.heads in heads)
        and (not batches or workload.batch in batches)
        and (not contexts or workload.context in contexts)
    ]
    return [Item(w, runner, layout) for w in chosen for runner, layout in _runners(w, layouts, tuple(peers))]
