"""The Gluon kernel of `mla_decode` for more than 32 query heads: 64 of them on the 64-row side of `wgmma`.

Arguments and partial results are those of `gluon_decode_kernel`. A tile of 64 query heads decodes each row
once, into bfloat16 tiles in shared memory that are keys and values at once. A program has three warp groups:

    scores     S = Q K^T, softmax, P to shared memory; O[:, :256] += P V[:, :256] with P from registers
    values     O[:, 256:] += P V[:, 256:]
    decoder    decodes rows into one of two sets of tiles, ahead of the other two: `gluon_wide_decoder`

A row without tile scales is exact in bfloat16; a value times its tile scale is rounded to it once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sgl_kvpool.attention.gluon_decode import (
    LN_2,
    LOWEST,
    heads_of_tile,
    load_queries,
    program_again,
)
from sgl_kvpool.attention.gluon_operands import A_TILE, S_NUMBERS, in_value_order, scores_layout
from sgl_kvpool.attention.gluon_wide_decoder import ROPE_IN_REGISTERS, ROWS, WARPS, decoder_role
from sgl_kvpool.attention.triton_lists import UNALIGNED, place_of, row_count_of, rows_of_part

#: Query heads of a tile.
_TILE = gl.constexpr(64)


@gluon.constexpr_function
def _out_layout(NOPE):
    """Results [64, 128] in the order of values: a lane has contiguous values of heads g and g + 8."""
    columns = [[0, 1], [0, 2], [0, 4], [0, 8]]
    if NOPE == "e2m1":
        registers, lanes = [*columns, [0, 16], [8, 0]], [[0, 32], [0, 64]]
    else:
        registers, lanes = [*columns, [0, 64], [8, 0]], [[0, 16], [0, 32]]
    lanes = [*lanes, [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, 128])


@gluon.jit
def _two_tiles(COLUMNS: gl.constexpr):
    """Rows of two blocks, bfloat16 [2, 64, COLUMNS] in shared memory."""
    return gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, COLUMNS], A_TILE)


@gluon.jit
def _write_half(
    at, o, normal, FIRST: gl.constexpr, tile, group, token_stride, head_stride, NOPE: gl.constexpr,
    HEADS: gl.constexpr, QUERIES: gl.constexpr,
):  # fmt: skip
    """Write normalised results of a tile from chunk FIRST on; `at` points to token 0, head 0."""
    OUT: gl.constexpr = _out_layout(NOPE)
    token, head, exists = heads_of_tile(tile, group, HEADS, QUERIES, _TILE, gl.SliceLayout(1, OUT))
    heads_at = (at + token * token_stride + head * head_stride)[:, None]
    column = gl.arange(0, 128, gl.SliceLayout(0, OUT))[None, :]
    halves = gl.split((o * normal[:, None]).reshape([_TILE, 2, 128]).permute([0, 2, 1]))
    for c in gl.static_range(2):
        x = in_value_order(halves[c].permute((1, 0)), NOPE).permute((1, 0))
        x = gl.convert_layout(x, OUT, assert_trivial=True)
        gl.store(heads_at + ((FIRST + c) * 128 + column), x.to(at.dtype.element_ty), mask=exists[:, None])


@gluon.jit
def _scores_role(
    queries, rope_queries, tiles, ropes, numbers, weights, factors, limits, bars, begin, stop, score_scale,
    value_scale, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, is_part, splits, query_heads,
    out_token_stride, out_head_stride, lse_token_stride, lse_head_stride, R: gl.constexpr,
    NOPE: gl.constexpr, ROPE: gl.constexpr, HEADS: gl.constexpr, QUERIES: gl.constexpr,
    TILES: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = scores_layout(ROWS, WARPS)
    V: gl.constexpr = scores_layout(R // 2, WARPS)
    P: gl.constexpr = gl.DotOperandLayout(0, V, 2)
    HEAD: gl.constexpr = gl.SliceLayout(1, S)
    HEAD_OF_V: gl.constexpr = gl.SliceLayout(1, V)
    full, empty, p_full, p_empty = bars
    o = gl.zeros([_TILE, R // 2], gl.float32, V)
    top = gl.full([_TILE], LOWEST, gl.float32, HEAD)  # largest score so far, in powers of two
    total = gl.zeros([_TILE], gl.float32, HEAD)
    block = 0
    for start in range(begin, stop, ROWS):
        at = block & 1
        mbarrier.wait(full.index(at), (block >> 1) & 1)
        s = gl.zeros([_TILE, ROWS], gl.float32, S)
        for c in gl.static_range(R // 128):
            keys = tiles[c // 2].index(at).slice(c % 2 * 128, 128, dim=1)
            s = warpgroup_mma(queries[c], keys.permute((1, 0)), s, is_async=True)
        if ROPE != "":
            s = warpgroup_mma(rope_queries, ropes.index(at).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        live = (numbers.index(block & 3).load(gl.SliceLayout(0, S)) >= 0)[None, :]
        if QUERIES > 1:
            position = start + gl.arange(0, ROWS, gl.SliceLayout(0, S))
            live = live & (position[None, :] < limits.load(HEAD)[:, None])
        s = gl.where(live, s * score_scale, float("-inf"))
        new_top = gl.maximum(top, gl.max(s, 1))
        p = gl.exp2(s - new_top[:, None])
        decay = gl.exp2(top - new_top)
        top = new_top
        total = total * decay + gl.sum(p, 1)
        p = p.to(gl.bfloat16)
        mbarrier.wait(p_empty, (block & 1) ^ 1)
        weights.store(p)
        factors.store(decay)
        fence_async_shared()
        mbarrier.arrive(p_full, count=1)
        a = gl.convert_layout(p, P, assert_trivial=True)
        o = o * gl.convert_layout(decay, HEAD_OF_V, assert_trivial=True)[:, None]
        o = warpgroup_mma(a, tiles[0].index(at), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(empty.index(at), count=1)
        block += 1
    # A query head without rows has total 0: result 0, lse -inf. NaN stays NaN.
    normal = value_scale / gl.where(total == 0, 1.0, total)
    lse = gl.where(total == 0, float("-inf"), top + gl.log2(total)) * LN_2
    mbarrier.wait(p_empty, (block & 1) ^ 1)
    factors.store(normal)
    mbarrier.arrive(p_full, count=1)
    tile, split, group = place_of(program_again(), splits, TILES, True)
    token, head, exists = heads_of_tile(tile, group, HEADS, QUERIES, _TILE, HEAD)
    normal = gl.convert_layout(normal, HEAD_OF_V, assert_trivial=True)
    if is_part:
        place = split.to(gl.int64) * query_heads
        _write_half(partial_ptr + place * R, o, normal, 0, tile, group, HEADS * R, R, NOPE, HEADS, QUERIES)
        gl.store(partial_lse_ptr + place + token * HEADS + head, lse, mask=exists)
    else:
        _write_half(
            out_ptr, o, normal, 0, tile, group, out_token_stride, out_head_stride, NOPE, HEADS, QUERIES
        )
        gl.store(lse_ptr + token * lse_token_stride + head * lse_head_stride, lse, mask=exists)


@gluon.jit
def _values_role(
    tiles, weights, factors, bars, begin, stop, out_ptr, partial_ptr, is_part, splits, query_heads,
    out_token_stride, out_head_stride, R: gl.constexpr, NOPE: gl.constexpr, HEADS: gl.constexpr,
    QUERIES: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    V: gl.constexpr = scores_layout(R // 2, WARPS)
    HEAD: gl.constexpr = gl.SliceLayout(1, V)
    _, empty, p_full, p_empty = bars
    o = gl.zeros([_TILE, R // 2], gl.float32, V)
    block = 0
    for _ in range(begin, stop, ROWS):
        at = block & 1
        mbarrier.wait(p_full, block & 1)  # so the rows have been decoded too
        o = warpgroup_mma(weights, tiles[1].index(at), o * factors.load(HEAD)[:, None], is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(p_empty, count=1)
        mbarrier.arrive(empty.index(at), count=1)
        block += 1
    mbarrier.wait(p_full, block & 1)
    normal = factors.load(HEAD)
    tile, split, group = place_of(program_again(), splits, TILES, True)
    if is_part:
        place = split.to(gl.int64) * query_heads
        _write_half(partial_ptr + place * R, o, normal, 2, tile, group, HEADS * R, R, NOPE, HEADS, QUERIES)
    else:
        _write_half(
            out_ptr, o, normal, 2, tile, group, out_token_stride, out_head_stride, NOPE, HEADS, QUERIES
        )


@gluon.jit(
    do_not_specialize=["row_count", "lists", "list_width", "splits", "min_blocks", "query_heads"],
    do_not_specialize_on_alignment=UNALIGNED,
)
def gluon_wide_decode_kernel(
    q_ptr, q_rope_ptr, rows_ptr, kv_indices_ptr, kv_lens_ptr, list_index_ptr, out_ptr, lse_ptr, partial_ptr,
    partial_lse_ptr, row_count, lists, list_width, splits, min_blocks, query_heads,
    q_token_stride, q_head_stride, q_rope_token_stride, q_rope_head_stride,
    kv_indices_list_stride, kv_indices_stride,
    out_token_stride, out_head_stride, lse_token_stride, lse_head_stride,
    score_scale, value_scale,
    ROW_STRIDE: gl.constexpr, PAGE: gl.constexpr, PAGE_ROWS: gl.constexpr, DCP_SIZE: gl.constexpr,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, R: gl.constexpr, NOPE: gl.constexpr, SCALE: gl.constexpr,
    SCALE_AT: gl.constexpr, ROPE: gl.constexpr, ROPE_AT: gl.constexpr, BLOCK_H: gl.constexpr,
):  # fmt: skip
    """Attend one split of one list for a tile of query heads; arguments are those of `decode_kernel`.

    A kernel of its own for lists without splits would spill a register in the loop.
    """
    gl.static_assert(BLOCK_H == _TILE)
    TILES: gl.constexpr = (QUERIES * HEADS + _TILE - 1) // _TILE
    tile, split, group = place_of(gl.program_id(0), splits, TILES, True)
    list_index, length, begin, end = rows_of_part(
        kv_lens_ptr, list_index_ptr, lists, list_width, splits, min_blocks, split, group, QUERIES, ROWS, True
    )
    if begin >= length and splits > 1:
        return  # an empty split, which the merge skips
    is_part = begin > 0 or end < length
    stop = gl.maximum(end, 1)  # without a merge, an empty list runs one block, without rows
    kv_indices = kv_indices_ptr + list_index * kv_indices_list_stride

    tiles = (_two_tiles(R // 2), _two_tiles(R // 2))
    ropes = _two_tiles(64)
    queries = ()
    for _ in gl.static_range(R // 128):
        queries = queries + (gl.allocate_shared_memory(gl.bfloat16, [_TILE, 128], A_TILE),)  # noqa: RUF005
    rope_queries = gl.allocate_shared_memory(gl.bfloat16, [_TILE, 64], A_TILE)
    weights = gl.allocate_shared_memory(gl.bfloat16, [_TILE, ROWS], A_TILE)
    numbers = gl.allocate_shared_memory(gl.int32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # What results are multiplied by before those of a block are added, and at the end.
    factors = gl.allocate_shared_memory(gl.float32, [_TILE], S_NUMBERS)
    limits = gl.allocate_shared_memory(gl.int32, [_TILE], S_NUMBERS)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_empty, count=1)
    load_queries(
        queries, rope_queries, q_ptr, q_rope_ptr, q_token_stride, q_head_stride, q_rope_token_stride,
        q_rope_head_stride, tile, group, R, NOPE, ROPE, HEADS, QUERIES, _TILE, ROPE_IN_REGISTERS, WARPS,
    )  # fmt: skip
    if QUERIES > 1:
        PER_HEAD: gl.constexpr = gl.SliceLayout(1, scores_layout(ROWS, WARPS))
        token, _, _ = heads_of_tile(tile, group, HEADS, QUERIES, _TILE, PER_HEAD)
        limits.store(gl.minimum(row_count_of(kv_lens_ptr, token, list_width), length))
    fence_async_shared()
    bars = (full, empty, p_full, p_empty)
    # Registers of a thread: 160 in the values' warps, the least that ptxas takes, and what is left of 504 in
    # the scores'. If the decoder has more than it needs, ptxas begins with the next block's parts earlier.
    DECODER_REGISTERS: gl.constexpr = 144 if SCALE == "fp32" else 128
    gl.warp_specialize([
        (_scores_role, (
            queries, rope_queries, tiles, ropes, numbers, weights, factors, limits, bars, begin, stop,
            score_scale, value_scale, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, is_part, splits,
            query_heads, out_token_stride, out_head_stride, lse_token_stride, lse_head_stride, R, NOPE, ROPE,
            HEADS, QUERIES, TILES,
        )),
        (_values_role, (
            tiles, weights, factors, bars, begin, stop, out_ptr, partial_ptr, is_part, splits, query_heads,
            out_token_stride, out_head_stride, R, NOPE, HEADS, QUERIES, TILES,
        )),
        (decoder_role, (
            rows_ptr, kv_indices, tiles, ropes, numbers, bars, begin, stop, end, kv_indices_stride,
            row_count, ROW_STRIDE, PAGE, PAGE_ROWS, DCP_SIZE, R, NOPE, SCALE, SCALE_AT, ROPE, ROPE_AT,
        )),
    ], [WARPS, WARPS], [160, DECODER_REGISTERS])  # fmt: skip
