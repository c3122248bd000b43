"""Runs the kernels of `mla_decode` with any tile and number of splits, on CPU tensors."""

import torch

from sgl_kvpool.attention import decode_checks
from sgl_kvpool.attention.decode_config import DecodeConfig, partial_elements
from sgl_kvpool.attention.decode_launch import launch
from sgl_kvpool.codec import checks


def run(case, splits=1, min_blocks=1, out=None, out_dtype=torch.float32, partial=None, *, tile):
    """(out, lse) of the kernels for a number of splits; the workspace, `partial` if given, has NaN before."""
    q, q_rope = decode_checks.queries(case.q, case.options.get("q_rope"), case.pool, case.fmt)
    decode_checks.kernel_limits(case.pool, case.fmt)
    tokens, heads, rank = q.shape
    tiles = -(-heads * case.queries_per_list // tile.query_heads)
    config = DecodeConfig(tile, tiles, splits, min_blocks)
    if partial is None:
        partial = torch.empty(partial_elements(case.fmt, tokens, heads, splits))
    partial.fill_(torch.nan)
    if out is None:
        out = torch.full((tokens, heads, rank), torch.nan, dtype=out_dtype)
    lse = torch.full((tokens, heads), torch.nan)
    params = decode_checks.DecodeParams(
        q=q, q_rope=q_rope, row_buffer=case.pool, kv_indices=case.kv_indices, kv_lens=case.kv_lens,
        list_index=case.list_index, fmt=case.fmt, scale=case.scale,
        k_scale=checks.scale(case.k_scale, case.fmt), queries_per_list=case.queries_per_list,
        page=decode_checks.page(case.page), out=out, lse=lse,
    )  # fmt: skip
    launch(params, partial, config)
    return out, lse
