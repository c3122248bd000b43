"""Attention over stored rows on machines without a GPU: in C++, or in torch where nothing compiles.

For each request it gets a list of row numbers, reads and decodes only these rows, and attends them. Time and
traffic are proportional to the rows in the lists, not to the pool. Torch decodes long lists in chunks into a
workspace that is allocated once; the results of chunks are merged by log-sum-exp.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_kvpool.attention import compiled
from sgl_kvpool.codec import gather_rows
from sgl_kvpool.layout import RowFormat

#: Number of rows decoded at a time. 32768 rows of 576 float32 values are 75 MB.
WORKSPACE_TOKENS = 32768

#: Maximum size of one block of scores, `[queries, heads, rows]` float32; a block has at least one query.
_SCORE_BYTES = 64 << 20


@dataclass(frozen=True)
class Request:
    """One request of a batch as the attention code sees it; numbers are host integers."""

    #: Position of its queries among the batch's tokens.
    query_start: int
    query_count: int
    #: Position of its first query in the sequence; query `i` attends rows up to `first_position + i`.
    first_position: int
    #: Position of its stored rows, tokens 0, 1, ... of the sequence, in the batch's list of row numbers.
    rows_start: int
    rows_count: int


@dataclass(frozen=True)
class _Part:
    """A run of one request's rows inside one chunk of the list of row numbers."""

    request: Request
    position: int  # of the first row in the request's sequence
    offset: int  # of the first row in the chunk
    count: int


def _chunks(requests: Sequence[Request], chunk_tokens: int) -> list[tuple[int, int, list[_Part]]]:
    """Split the list of row numbers into chunks `(start, count, parts)` of at most `chunk_tokens`."""
    total = max((r.rows_start + r.rows_count for r in requests), default=0)
    chunks: list[tuple[int, int, list[_Part]]] = [
        (start, min(chunk_tokens, total - start), []) for start in range(0, total, chunk_tokens)
    ]
    for request in requests:
        done = 0
        while done < request.rows_count:
            at = request.rows_start + done
            start, _, parts = chunks[at // chunk_tokens]
            count = min(request.rows_count - done, start + chunk_tokens - at)
            parts.append(_Part(request, done, at - start, count))
            done += count
    return chunks


def attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    v_dim: int,
    scale: float,
    *,
    limits: torch.Tensor,
    present: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries `[queries, heads, D]` over decoded rows `[rows, D]`, in float32.

    The first `v_dim` values of a row are its V. Query i attends the first `limits[i]` rows (int64; none if
    that is 0 or negative), except those whose `present` is False. Returns the result `[queries, heads,
    v_dim]`, 0 for a query without rows, and the natural logarithm of the sum of exponentials `[queries,
    heads]`, -inf for such a query.
    """
    queries, heads, _ = q.shape
    rows = kv.shape[0]
    out = q.new_empty((queries, heads, v_dim))
    lse = q.new_empty((queries, heads))
    block = max(1, _SCORE_BYTES // (4 * heads * max(rows, 1)))
    value = kv[:, :v_dim]
    for begin in range(0, queries, block):
        end = min(begin + block, queries)
        scores = torch.matmul(q[begin:end], kv.T).mul_(scale)  # [queries, heads, rows]
        if int(limits[begin:end].min()) < rows:  # a query of the block does not attend the last row
            hidden = torch.arange(rows) >= limits[begin:end, None]  # [queries, rows]
            scores.masked_fill_(hidden[:, None, :], float("-inf"))
        if present is not None:
            scores.masked_fill_(~present, float("-inf"))
        lse[begin:end] = torch.logsumexp(scores, dim=-1)
        # exp(-inf - -inf) would be NaN: a query without rows gets weights 0 instead.
        shift = lse[begin:end].masked_fill(lse[begin:end] == float("-inf"), 0.0)
        weights = scores.sub_(shift[..., None]).exp_()
        torch.matmul(weights, value, out=out[begin:end])
    return out, lse


def causal_limits(first_position: int, queries: int) -> torch.Tensor:
    """Number of rows that each query of a causal chunk attends, `[queries]` int64."""
    return torch.arange(first_position + 1, first_position + 1 + queries)


def merge(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Merge attention over other rows into `out` and `lse`, in place; shapes as `attend` returns.

    The weights are `exp(lse)` of both sides; a side without rows has lse -inf and weight 0.
    """
    total = torch.logaddexp(lse, other_lse)
    shift = total.masked_fill(total == float("-inf"), 0.0)
    out.mul_((lse - shift).exp_()[..., None])
    out.add_(other * (other_lse - shift).exp_()[..., None])
    lse.copy_(total)


class RowReader:
    """Attends stored rows of one pool geometry; owns the workspace into which `workspace_tokens` rows are
    decoded at a time.
    """

    def __init__(self, fmt: RowFormat, workspace_tokens: int = WORKSPACE_TOKENS):
        if workspace_tokens < 1:
            raise ValueError(f"workspace_tokens={workspace_tokens} is not positive")
        self.fmt = fmt
        self.workspace = torch.empty((workspace_tokens, fmt.head_dim), dtype=torch.float32)

    @staticmethod
    def workspace_bytes(fmt: RowFormat, workspace_tokens: int = WORKSPACE_TOKENS) -> int:
        """Bytes of the workspace, for the memory budget."""
        return workspace_tokens * fmt.head_dim * torch.float32.itemsize

    def plan(self, requests: Sequence[Request]) -> list[tuple[int, int, list[_Part]]]:
        """Chunks to read for a batch; the same for every layer of a step."""
        return _chunks(requests, self.workspace.shape[0])

    def attend(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        kv_indices: torch.Tensor,
        plan: list[tuple[int, int, list[_Part]]],
        scale: float,
        *,
        k_scale: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of a batch's queries `[tokens, heads, R + P]`, of any float dtype, over its stored rows.

        Returns what `attend` does, in float32.

        `pool` is `[slots, row_bytes]` uint8 with any row stride, `kv_indices` `[rows]` int32 or int64 the
        rows of all requests, one request after the other, and `plan` the result of `plan`.
        """
        fmt, (tokens, heads, _) = self.fmt, q.shape
        out = q.new_zeros((tokens, heads, fmt.kv_lora_rank), dtype=torch.float32)
        lse = q.new_full((tokens, heads), float("-inf"), dtype=torch.float32)
        if compiled.module() is not None:
            # A request's parts follow one another in its list.
            requests = list(dict.fromkeys(part.request for _, _, parts in plan for part in parts))
            limits = q.new_zeros(tokens, dtype=torch.int64)
            for one in requests:
                reached = causal_limits(one.first_position, one.query_count).clamp(0, one.rows_count)
                limits[one.query_start : one.query_start + one.query_count] = reached
            lists = torch.tensor([(one.rows_start, one.query_start, one.query_count) for one in requests])
            if requests:
                nope, rope = q.split([fmt.kv_lora_rank, fmt.qk_rope_head_dim], dim=-1)
                compiled.attend_rows(
                    out, lse, nope, rope, pool, kv_indices, lists, limits, fmt, scale, k_scale
                )
            return out, lse
        q = q.float()
        for start, count, parts in plan:
            kv = self.workspace[:count]
            gather_rows(pool, kv_indices[start : start + count], fmt, torch.float32, out=kv, k_scale=k_scale)
            for part in parts:
                request = part.request
                queries = slice(request.query_start, request.query_start + request.query_count)
                partial, partial_lse = attend(
                    q[queries],
                    kv[part.offset : part.offset + part.count],
                    fmt.kv_lora_rank,
                    scale,
                    limits=causal_limits(request.first_position - part.position, request.query_count),
                )
                merge(out[queries], lse[queries], partial, partial_lse)
        return out, lse
