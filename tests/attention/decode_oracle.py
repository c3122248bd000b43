"""What `mla_decode` computes, in float64 and one query at a time."""

from __future__ import annotations

import torch

from sgl_kvpool.codec import reference
from sgl_kvpool.layout import RowFormat


def rows_of_entries(entries: torch.Tensor, page: tuple[int, ...] | None) -> torch.Tensor:
    """int64 row numbers of the entries of a list; negative entries, which are not rows, stay negative."""
    entries = entries.long()
    if page is None:
        return entries
    page_size_tokens, rows_per_page, slots_per_row = (*page, 1)[:3]
    own = entries.div(slots_per_row, rounding_mode="floor")
    pages = own.div(page_size_tokens, rounding_mode="floor")
    rows = pages * rows_per_page + own % page_size_tokens
    return torch.where(entries < 0, entries, rows)


def mla_decode_oracle(
    q: torch.Tensor,
    pool: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_lens: torch.Tensor,
    fmt: RowFormat,
    scale: float,
    k_scale: float = 1.0,
    *,
    list_index: torch.Tensor | None = None,
    queries_per_list: int = 1,
    page: tuple[int, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `sgl_kvpool.attention.mla_decode`, on tensors of any device; nothing is checked.

    Returns
    -------
    out : Tensor [T, H, R], float64
        0 for a query without rows.
    lse : Tensor [T, H], float64
        Natural logarithm of the sum of the exponentials of the scores; -inf for a query without rows.
    """
    tokens, heads, _ = q.shape
    rank = fmt.kv_lora_rank
    out = torch.zeros(tokens, heads, rank, dtype=torch.float64, device=q.device)
    lse = torch.full((tokens, heads), float("-inf"), dtype=torch.float64, device=q.device)
    for token in range(tokens):
        group = token // queries_per_list
        chosen = group if list_index is None else int(list_index[group])
        if not 0 <= chosen < len(kv_indices):
            continue
        count = min(max(int(kv_lens[token]), 0), kv_indices.shape[1])
        rows = rows_of_entries(kv_indices[chosen, :count], page)
        rows = rows[(rows >= 0) & (rows < len(pool))]
        if len(rows) == 0:
            continue
        values = torch.empty(len(rows), fmt.head_dim, dtype=torch.float32, device=q.device)
        rope = values[:, rank:] if fmt.rope is not None else None
        reference.gather_parts(pool, rows, fmt, values[:, :rank], rope, k_scale)
        keys = values.double()  # [rows, R + P]
        scores = q[token].double() @ keys.T * scale  # [H, rows]
        lse[token] = scores.logsumexp(-1)
        out[token] = scores.softmax(-1) @ keys[:, :rank]
    return out, lse
