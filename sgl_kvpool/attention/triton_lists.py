"""Device functions of `mla_decode`'s kernels for their lists."""

import triton
import triton.language as tl

__all__ = [
    "list_length",
    "list_of",
    "place_of",
    "row_count_of",
    "rows_of_entries",
    "rows_of_part",
    "rows_per_split",
]


@triton.jit
def row_count_of(counts_ptr, tokens, bound):
    """Number of rows that each token attends, clamped to 0..`bound` before it becomes int32."""
    counts = tl.load(counts_ptr + tokens)
    return tl.minimum(tl.maximum(counts, 0), bound).to(tl.int32)


@triton.jit
def rows_of_entries(entries, row_count, PAGE: tl.constexpr, PAGE_ROWS: tl.constexpr):
    """int64 row numbers of list entries, and a mask of those that are rows of the pool."""
    entries = entries.to(tl.int64)
    if PAGE > 0:
        rows = entries // PAGE * PAGE_ROWS + entries % PAGE
    else:
        rows = entries
    # A row beyond the pool would be outside of its memory. Entries near 2**63 wrap around.
    return rows, (entries >= 0) & (rows >= 0) & (rows < row_count)


@triton.jit
def list_length(counts_ptr, list_index, lists, group, bound, QUERIES: tl.constexpr):
    """Maximum number of rows that a query of a group attends."""
    length = row_count_of(counts_ptr, group * QUERIES, bound)
    for query in tl.static_range(1, QUERIES):
        length = tl.maximum(length, row_count_of(counts_ptr, group * QUERIES + query, bound))
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
    counts_ptr, list_index_ptr, lists, bound, splits, min_blocks, split, group, QUERIES: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """(list, its length, begin, end) of one split of a group's list; an empty split has begin >= length."""
    list_index = list_of(list_index_ptr, group)
    length = list_length(counts_ptr, list_index, lists, group, bound, QUERIES)
    if SPLIT:
        per_split = rows_per_split(length, splits, BLOCK, min_blocks)
        begin = split * per_split
        return list_index, length, begin, tl.minimum(begin + per_split, length)
    else:
        return list_index, length, 0, length
