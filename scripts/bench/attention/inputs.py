"""Pools, lists and queries of a workload, and the check of a result against the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from scripts.bench.attention.cases import PAGE_SIZE, Workload
from scripts.bench.sweep import WrongResult
from sgl_kvpool import KVArrangement, RowFormat
from sgl_kvpool.codec import encode_rows, reference
from sgl_kvpool.memory.arrangement import PageStride, RowPlacement, rows_of_slots

RANK, ROPE = 512, 64
SCALE = (RANK + ROPE) ** -0.5
#: Largest error norm relative to the result's norm: weights and results are rounded to bf16, 2**-9 each.
ERROR_LIMIT = 0.01
_CHECKED_QUERIES = 3
#: Number of different rows; a prime, so that pages differ in their rows.
_BASE_ROWS = 16381
_CHUNK_ROWS = 1 << 18


@dataclass(frozen=True)
class Problem:
    """Inputs of one workload on rows of one format.

    `pool`: One layer's view.
    `page`: The argument of `mla_decode` that converts `kv_indices`, which are slots, to row numbers.
    `page_tables`: Pages of each request, in order; the same for all sets of a sparse workload.
    `kv_indices`: Slots. A call uses one set.
    """

    workload: Workload
    fmt: RowFormat
    pool: torch.Tensor
    page: PageStride | None
    page_tables: torch.Tensor
    kv_indices: torch.Tensor
    kv_lens: torch.Tensor
    q: torch.Tensor
    _expected: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def on_rows(self, pool: torch.Tensor, fmt: RowFormat) -> Problem:
        """The same lists on another pool."""
        return replace(self, pool=pool, fmt=fmt, _expected={})

    def expected(self, query: int, number: int) -> torch.Tensor:
        """Reference result of a query with a set of lists, float64 [heads, R]; computed once."""
        if (query, number) not in self._expected:
            slots = self.kv_indices[number, query // self.workload.queries_per_list]
            rows = rows_of_slots(slots[: int(self.kv_lens[query])].long(), self.page)
            keys = torch.empty(len(rows), RANK + ROPE, dtype=torch.float32, device=rows.device)
            reference.gather_parts(self.pool, rows, self.fmt, keys[:, :RANK], keys[:, RANK:], 1.0)
            scores = self.q[query].double() @ keys.double().T * SCALE  # [heads, rows]
            self._expected[query, number] = scores.softmax(-1) @ keys[:, :RANK].double()
        return self._expected[query, number]

    def new_out(self) -> torch.Tensor:
        return self.q.new_empty((*self.q.shape[:2], self.fmt.kv_lora_rank))


def _pages_and_sets(workload: Workload, row_bytes: int, device: Any) -> tuple[int, int]:
    """Pages of a pool, including the reserved page, and the number of sets of lists."""
    pages = workload.batch * -(-workload.context // PAGE_SIZE)
    sets = device.sets(workload.rows * row_bytes)
    if workload.pool_tokens:
        available = workload.pool_tokens // PAGE_SIZE
        return available + 1, max(1, min(sets, available // pages))
    # The sets of a sparse workload are different lists over the same contexts.
    return pages * (1 if workload.kind == "sparse" else sets) + 1, sets


def buffer_bytes(workload: Workload, fmt: RowFormat, device: Any) -> int:
    """Device memory of the pool with all layers, and of the lists while they are made."""
    pages, sets = _pages_and_sets(workload, fmt.row_bytes, device)
    lists = sets * workload.rows * 4 + (16 * workload.batch * workload.context)
    return pages * PAGE_SIZE * fmt.row_bytes * workload.layers + lists


def make_problem(workload: Workload, fmt: RowFormat, device: Any) -> Problem:
    """Random inputs on a device; only the rows of one layer are written."""
    pages, sets = _pages_and_sets(workload, fmt.row_bytes, device)
    where = device.device
    generator = torch.Generator(device=where).manual_seed(0)
    placement = RowPlacement(
        KVArrangement(workload.arrangement), workload.layers, pages, PAGE_SIZE, fmt.row_bytes
    )
    buffer = torch.empty(placement.total_bytes, dtype=torch.uint8, device=where)
    pool = placement.layer_view(buffer, workload.layers // 2)
    _fill(pool, placement, fmt, generator)

    of_request = -(-workload.context // PAGE_SIZE)
    # Pages in random order without page 0, as SGLang's allocator returns them after some time.
    different = 1 if workload.kind == "sparse" else sets
    order = torch.randperm(pages - 1, generator=generator, device=where)[
        : different * workload.batch * of_request
    ]
    tables = (order + 1).view(different, workload.batch, of_request).expand(sets, -1, -1)
    if workload.kind == "sparse":
        kv_indices = torch.empty(
            sets, workload.batch, workload.rows_per_list, dtype=torch.int32, device=where
        )
        for number in range(sets):
            keys = torch.rand(workload.batch, workload.context, generator=generator, device=where)
            tokens = keys.topk(workload.rows_per_list, dim=-1).indices
            found = tables[number].gather(1, tokens // PAGE_SIZE)
            kv_indices[number] = (found * PAGE_SIZE + tokens % PAGE_SIZE).int()
    else:
        tokens = torch.arange(PAGE_SIZE, dtype=torch.int32, device=where)
        kv_indices = (tables.int()[..., None] * PAGE_SIZE + tokens).flatten(2)[..., : workload.context]
    of_group = torch.arange(workload.queries_per_list, dtype=torch.int32, device=where)
    counts = workload.rows_per_list - workload.queries_per_list + 1 + of_group
    q = torch.randn(
        workload.queries, workload.heads, RANK + ROPE, generator=generator, device=where, dtype=torch.bfloat16
    )
    return Problem(
        workload, fmt, pool, placement.page_stride, tables.int().contiguous(), kv_indices.contiguous(),
        counts.repeat(workload.batch), q,
    )  # fmt: skip


def _fill(pool: torch.Tensor, placement: RowPlacement, fmt: RowFormat, generator: torch.Generator) -> None:
    values = torch.randn(_BASE_ROWS, RANK + ROPE, generator=generator, device=pool.device).bfloat16()
    base = encode_rows(values[:, :RANK], values[:, RANK:], fmt)
    slots = placement.pages * placement.page_size_tokens
    for first in range(0, slots, _CHUNK_ROWS):
        some = torch.arange(first, min(first + _CHUNK_ROWS, slots), device=pool.device)
        pool[placement.slot_to_row(some)] = base[some % _BASE_ROWS]


def check(problem: Problem, out: torch.Tensor, number: int) -> float:
    """Check some queries of a result with a set of lists; returns the largest relative error.

    WrongResult: if an error is above `ERROR_LIMIT`, or NaN.
    """
    queries = problem.workload.queries
    out = out.view(queries, problem.workload.heads, -1)
    worst = 0.0
    for query in sorted({0, queries // 2, queries - 1})[:_CHECKED_QUERIES]:
        expected = problem.expected(query, number)
        error = (out[query].double() - expected).norm() / expected.norm()
        if not error.item() <= ERROR_LIMIT:
            raise WrongResult(f"query {query}: relative error {error.item():.3g}, limit {ERROR_LIMIT}")
        worst = max(worst, error.item())
    return worst
