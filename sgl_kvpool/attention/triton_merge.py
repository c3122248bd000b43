"""The kernel of `mla_decode` that merges the results of the splits of a list."""

import triton
import triton.language as tl

from sgl_kvpool.attention.triton_lists import list_length, list_of, rows_per_split
from sgl_kvpool.codec.triton_scalars import fp32_to

__all__ = ["merge_kernel"]

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["lists", "bound", "splits", "min_blocks", "query_heads"])
def merge_kernel(
    partial_ptr,  # fp32 [splits, T, H, R], contiguous
    partial_lse_ptr,  # fp32 [splits, T, H], contiguous
    counts_ptr,
    list_index_ptr,
    out_ptr,  # [T, H, R], written
    lse_ptr,  # fp32 [T, H], written
    lists,
    bound,
    splits,
    min_blocks,
    query_heads,  # T * H
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,  # this, `splits` and `min_blocks` as in `decode_kernel`
    MOST: tl.constexpr,  # maximum number of splits, a power of two
    TOGETHER: tl.constexpr,  # splits added at a time
    NATIVE: tl.constexpr,
):
    """Merge `CHUNK` values of one query head; weights are the exponentials of each split's lse."""
    query_head = tl.program_id(0).to(tl.int64)
    token = query_head // HEADS
    head = query_head % HEADS
    group = token // QUERIES
    list_index = list_of(list_index_ptr, group)
    length = list_length(counts_ptr, list_index, lists, group, bound, QUERIES)
    per_split = rows_per_split(length, splits, BLOCK, min_blocks)
    filled = tl.cdiv(length, per_split)  # later splits were not written
    if filled == 1:
        return  # with one split, its program has written the results

    split = tl.arange(0, MOST)
    lse = tl.load(
        partial_lse_ptr + split.to(tl.int64) * query_heads + query_head,
        mask=split < filled,
        other=float("-inf"),
    )
    top = tl.max(lse, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2((lse - shift) * _LOG2_E), 0)
    normal = 1.0 / tl.where(total == 0, 1.0, total)  # total is 0 without rows; NaN stays NaN

    at = out_ptr + token * out_token_stride + head * out_head_stride
    first = tl.program_id(1) * CHUNK
    values = first + tl.arange(0, CHUNK)
    sums = tl.zeros([CHUNK], tl.float32)
    for start in range(0, filled, TOGETHER):
        some = start + tl.arange(0, TOGETHER)
        there = some < filled
        place = some.to(tl.int64) * query_heads + query_head
        # Loaded again, because a register array cannot be indexed.
        some_lse = tl.load(partial_lse_ptr + place, mask=there, other=float("-inf"))
        weight = tl.exp2((some_lse - shift) * _LOG2_E) * normal
        x = tl.load(partial_ptr + place[:, None] * R + values[None, :], mask=there[:, None], other=0.0)
        sums += tl.sum(x * weight[:, None], 0)
    tl.store(at + values, fp32_to(sums, out_ptr.dtype.element_ty, NATIVE))
    # The programs of all chunks compute the same lse; one writes it.
    lse_at = lse_ptr + token * lse_token_stride + head * lse_head_stride
    merged = shift + tl.where(total == 0, float("-inf"), tl.log2(total) * _LN_2)
    tl.store(lse_at, merged, mask=first == 0)
