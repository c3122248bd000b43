"""The Gluon kernel of `mla_decode` for Hopper, for encoded rows; `decode_config` has its tiles.

It has the arguments and partial results of `triton_decode.decode_kernel`: a program takes one list of rows,
one tile of its query heads (of all its queries) and one split of the list, and processes that split a block
at a time, 16 rows for each of its warps. Unlike Triton, Gluon allows decoded rows to be the A operand of the
score products in the registers in which they were decoded. The same registers are stored once, to the tile in
shared memory that the value products read. If two programs per SM fit into shared memory, one decodes while
the other multiplies. Some tiles load the last parts of a row into registers instead of copying them
ahead to shared memory: most e4m3 tiles would not fit otherwise, and the largest FP4 tile saves clocks by it.

Stages of block i:

    numbers of its rows   written to shared memory while block i - 1 is decoded
    copies                start when block i - 1 has been decoded; overlap its softmax and value products
    register parts        loaded into registers when the block begins, decoded last
    scores                [64, BLOCK_H] += rows [64, 128] q^T, 128 decoded latent values at a time, rope last
    softmax               warps exchange maxima of scores; each lane keeps its sums until the end
    values                [128, BLOCK_H] += V^T P, four times
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sgl_kvpool.attention.gluon_operands import (
    A_TILE,
    allocate_raw,
    bf16_operand,
    copied_words,
    copy_rows,
    decoded_e2m1,
    decoded_e4m3,
    decoded_e4m3_twice,
    in_operand_order,
    in_value_order,
    load_entries,
    load_register_parts,
    rope_order,
    row_numbers,
    scores_layout,
    tile_scales,
    words_of,
    words_of_latent,
)
from sgl_kvpool.attention.triton_lists import UNALIGNED, place_of, row_count_of, rows_of_part
from sgl_kvpool.attention.triton_operands import VALUE_SCALE_EXPONENT

_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.6 has the second name
LN_2 = gl.constexpr(0.6931471805599453)
#: Lower than any score, and finite, so that a block without rows for a query head needs no special case:
#: exp2(-inf - LOWEST) is 0, and exp2(LOWEST - LOWEST) is multiplied by the sums so far, which are 0 too.
LOWEST = gl.constexpr(-1e30)
#: Factor by which operands of FP4 latents are multiplied.
_LATENT_FACTOR = gl.constexpr(2.0**VALUE_SCALE_EXPONENT)
_LATENT_EXPONENT = gl.constexpr(VALUE_SCALE_EXPONENT)


@gluon.jit
def _tiles(COUNT: gl.constexpr, ROWS: gl.constexpr):
    """COUNT buffers bfloat16 [ROWS, 128] in shared memory; parts of one buffer would need barriers."""
    tiles = ()
    for _ in gl.static_range(COUNT):
        tiles = tiles + (gl.allocate_shared_memory(gl.bfloat16, [ROWS, 128], A_TILE),)  # noqa: RUF005
    return tiles


@gluon.jit
def program_again():
    """Re-reads `program_id(0)` after the loop, so that tile, split and group need no registers inside it.

    With int64 lists or several queries per list they would be spilled, 8 to 32 bytes.
    """
    return gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def heads_of_tile(
    tile, group, HEADS: gl.constexpr, QUERIES: gl.constexpr, BLOCK_H: gl.constexpr, L: gl.constexpr
):
    """(query as int64, head, whether it exists) of the query heads of a tile, [BLOCK_H] in layout L."""
    query_head = tile * BLOCK_H + gl.arange(0, BLOCK_H, L)
    exists = query_head < QUERIES * HEADS
    return group * QUERIES + gl.where(exists, query_head // HEADS, 0), query_head % HEADS, exists


@gluon.jit
def load_queries(
    tiles, rope_tile, q, q_rope, q_token_stride, q_head_stride, q_rope_token_stride, q_rope_head_stride,
    tile, group, R: gl.constexpr, NOPE: gl.constexpr, ROPE: gl.constexpr, HEADS: gl.constexpr,
    QUERIES: gl.constexpr, BLOCK_H: gl.constexpr, REG_PARTS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Store queries in the operands' order, [BLOCK_H, 128] of every chunk, and their rope, [BLOCK_H, 64]."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    token, head, exists = heads_of_tile(tile, group, HEADS, QUERIES, BLOCK_H, gl.SliceLayout(1, L))
    at = (q + token * q_token_stride + head * q_head_stride)[:, None]
    column = gl.arange(0, 128, gl.SliceLayout(0, L))[None, :]
    for c in gl.static_range(R // 128):
        x = gl.load(at + (c * 128 + column), mask=exists[:, None], other=0.0)
        tiles[c].store(in_operand_order(x.to(gl.bfloat16), NOPE))
    if ROPE != "":
        L2: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
        token, head, exists = heads_of_tile(tile, group, HEADS, QUERIES, BLOCK_H, gl.SliceLayout(1, L2))
        at = (q_rope + token * q_rope_token_stride + head * q_rope_head_stride)[:, None]
        x = gl.load(at + gl.arange(0, 64, gl.SliceLayout(0, L2))[None, :], mask=exists[:, None], other=0.0)
        if NOPE == "e2m1" and ROPE == "bf16":
            # The scores of both parts are added up, so the rope's queries carry the latent's factor. An e4m3
            # rope carries it itself (`_scores`).
            x = x.to(gl.float32) * _LATENT_FACTOR
        rope_tile.store(in_operand_order(x.to(gl.bfloat16), rope_order(ROPE, REG_PARTS)))


@gluon.jit
def _scores(
    raw, parts, values, queries, rope_queries, R: gl.constexpr, NOPE: gl.constexpr, SCALE: gl.constexpr,
    ROPE: gl.constexpr, BLOCK_H: gl.constexpr, REG_PARTS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Scores of a block, float32 [rows, BLOCK_H], and its tile scales; stores its decoded latent in `values`.

    The copied rows in `raw` are not needed afterwards; its row numbers are, for the next copy.
    """
    BLOCK: gl.constexpr = 16 * WARPS
    S: gl.constexpr = scores_layout(BLOCK_H, WARPS)
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    # The next chunk is decoded during products, unless registers are too few (16 query heads with 4 warps, 32
    # with 8) or tile scales separate the products.
    IN_FLIGHT: gl.constexpr = BLOCK_H <= 2 * WARPS and SCALE != "fp32"
    COPIED: gl.constexpr = copied_words(R, NOPE, REG_PARTS)
    OF_ROPE: gl.constexpr = words_of_latent(R, NOPE) - COPIED  # place of the rope among register parts
    words, scales, rope, _ = raw
    of_tiles = ()
    if SCALE == "fp32":
        of_tiles = tile_scales(scales, S, WARPS)
    s = gl.zeros([BLOCK, BLOCK_H], gl.float32, S)
    for c in gl.static_range(R // 128):
        if NOPE == "e2m1":
            x = decoded_e2m1(words_of(words, parts, c, COPIED, WARPS), scales, c, A, WARPS)
        else:
            codes = words_of(words, parts, 2 * c, COPIED, WARPS)
            more = words_of(words, parts, 2 * c + 1, COPIED, WARPS)
            x = decoded_e4m3_twice(codes, more, A, WARPS)
        values[c].store(x)
        if IN_FLIGHT and c > 0:
            s = warpgroup_mma_wait(0, deps=[s])
        if SCALE == "fp32":
            of_chunk = gl.zeros([BLOCK, BLOCK_H], gl.float32, S)
            of_chunk = warpgroup_mma(x, queries[c].permute((1, 0)), of_chunk, is_async=True)
            s += warpgroup_mma_wait(0, deps=[of_chunk]) * of_tiles[c]
        else:
            s = warpgroup_mma(x, queries[c].permute((1, 0)), s, is_async=True)
            if not IN_FLIGHT and (c < R // 128 - 1 or ROPE != "bf16"):
                s = warpgroup_mma_wait(0, deps=[s])
    if ROPE == "bf16" and REG_PARTS == 0:
        s = warpgroup_mma(rope, rope_queries.permute((1, 0)), s, is_async=True)
    elif ROPE != "":
        if ROPE == "bf16":
            x = bf16_operand(parts[OF_ROPE], parts[OF_ROPE + 1], A, WARPS)
        else:
            EXPONENT: gl.constexpr = _LATENT_EXPONENT if NOPE == "e2m1" else 0
            codes = words_of((rope,), parts, OF_ROPE, 1 if REG_PARTS == 0 else 0, WARPS)
            x = decoded_e4m3(codes, A, EXPONENT, WARPS)
        s = warpgroup_mma(x, rope_queries.permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s]), of_tiles


@gluon.jit
def _rows_of_lanes(x):
    """[rows, N] as [warps, 2, 8, N]; the second axis has the two rows of each lane."""
    return x.reshape([x.shape[0] // 16, 2, 8, x.shape[1]])


@gluon.jit
def _write(
    at, lse_at, normal, lse, accumulators, tile, group, R: gl.constexpr, NOPE: gl.constexpr,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, BLOCK_H: gl.constexpr, token_stride, head_stride,
    lse_token_stride, lse_head_stride, WARPS: gl.constexpr,
):  # fmt: skip
    """Write a program's normalised results and lse; `at` and `lse_at` point to token 0, head 0."""
    PER_HEAD: gl.constexpr = gl.SliceLayout(0, scores_layout(BLOCK_H, WARPS))
    OUT: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [1, WARPS], [0, 1])
    token, head, exists = heads_of_tile(tile, group, HEADS, QUERIES, BLOCK_H, gl.SliceLayout(0, OUT))
    heads_at = (at + token * token_stride + head * head_stride)[None, :]
    column = gl.arange(0, 128, gl.SliceLayout(1, OUT))[:, None]
    for c in gl.static_range(R // 128):
        x = gl.convert_layout(in_value_order(accumulators[c] * normal[None, :], NOPE), OUT)
        gl.store(heads_at + (c * 128 + column), x.to(at.dtype.element_ty), mask=exists[None, :])
    token, head, exists = heads_of_tile(tile, group, HEADS, QUERIES, BLOCK_H, PER_HEAD)
    gl.store(lse_at + token * lse_token_stride + head * lse_head_stride, lse, mask=exists)


@gluon.jit(
    do_not_specialize=["row_count", "lists", "list_width", "splits", "min_blocks", "query_heads"],
    do_not_specialize_on_alignment=UNALIGNED,
)
def gluon_decode_kernel(
    q_ptr, q_rope_ptr, rows_ptr, kv_indices_ptr, kv_lens_ptr, list_index_ptr, out_ptr, lse_ptr, partial_ptr,
    partial_lse_ptr, row_count, lists, list_width, splits, min_blocks, query_heads,
    q_token_stride, q_head_stride, q_rope_token_stride, q_rope_head_stride,
    kv_indices_list_stride, kv_indices_stride,
    out_token_stride, out_head_stride, lse_token_stride, lse_head_stride,
    score_scale, value_scale,
    ROW_STRIDE: gl.constexpr, PAGE: gl.constexpr, PAGE_ROWS: gl.constexpr, DCP_SIZE: gl.constexpr,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, R: gl.constexpr, NOPE: gl.constexpr, SCALE: gl.constexpr,
    SCALE_AT: gl.constexpr,
    ROPE: gl.constexpr, ROPE_AT: gl.constexpr, BLOCK_H: gl.constexpr, SPLIT: gl.constexpr,
    REG_PARTS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Attend one split of one list for a tile of query heads; arguments are those of `decode_kernel`."""
    BLOCK: gl.constexpr = 16 * WARPS
    TILES: gl.constexpr = (QUERIES * HEADS + BLOCK_H - 1) // BLOCK_H
    S: gl.constexpr = scores_layout(BLOCK_H, WARPS)
    PER_HEAD: gl.constexpr = gl.SliceLayout(0, S)
    tile, split, group = place_of(gl.program_id(0), splits, TILES, SPLIT)
    list_index, length, begin, end = rows_of_part(
        kv_lens_ptr, list_index_ptr, lists, list_width, splits, min_blocks, split, group,
        QUERIES, BLOCK, SPLIT,
    )  # fmt: skip
    if SPLIT:
        if begin >= length:
            return  # an empty split, which the merge skips
        is_part = begin > 0 or end < length
        stop = end
    else:
        stop = gl.maximum(end, 1)  # without a merge, an empty list runs one block, without rows
    # Around a loop that may not run, Triton 3.8 adds a branch and spills the registers that both paths need.
    gl.assume(begin < stop)
    kv_indices = kv_indices_ptr + list_index * kv_indices_list_stride

    values = _tiles(R // 128, BLOCK)
    queries = _tiles(R // 128, BLOCK_H)
    rope_queries = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, 64], A_TILE)
    weights_tiles = ()
    for _ in gl.static_range(R // 128 if SCALE == "fp32" else 1):
        tile_of_weights = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, BLOCK], A_TILE)
        weights_tiles = weights_tiles + (tile_of_weights,)  # noqa: RUF005
    raw = allocate_raw(R, NOPE, SCALE, ROPE, REG_PARTS, WARPS)
    numbers = raw[3]

    # Rows are copied one block ahead, row numbers are loaded two blocks ahead.
    entries = load_entries(kv_indices, begin, end, kv_indices_stride, WARPS)
    numbers.store(row_numbers(entries, row_count, PAGE, PAGE_ROWS, DCP_SIZE))
    entries = load_entries(kv_indices, begin + BLOCK, end, kv_indices_stride, WARPS)
    _barrier()
    copy_rows(rows_ptr, raw, ROW_STRIDE, R, NOPE, SCALE, SCALE_AT, ROPE, ROPE_AT, REG_PARTS, WARPS)
    async_copy.commit_group()
    load_queries(
        queries, rope_queries, q_ptr, q_rope_ptr, q_token_stride, q_head_stride, q_rope_token_stride,
        q_rope_head_stride, tile, group, R, NOPE, ROPE, HEADS, QUERIES, BLOCK_H, REG_PARTS, WARPS,
    )  # fmt: skip
    if QUERIES > 1:
        limits = gl.allocate_shared_memory(gl.int32, [BLOCK_H], numbers.layout)
        token, _, _ = heads_of_tile(tile, group, HEADS, QUERIES, BLOCK_H, PER_HEAD)
        limits.store(gl.minimum(row_count_of(kv_lens_ptr, token, list_width), length))

    accumulators = ()
    for _ in gl.static_range(R // 128):
        accumulators = accumulators + (gl.zeros([128, BLOCK_H], gl.float32, S),)  # noqa: RUF005
    top = gl.full([BLOCK_H], LOWEST, gl.float32, PER_HEAD)  # largest score so far, in powers of two
    # Sums of weights are kept per lane; lanes are added up at the end.
    total = gl.sum(_rows_of_lanes(gl.zeros([BLOCK, BLOCK_H], gl.float32, S)), 1)
    # If the copied rope itself is an operand, a fence in every block makes the copy visible to the product.
    COPIED_OPERAND: gl.constexpr = ROPE == "bf16" and REG_PARTS == 0
    if not COPIED_OPERAND:
        fence_async_shared()  # the queries
    for start in range(begin, stop, BLOCK):
        present = numbers.load(gl.SliceLayout(1, S))
        parts = load_register_parts(rows_ptr, present, ROW_STRIDE, R, NOPE, ROPE, ROPE_AT, REG_PARTS, WARPS)
        live = (present >= 0)[:, None]
        async_copy.wait_group(0)
        if COPIED_OPERAND:
            fence_async_shared()
        _barrier()  # copies have arrived, and the values of the block before have been read
        numbers.store(row_numbers(entries, row_count, PAGE, PAGE_ROWS, DCP_SIZE))
        entries = load_entries(kv_indices, start + 2 * BLOCK, end, kv_indices_stride, WARPS)
        s, of_tiles = _scores(
            raw, parts, values, queries, rope_queries, R, NOPE, SCALE, ROPE, BLOCK_H, REG_PARTS, WARPS
        )
        _barrier()  # all warps have read the copied rows
        if start + BLOCK < end:
            copy_rows(rows_ptr, raw, ROW_STRIDE, R, NOPE, SCALE, SCALE_AT, ROPE, ROPE_AT, REG_PARTS, WARPS)
        async_copy.commit_group()

        if QUERIES > 1:
            position = start + gl.arange(0, BLOCK, gl.SliceLayout(1, S))
            live = live & (position[:, None] < limits.load(PER_HEAD)[None, :])
        s = gl.where(live, s * score_scale, float("-inf"))
        new_top = gl.maximum(top, gl.max(s, 0))
        weights = gl.exp2(s - new_top[None, :])
        decay = gl.exp2(top - new_top)
        top = new_top
        decay_of_rows = decay[None, :].broadcast_to([BLOCK, BLOCK_H])
        decay_of_lanes = gl.max(_rows_of_lanes(decay_of_rows), 1)  # of two equal values
        total = total * decay_of_lanes + gl.sum(_rows_of_lanes(weights), 1)
        # Stored with the weights of each query head contiguous, as the value products require.
        if SCALE == "fp32":
            for c in gl.static_range(R // 128):
                factor = (weights * of_tiles[c]).to(gl.bfloat16)
                weights_tiles[c].permute((1, 0)).store(factor)
        else:
            weights_tiles[0].permute((1, 0)).store(weights.to(gl.bfloat16))
        fence_async_shared()  # the weights and the values
        _barrier()
        products = ()
        for c in gl.static_range(R // 128):
            x = accumulators[c] * decay[None, :]
            factor_tile = weights_tiles[c if SCALE == "fp32" else 0].permute((1, 0))
            x = warpgroup_mma(values[c].permute((1, 0)), factor_tile, x, is_async=True)
            products = products + (x,)  # noqa: RUF005
        accumulators = warpgroup_mma_wait(0, deps=products)

    # A query head without rows has total 0: result 0, lse -inf. NaN stays NaN.
    total = gl.convert_layout(gl.sum(gl.sum(total, 1), 0), PER_HEAD)
    normal = value_scale / gl.where(total == 0, 1.0, total)
    lse = gl.where(total == 0, float("-inf"), top + gl.log2(total)) * LN_2
    tile, split, group = place_of(program_again(), splits, TILES, SPLIT)
    if SPLIT and is_part:
        place = split.to(gl.int64) * query_heads
        _write(
            partial_ptr + place * R, partial_lse_ptr + place, normal, lse, accumulators, tile, group, R, NOPE,
            HEADS, QUERIES, BLOCK_H, HEADS * R, R, HEADS, 1, WARPS,
        )  # fmt: skip
    else:
        _write(
            out_ptr, lse_ptr, normal, lse, accumulators, tile, group, R, NOPE, HEADS, QUERIES, BLOCK_H,
            out_token_stride, out_head_stride, lse_token_stride, lse_head_stride, WARPS,
        )  # fmt: skip
