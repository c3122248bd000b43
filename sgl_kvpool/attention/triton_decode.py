"""The kernel of `mla_decode` that reads and attends rows; the kernel in `triton_lists` merges splits.

A program of `decode_kernel` takes one list of rows, one tile of its query heads (of all its queries) and one
split of the list, and processes `BLOCK` rows of that split at a time. A row is read once for scores and
values. Matrices are transposed: scores are [rows, query heads] = K q^T, results are [values, query heads] +=
V^T P. Rows then fill the 64-row side that Hopper's warp group instruction requires, and query heads fill the
other side, which may be as small as 8: nothing is wasted for a model with 16 heads.

The latent is processed in chunks of `CHUNK` values, each with a separate accumulator. `fp8_block_scale` has
one chunk per tile; the tile's scale is multiplied into the scores and weights of the chunk instead of its
values.

Tuples grow by inline `t + (x,)`: in a helper function, Triton 3.6 would confuse a tuple of tensors with a
tuple of tuples, because it gives both the same mangled name.

Bounds of splits are computed on the device from the counts, and launches depend on shapes only, so that a
captured CUDA graph can be replayed for other lists.
"""

import triton
import triton.language as tl

from sgl_kvpool.attention.triton_lists import UNALIGNED, place_of, row_count_of, rows_of_entries, rows_of_part
from sgl_kvpool.attention.triton_operands import (
    load_queries,
    load_stored,
    operand_factor,
    operand_of,
    permuted,
    rounded_operand,
    side_by_side,
)
from sgl_kvpool.codec.triton_scalars import fp32_to

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _row_numbers(entries, row_count, PAGE: tl.constexpr, PAGE_ROWS: tl.constexpr, DCP_SIZE: tl.constexpr):
    """int64 row numbers of list entries, 0 for entries without a row, and a mask of those with a row."""
    rows, is_row = rows_of_entries(entries, row_count, PAGE, PAGE_ROWS, DCP_SIZE)
    return tl.where(is_row, rows, 0), is_row


@triton.jit
def _load_entries(kv_indices, start, end, kv_indices_stride, BLOCK: tl.constexpr):
    """Entries `start` to `start + BLOCK` of a list, [BLOCK, 1]; -1 from `end` on."""
    position = start + tl.arange(0, BLOCK)[:, None]
    return tl.load(kv_indices + position.to(tl.int64) * kv_indices_stride, mask=position < end, other=-1)


@triton.jit
def _load_block(
    entries, rows_ptr, row_count, ROW_STRIDE: tl.constexpr, PAGE: tl.constexpr, PAGE_ROWS: tl.constexpr,
    DCP_SIZE: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, NOPE: tl.constexpr, NOPE_AT: tl.constexpr, SCALE: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, SCALE_AT: tl.constexpr, ROPE: tl.constexpr, ROPE_AT: tl.constexpr,
    SLICE: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Stored bytes of the rows of entries [BLOCK, 1]: every slice, then the rope, if any.

    Also returns a mask of the entries with a row, bool [BLOCK, 1]; the others give zeros.
    """
    number, live = _row_numbers(entries, row_count, PAGE, PAGE_ROWS, DCP_SIZE)
    rows = tl.multiple_of(rows_ptr + number * ROW_STRIDE, [16, 16])
    stored = ()
    for first in tl.static_range(0, R, SLICE):
        part = load_stored(rows, live, first, SLICE, NOPE, NOPE_AT, SCALE, SCALE_BLOCK, SCALE_AT, DIRECT)
        stored = stored + (part,)  # noqa: RUF005
    if P > 0:
        stored = stored + (load_stored(rows, live, 0, P, ROPE, ROPE_AT, "", 0, 0, DIRECT),)  # noqa: RUF005
    return stored, live


@triton.jit
def _operands_of(
    stored, R: tl.constexpr, P: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, CHUNK: tl.constexpr,
    SLICE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Operands [BLOCK, CHUNK] of every chunk, then [BLOCK, P] of the rope, if any."""
    operands = ()
    for s in tl.static_range(R // SLICE):
        operands = operands + (operand_of(stored[s], NOPE, NATIVE),)  # noqa: RUF005
    # Adjacent slices are joined until they are chunks: one, two or four slices each.
    for doubling in tl.static_range(0, 2):
        if SLICE << doubling < CHUNK:
            wider = ()
            for pair in tl.static_range(R // SLICE >> (doubling + 1)):
                wider = wider + (side_by_side(operands[2 * pair], operands[2 * pair + 1]),)  # noqa: RUF005
            operands = wider
    if P > 0:
        operands = operands + (operand_of(stored[R // SLICE], ROPE, NATIVE),)  # noqa: RUF005
    return operands


@triton.jit
def _scales_of(stored, R: tl.constexpr, CHUNK: tl.constexpr, TILE_SCALES: tl.constexpr):
    """Tile scales, float32 [BLOCK, 1] of every chunk (one slice); empty for layouts without tile scales."""
    scales = ()
    if TILE_SCALES:
        for c in tl.static_range(R // CHUNK):
            scales = scales + (stored[c][1],)  # noqa: RUF005
    return scales


@triton.jit
def _seen(start, limit, live, QUERIES: tl.constexpr, BLOCK_H: tl.constexpr):
    """Mask of the rows of a block that each query head attends, bool [BLOCK, BLOCK_H]."""
    BLOCK: tl.constexpr = live.shape[0]
    if QUERIES == 1:
        return tl.broadcast_to(live, [BLOCK, BLOCK_H])  # `live` ends at the only query's count
    else:
        return (start + tl.arange(0, BLOCK)[:, None] < limit) & live


@triton.jit
def _attend_block(
    state,  # (largest score [BLOCK_H] in powers of two, sum of weights [BLOCK_H], accumulators)
    q_nope,  # [CHUNK, BLOCK_H] of every chunk
    q_rope,  # [P, BLOCK_H], in a tuple
    operands,
    scales,
    seen,  # bool [BLOCK, BLOCK_H]
    score_scale,
    R: tl.constexpr,
    P: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Add a block of rows to the state."""
    top, total, accumulators = state
    CHUNKS: tl.constexpr = R // CHUNK
    scores = tl.zeros(seen.shape, tl.float32)
    if P > 0:
        scores = tl.dot(operands[CHUNKS], q_rope[0], scores)
    for c in tl.static_range(CHUNKS):
        if TILE_SCALES:
            scores += tl.dot(operands[c], q_nope[c]) * scales[c]
        else:
            scores = tl.dot(operands[c], q_nope[c], scores)

    scores = tl.where(seen, scores * score_scale, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 0))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen: exp2(-inf - 0) = 0
    weights = tl.exp2(scores - shift[None, :])
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(weights, 0)

    sums = ()
    for c in tl.static_range(CHUNKS):
        if TILE_SCALES:
            factor = rounded_operand(weights * scales[c], NATIVE)
        else:
            factor = rounded_operand(weights, NATIVE)
        sum_c = tl.dot(tl.trans(operands[c]), factor, accumulators[c] * decay[None, :])
        sums = sums + (sum_c,)  # noqa: RUF005
    return new_top, total, sums


@triton.jit
def _write(
    at,  # pointers [BLOCK_H] to each query head's first value
    lse_at,  # [BLOCK_H]
    exists,
    normal,  # [BLOCK_H]
    lse,
    accumulators,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    NOPE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Write the normalised results of a program."""
    for c in tl.static_range(R // CHUNK):
        values = c * CHUNK + tl.arange(0, CHUNK)[:, None]
        x = permuted(accumulators[c] * normal[None, :], NOPE)
        tl.store(at[None, :] + values, fp32_to(x, at.dtype.scalar.element_ty, NATIVE), mask=exists[None, :])
    tl.store(lse_at, lse, mask=exists)


# Arguments that differ between batches are not specialised, so that no batch size needs another compilation.
@triton.jit(
    do_not_specialize=["row_count", "lists", "list_width", "splits", "min_blocks", "query_heads"],
    do_not_specialize_on_alignment=UNALIGNED,
)
def decode_kernel(
    q_ptr,  # bf16 or fp16
    q_rope_ptr,  # of the same type; None if P is 0
    rows_ptr,  # uint8
    kv_indices_ptr,  # int32 or int64 [lists, list_width]
    kv_lens_ptr,  # int32 or int64 [T]
    list_index_ptr,  # int32 or int64 [groups], or None
    out_ptr,  # [T, H, R], written for lists with one split
    lse_ptr,  # fp32 [T, H], written for lists with one split
    partial_ptr,  # fp32 [splits, T, H, R], contiguous, written for lists with several splits
    partial_lse_ptr,  # fp32 [splits, T, H], contiguous, written for lists with several splits
    row_count,
    lists,
    list_width,
    splits,
    min_blocks,  # minimum number of blocks of every split but a list's last
    query_heads,  # T * H
    q_token_stride,  # strides count elements
    q_head_stride,
    q_rope_token_stride,
    q_rope_head_stride,
    kv_indices_list_stride,
    kv_indices_stride,
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    score_scale,  # factor of the dot products: softmax scale, k_scale and fixed factors
    value_scale,  # factor of the weighted sums: k_scale and fixed factors
    ROW_STRIDE: tl.constexpr,  # bytes, a multiple of 16
    PAGE: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    DCP_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,  # queries of a group, which share a list
    R: tl.constexpr,
    P: tl.constexpr,
    NOPE: tl.constexpr,
    NOPE_AT: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    SCALE_AT: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_AT: tl.constexpr,
    CHUNK: tl.constexpr,  # latent values of a product and its accumulator
    SLICE: tl.constexpr,  # latent values per load
    BLOCK: tl.constexpr,  # rows at a time
    BLOCK_H: tl.constexpr,  # query heads of a program
    SPLIT: tl.constexpr,  # whether lists may have several splits, which the merge kernel joins
    AHEAD: tl.constexpr,  # whether the next block is loaded before a block is attended, and decoded after
    NATIVE: tl.constexpr,
):
    """Attend one split of one list for a tile of query heads; writes normalised results and their lse."""
    TILES: tl.constexpr = (QUERIES * HEADS + BLOCK_H - 1) // BLOCK_H
    TILE_SCALES: tl.constexpr = SCALE == "fp32"
    if TILE_SCALES:
        tl.static_assert(CHUNK == SCALE_BLOCK)
        tl.static_assert(SLICE == CHUNK)
    DIRECT: tl.constexpr = NATIVE and not AHEAD
    tile, split, group = place_of(tl.program_id(0), splits, TILES, SPLIT)
    list_index, length, begin, end = rows_of_part(
        kv_lens_ptr, list_index_ptr, lists, list_width, splits, min_blocks, split, group,
        QUERIES, BLOCK, SPLIT,
    )  # fmt: skip
    if SPLIT and begin >= length:
        return  # an empty split, which the merge skips; if not SPLIT, its result is written below

    query_head = tile * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    exists = query_head < QUERIES * HEADS
    token = group * QUERIES + tl.where(exists, query_head // HEADS, 0)
    head = query_head % HEADS
    limit = tl.minimum(row_count_of(kv_lens_ptr, token, list_width), length)[None, :]  # [1, BLOCK_H]

    # Queries, transposed: [CHUNK, BLOCK_H] of every chunk and [P, BLOCK_H].
    q_nope = ()
    at = (q_ptr + token * q_token_stride + head * q_head_stride)[None, :]
    for first in tl.static_range(0, R, CHUNK):
        part = load_queries(at, exists[None, :], first, CHUNK, NOPE, 1.0, NATIVE)
        q_nope = q_nope + (part,)  # noqa: RUF005
    q_rope = ()
    if P > 0:
        at = (q_rope_ptr + token * q_rope_token_stride + head * q_rope_head_stride)[None, :]
        # Products of latent and rope are added up, so the rope's queries carry the latent's factor.
        part = load_queries(at, exists[None, :], 0, P, ROPE, operand_factor(NOPE), NATIVE)
        q_rope = q_rope + (part,)  # noqa: RUF005

    accumulators = ()
    for _first in tl.static_range(0, R, CHUNK):
        accumulators = accumulators + (tl.zeros([CHUNK, BLOCK_H], tl.float32),)  # noqa: RUF005
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)  # largest score so far, in powers of two
    total = tl.zeros([BLOCK_H], tl.float32)
    kv_indices = kv_indices_ptr + list_index * kv_indices_list_stride

    state = (top, total, accumulators)
    if AHEAD:
        # Rows are loaded one block ahead, row numbers two blocks ahead. Operands are passed from one
        # iteration to the next, because Triton puts the first operand of a product into shared memory only if
        # it comes from a load or an earlier iteration. Otherwise the first operand of the scores would be in
        # registers, loaded from a second copy of the rows in shared memory.
        entries = _load_entries(kv_indices, begin, end, kv_indices_stride, BLOCK)
        stored, live = _load_block(
            entries, rows_ptr, row_count, ROW_STRIDE, PAGE, PAGE_ROWS, DCP_SIZE, R, P, NOPE, NOPE_AT, SCALE,
            SCALE_BLOCK, SCALE_AT, ROPE, ROPE_AT, SLICE, DIRECT,
        )  # fmt: skip
        entries = _load_entries(kv_indices, begin + BLOCK, end, kv_indices_stride, BLOCK)
        operands = _operands_of(stored, R, P, NOPE, ROPE, CHUNK, SLICE, NATIVE)
        scales = _scales_of(stored, R, CHUNK, TILE_SCALES)
        for start in range(begin, end, BLOCK):
            # The stored bytes of the next block must not be in registers together with these operands.
            tl.debug_barrier()
            stored, next_live = _load_block(
                entries, rows_ptr, row_count, ROW_STRIDE, PAGE, PAGE_ROWS, DCP_SIZE, R, P, NOPE, NOPE_AT,
                SCALE, SCALE_BLOCK, SCALE_AT, ROPE, ROPE_AT, SLICE, DIRECT,
            )  # fmt: skip
            entries = _load_entries(kv_indices, start + 2 * BLOCK, end, kv_indices_stride, BLOCK)
            seen = _seen(start, limit, live, QUERIES, BLOCK_H)
            state = _attend_block(
                state, q_nope, q_rope, operands, scales, seen, score_scale, R, P, CHUNK, TILE_SCALES, NATIVE
            )
            operands = _operands_of(stored, R, P, NOPE, ROPE, CHUNK, SLICE, NATIVE)
            scales = _scales_of(stored, R, CHUNK, TILE_SCALES)
            live = next_live
    else:
        # The stored bytes are operands, and Triton's pipeline copies them ahead into shared memory.
        for start in range(begin, end, BLOCK):
            stored, live = _load_block(
                _load_entries(kv_indices, start, end, kv_indices_stride, BLOCK), rows_ptr, row_count,
                ROW_STRIDE, PAGE, PAGE_ROWS, DCP_SIZE, R, P, NOPE, NOPE_AT, SCALE, SCALE_BLOCK, SCALE_AT,
                ROPE, ROPE_AT, SLICE, DIRECT,
            )  # fmt: skip
            operands = _operands_of(stored, R, P, NOPE, ROPE, CHUNK, SLICE, NATIVE)
            seen = _seen(start, limit, live, QUERIES, BLOCK_H)
            state = _attend_block(
                state, q_nope, q_rope, operands, (), seen, score_scale, R, P, CHUNK, TILE_SCALES, NATIVE
            )
    top, total, accumulators = state

    # A query head without rows has total 0: result 0, lse -inf. NaN stays NaN.
    normal = value_scale / tl.where(total == 0, 1.0, total)
    lse = (top + tl.log2(total)) * _LN_2
    if SPLIT and (begin > 0 or end < length):
        place = split.to(tl.int64) * query_heads + token * HEADS + head
        _write(
            partial_ptr + place * R, partial_lse_ptr + place, exists, normal, lse, accumulators, R, CHUNK,
            NOPE, NATIVE,
        )  # fmt: skip
    else:
        place = token * out_token_stride + head * out_head_stride
        lse_place = token * lse_token_stride + head * lse_head_stride
        _write(
            out_ptr + place, lse_ptr + lse_place, exists, normal, lse, accumulators, R, CHUNK, NOPE, NATIVE
        )
