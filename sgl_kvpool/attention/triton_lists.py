"""Lists of `mla_decode` and their splits: device functions, and the kernel that merges splits."""

import triton
import triton.language as tl

from sgl_kvpool.codec.triton_scalars import fp32_to

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
#: Pointers whose alignment must not choose another compiled kernel: the second half of a batch that SGLang
#: splits (two-batch overlap) begins at any request.
UNALIGNED = ("kv_lens_ptr", "list_index_ptr")


@triton.jit
def row_count_of(kv_lens_ptr, tokens, list_width):
    """Number of rows that each token attends, clamped to 0..`list_width` before it becomes int32."""
    kv_lens = tl.load(kv_lens_ptr + tokens)
    return tl.minimum(tl.maximum(kv_lens, 0), list_width).to(tl.int32)


@triton.jit
def rows_of_entries(entries, row_count, PAGE: tl.constexpr, PAGE_ROWS: tl.constexpr, DCP_SIZE: tl.constexpr):
    """int64 row numbers of list entries, and a mask of those that are rows of the pool."""
    entries = entries.to(tl.int64)
    rows = entries
    if DCP_SIZE > 1:
        rows = rows // DCP_SIZE  # truncates: -1 gives row 0, which the mask of the entries leaves out
    if PAGE > 0:
        rows = rows // PAGE * PAGE_ROWS + rows % PAGE
    # A row beyond the pool would be outside of its memory. Entries near 2**63 wrap around.
    return rows, (entries >= 0) & (rows >= 0) & (rows < row_count)


@triton.jit
def list_length(kv_lens_ptr, list_index, lists, group, list_width, QUERIES: tl.constexpr):
    """Maximum number of rows that a query of a group attends."""
    length = row_count_of(kv_lens_ptr, group * QUERIES, list_width)
    for query in tl.static_range(1, QUERIES):
        length = tl.maximum(length, row_count_of(kv_lens_ptr, group * QUERIES + query, list_width))
    # A list that does not exist has no rows.
    return tl.where((list_index >= 0) & (list_index < lists), length, 0)


@triton.jit
def rows_per_split(length, splits, BLOCK: tl.constexpr, min_blocks):
    """Rows of every split of a list except the last: whole blocks, at least `min_blocks` of them."""
    blocks = tl.cdiv(length, BLOCK)
    return tl.maximum(tl.cdiv(blocks, splits), min_blocks) * BLOCK


@triton.jit
def list_of(list_index_ptr, group):
    if list_index_ptr is None:
        return group
    else:
        return tl.load(list_index_ptr + group).to(tl.int64)


@triton.jit
def place_of(program, splits, TILES: tl.constexpr, SPLIT: tl.constexpr):
    """(tile, split, group as int64) of a program of a decode kernel.

    The tile varies fastest: the tiles of a list read the same rows at about the same time.
    """
    if SPLIT:
        return program % TILES, program // TILES % splits, (program // (TILES * splits)).to(tl.int64)
    else:
        return program % TILES, 0, (program // TILES).to(tl.int64)


@triton.jit
def rows_of_part(
    kv_lens_ptr, list_index_ptr, lists, list_width, splits, min_blocks, split, group, QUERIES: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """List of a program, its length, and the begin and end of the entries that it attends."""
    list_index = list_of(list_index_ptr, group)
    length = list_length(kv_lens_ptr, list_index, lists, group, list_width, QUERIES)
    if SPLIT:
        per_split = rows_per_split(length, splits, BLOCK, min_blocks)
        begin = split * per_split
        return list_index, length, begin, tl.minimum(begin + per_split, length)
    else:
        return list_index, length, 0, length


@triton.jit(
    do_not_specialize=["lists", "list_width", "splits", "min_blocks", "query_heads"],
    do_not_specialize_on_alignment=UNALIGNED,
)
def merge_kernel(
    partial_ptr,  # fp32 [splits, T, H, R], contiguous
    partial_lse_ptr,  # fp32 [splits, T, H], contiguous
    kv_lens_ptr,
    list_index_ptr,
    out_ptr,  # [T, H, R], written
    lse_ptr,  # fp32 [T, H], written
    lists,
    list_width,
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
    length = list_length(kv_lens_ptr, list_index, lists, group, list_width, QUERIES)
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
