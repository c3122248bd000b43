"""Attention over lists of stored rows on machines without a GPU: in C++, or in torch where nothing compiles.

g++ compiles at first use, in 20 s. Only the rows of the lists are read and decoded: time and traffic are
proportional to them, not to the pool.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch

from sgl_kvpool import metrics
from sgl_kvpool.codec import gather_rows
from sgl_kvpool.codec.compiled import row_layout
from sgl_kvpool.compiler import Module, cpu_flags
from sgl_kvpool.layout import RowFormat
from sgl_kvpool.memory.arrangement import PageStride, rows_of_slots

_SOURCE = Path(__file__).resolve().parent / "csrc" / "cpu_attention.cpp"
#: Number of rows that torch decodes at a time: 9 MB of float32.
_CHUNK_ROWS = 4096

#: Maximum size of one block of scores, `[queries, heads, rows]` float32; a block has at least one query.
_SCORE_BYTES = 64 << 20


def capability() -> str:
    """Torch's name for this CPU's instructions, or the one of `cpu_flags` with bf16 products."""
    found = torch.backends.cpu.get_cpu_capability()
    return "AVX512_BF16" if found == "AVX512" and torch.cpu.get_capabilities()["avx512_bf16"] else found


@cache
def module(*, required: bool = False) -> Any:
    """The compiled attention. If the build fails: its error if `required`, else None, logged and counted."""
    try:
        return Module("sgl_kvpool_cpu_attention", _SOURCE, cpu_flags(capability(), exact=False)).load()
    except Exception as error:  # no compiler, no tvm-ffi, a cache folder that cannot be written
        if required:
            raise
        metrics.failed("attention_build", "attention on CPUs", error=error)
        return None


def attend_lists(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    q_rope: torch.Tensor | None,
    row_buffer: torch.Tensor,
    kv_indices: torch.Tensor,
    lists: torch.Tensor,
    kv_lens: torch.Tensor,
    fmt: RowFormat,
    scale: float,
    k_scale: float = 1.0,
    page: PageStride | None = None,
    *,
    batch_invariant: bool = False,
) -> None:
    """Attention of queries `[T, H, R]` and `[T, H, P]` over lists of rows; results are as of `mla_decode`.

    `lists` `[N, 3]` int64 holds for each list the element of `kv_indices` (int32 or int64, its last stride)
    with which it begins, its first token and its number of tokens; every token has a list. Token t attends
    the first `kv_lens[t]` entries (int64) of its list. `q`, `q_rope` (None if P is 0) and `out` are of any
    float dtype.
    `batch_invariant`: the bits of a list of one token depend on its own entries alone, not on threads either.
    IndexError for a row beyond the pool.
    """
    page = page or PageStride(1, 1)
    compiled = module()
    if compiled is not None:
        # C++ has float16 on few compilers. Copies are contiguous, also of heads that overlap.
        dtype = q.dtype if q.dtype is torch.bfloat16 else torch.float32
        written = out if out.dtype in (torch.bfloat16, torch.float32) else out.float()
        rope = q[..., :0] if q_rope is None else q_rope
        compiled.attend_rows(
            written, lse, q.detach().to(dtype, memory_format=torch.contiguous_format),
            rope.detach().to(dtype, memory_format=torch.contiguous_format), row_buffer, kv_indices, lists,
            kv_lens, row_layout(fmt), scale, k_scale, *page, batch_invariant, torch.get_num_threads(),
        )  # fmt: skip
        if written is not out:
            out.copy_(written)
        return
    queries = q.float() if q_rope is None else torch.cat([q, q_rope], -1).float()
    step = kv_indices.stride(-1)
    for first, token, tokens in lists.tolist():
        if not tokens:
            continue
        of_list = slice(token, token + tokens)
        results = queries.new_zeros((tokens, *out.shape[1:]))
        sums = queries.new_full((tokens, out.shape[1]), float("-inf"))
        length = int(kv_lens[of_list].max())
        for begin in range(0, length, _CHUNK_ROWS):
            place = kv_indices.storage_offset() + first + begin * step
            slots = kv_indices.as_strided((min(_CHUNK_ROWS, length - begin),), (step,), place)
            rows = rows_of_slots(slots.long().clamp(max=1 << 40), page)  # beyond any pool; products fit
            kv = gather_rows(row_buffer, rows, fmt, torch.float32, k_scale=k_scale)
            left = kv_lens[of_list] - begin
            part = attend(queries[of_list], kv, fmt.kv_lora_rank, scale, kv_lens=left, present=rows >= 0)
            merge(results, sums, *part)
        out[of_list], lse[of_list] = results.to(out.dtype), sums


def attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    v_dim: int,
    scale: float,
    *,
    kv_lens: torch.Tensor,
    present: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries `[queries, heads, D]` over decoded rows `[rows, D]`, in float32.

    The first `v_dim` values of a row are its V. Query i attends the first `kv_lens[i]` rows (int64; none if
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
        if int(kv_lens[begin:end].min()) < rows:  # a query of the block does not attend the last row
            hidden = torch.arange(rows) >= kv_lens[begin:end, None]  # [queries, rows]
            scores.masked_fill_(hidden[:, None, :], float("-inf"))
        if present is not None:
            scores.masked_fill_(~present, float("-inf"))
        lse[begin:end] = torch.logsumexp(scores, dim=-1)
        # exp(-inf - -inf) would be NaN: a query without rows gets weights 0 instead.
        shift = lse[begin:end].masked_fill(lse[begin:end] == float("-inf"), 0.0)
        weights = scores.sub_(shift[..., None]).exp_()
        torch.matmul(weights, value, out=out[begin:end])
    return out, lse


def merge(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Merge attention over other rows into `out` and `lse`, in place; shapes as `attend` returns.

    The weights are `exp(lse)` of both sides; a side without rows has lse -inf and weight 0.
    """
    total = torch.logaddexp(lse, other_lse)
    shift = total.masked_fill(total == float("-inf"), 0.0)
    out.mul_((lse - shift).exp_()[..., None])
    out.add_(other * (other_lse - shift).exp_()[..., None])
    lse.copy_(total)
