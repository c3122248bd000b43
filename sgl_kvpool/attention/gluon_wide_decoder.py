"""The decoder of `gluon_wide`: the warp group that loads rows and decodes them into tiles.

Each part of the next block is loaded into the registers that the same part of this block has left, so that it
is first used in the next block (docs/attention.md).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sgl_kvpool.attention.gluon_operands import (
    bf16_operand,
    block_scales_layout,
    decoded_e4m3,
    e2m1_operand,
    e4m3_values,
    load_register_parts,
    row_numbers,
    row_starts,
    scores_layout,
    words_layout,
    words_of_latent,
)
from sgl_kvpool.attention.triton_operands import VALUE_SCALE_EXPONENT

_LATENT_EXPONENT = gl.constexpr(VALUE_SCALE_EXPONENT)
#: Rows of a block, warps of a warp group.
ROWS, WARPS = gl.constexpr(64), gl.constexpr(4)
#: Of `load_queries` and `load_register_parts`: the rope is loaded into registers.
ROPE_IN_REGISTERS = gl.constexpr(1)


@gluon.jit
def _entries(kv_indices, start, end, kv_indices_stride):
    """A block of entries of a list from `start`, in the lanes that decode their rows; -1 from `end` on."""
    position = start + gl.arange(0, ROWS, gl.SliceLayout(1, words_layout(WARPS)))
    return gl.load(kv_indices + position.to(gl.int64) * kv_indices_stride, mask=position < end, other=-1)


@gluon.jit
def _load_words(rows_ptr, numbers, AT: gl.constexpr, ROW_STRIDE: gl.constexpr):
    """64 bytes of every row from byte AT, int32 [rows, 16]; zeros where the number is -1."""
    rows, live = row_starts(rows_ptr, numbers, ROW_STRIDE)
    column = gl.arange(0, 16, gl.SliceLayout(0, words_layout(WARPS)))[None, :]
    at = gl.multiple_of(rows.to(gl.pointer_type(gl.int32)) + column, [16, 16])
    return gl.load(at + AT // 4, mask=live, other=0)


@gluon.constexpr_function
def _quarters_layout():
    """[rows, 4]: lane (g, c) has column c of rows g and g + 8."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 4])


@gluon.jit
def _load_quarters(rows_ptr, numbers, AT: gl.constexpr, dtype: gl.constexpr, ROW_STRIDE: gl.constexpr):
    """Four numbers of every row from byte AT, `dtype` [rows, 4]."""
    L: gl.constexpr = _quarters_layout()
    of_scales = gl.convert_layout(numbers, gl.SliceLayout(1, L), assert_trivial=True)
    rows, live = row_starts(rows_ptr, of_scales, ROW_STRIDE)
    at = (rows + AT).to(gl.pointer_type(dtype)) + gl.arange(0, 4, gl.SliceLayout(0, L))[None, :]
    return gl.load(at, mask=live, other=0)


@gluon.jit
def _load_unit(
    rows_ptr, numbers, u: gl.constexpr, ROW_STRIDE: gl.constexpr, SCALE: gl.constexpr, SCALE_AT: gl.constexpr
):
    """64 stored bytes of a latent: (words, pairs of block scales) or (words,)."""
    words = _load_words(rows_ptr, numbers, 64 * u, ROW_STRIDE)
    if SCALE == "ue5m3":
        return words, _load_quarters(rows_ptr, numbers, SCALE_AT + 8 * u, gl.uint16, ROW_STRIDE)
    else:
        return (words,)


@gluon.jit
def _load_tile_scales(
    rows_ptr, numbers, ROW_STRIDE: gl.constexpr, SCALE: gl.constexpr, SCALE_AT: gl.constexpr
):
    """Tile scales, float32 [rows, 4]."""
    if SCALE == "fp32":
        return _load_quarters(rows_ptr, numbers, SCALE_AT, gl.float32, ROW_STRIDE)
    else:
        return numbers  # not used


@gluon.jit
def _scale_of_each_tile(scales, SCALE: gl.constexpr):
    """float32 [rows, 4] -> four times [rows]."""
    tile = gl.arange(0, 4, gl.SliceLayout(0, _quarters_layout()))[None, :]
    found = ()
    if SCALE == "fp32":
        for i in gl.static_range(4):
            found = found + (gl.sum(gl.where(tile == i, scales, 0.0), 1),)  # noqa: RUF005
    return found


@gluon.jit
def _loads_before_here():
    """Keeps the loads before it there: ptxas would move all loads of a block behind its decoding."""
    gl.inline_asm_elementwise(
        "bar.warp.sync -1; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _decoded(unit, of_tiles, u: gl.constexpr, NOPE: gl.constexpr, SCALE: gl.constexpr, A: gl.constexpr):
    """What `_load_unit` loaded, as bfloat16 [rows, 128 or 64] in the order of an operand's columns."""
    if NOPE == "e2m1":
        # Here and not where they are loaded, which would wait for them.
        pairs = gl.join(unit[1] & 0xFF, unit[1] >> 8).reshape([ROWS, 8])
        scales = gl.convert_layout(pairs, gl.SliceLayout(2, block_scales_layout(WARPS)), assert_trivial=True)
        return e2m1_operand(unit[0], scales, A, WARPS)
    elif SCALE == "fp32":
        x = e4m3_values(unit[0], 0, WARPS, gl.float32)
        scale = gl.convert_layout(of_tiles[u // 2], gl.SliceLayout(1, x.type.layout), assert_trivial=True)
        return gl.convert_layout((x * scale[:, None]).to(gl.bfloat16), A, assert_trivial=True)
    else:
        return decoded_e4m3(unit[0], A, 0, WARPS)


@gluon.jit
def decoder_role(
    rows_ptr, kv_indices, tiles, ropes, numbers, bars, begin, stop, end, kv_indices_stride, row_count,
    ROW_STRIDE: gl.constexpr, PAGE: gl.constexpr, PAGE_ROWS: gl.constexpr, DCP_SIZE: gl.constexpr,
    R: gl.constexpr, NOPE: gl.constexpr, SCALE: gl.constexpr, SCALE_AT: gl.constexpr, ROPE: gl.constexpr,
    ROPE_AT: gl.constexpr,
):  # fmt: skip
    A: gl.constexpr = gl.DotOperandLayout(0, scores_layout(ROWS, WARPS), 2)
    UNITS: gl.constexpr = words_of_latent(R, NOPE)
    HALF: gl.constexpr = UNITS // 2
    full, empty, _, _ = bars
    entries = _entries(kv_indices, begin, end, kv_indices_stride)
    coming = row_numbers(entries, row_count, PAGE, PAGE_ROWS, DCP_SIZE)
    numbers.index(0).store(coming)
    units = ()
    for u in gl.static_range(UNITS):
        units = units + (_load_unit(rows_ptr, coming, u, ROW_STRIDE, SCALE, SCALE_AT),)  # noqa: RUF005
    scales = _load_tile_scales(rows_ptr, coming, ROW_STRIDE, SCALE, SCALE_AT)
    rope = load_register_parts(rows_ptr, coming, ROW_STRIDE, R, NOPE, ROPE, ROPE_AT, ROPE_IN_REGISTERS, WARPS)
    entries = _entries(kv_indices, begin + ROWS, stop, kv_indices_stride)
    block = 0
    for start in range(begin, stop, ROWS):
        if SCALE == "fp32":  # int64 entries leave no register for a counter, or for `end` beside `stop`
            block = (start - begin) // ROWS
        at = block & 1
        coming = row_numbers(entries, row_count, PAGE, PAGE_ROWS, DCP_SIZE)
        entries = _entries(kv_indices, start + 2 * ROWS, stop, kv_indices_stride)
        mbarrier.wait(empty.index(at), ((block >> 1) & 1) ^ 1)
        numbers.index((block + 1) & 3).store(coming)
        of_tiles = _scale_of_each_tile(scales, SCALE)
        scales = _load_tile_scales(rows_ptr, coming, ROW_STRIDE, SCALE, SCALE_AT)
        of_next = ()
        for u in gl.static_range(UNITS):
            part = tiles[u // HALF].index(at).slice(u % HALF * (R // UNITS), R // UNITS, dim=1)
            part.store(_decoded(units[u], of_tiles, u, NOPE, SCALE, A))
            of_next = of_next + (_load_unit(rows_ptr, coming, u, ROW_STRIDE, SCALE, SCALE_AT),)  # noqa: RUF005
            if SCALE != "fp32" or u % 2 == 1:
                _loads_before_here()
        if ROPE == "bf16":
            ropes.index(at).store(bf16_operand(rope[0], rope[1], A, WARPS))
        elif ROPE != "":
            EXPONENT: gl.constexpr = _LATENT_EXPONENT if NOPE == "e2m1" else 0
            ropes.index(at).store(decoded_e4m3(rope[0], A, EXPONENT, WARPS))
        rope = load_register_parts(
            rows_ptr, coming, ROW_STRIDE, R, NOPE, ROPE, ROPE_AT, ROPE_IN_REGISTERS, WARPS
        )
        units = of_next
        fence_async_shared()
        mbarrier.arrive(full.index(at), count=1)
        block += 1
