"""Rows in shared memory and in registers of the Gluon kernel: copies, decoding, layouts.

A block has 16 rows per warp of the program. Each warp decodes 16 consecutive rows. Its lane (g, c), g = 0..7
and c = 0..3, decodes rows g and g + 8 of the warp: 16 contiguous bytes of every 64. The decoded values are
the A operand of `wgmma` in registers without a permutation, because the columns of an operand may be in any
order if the queries use the same order. `stmatrix` stores the same registers to shared memory as the tile of
values.

Position k of 128 decoded FP4 values holds value d = 32 c + 8 w + 4 h + 2 i2 + i1, where k = 32 w + 16 i2 +
8 i1 + 2 c + h: lane c has the words 4 c to 4 c + 3, and w counts them. Position k of 64 decoded e4m3
values holds d = 16 c + 4 w + 2 h + i1, where k = 16 w + 8 i1 + 2 c + h.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from sgl_kvpool.attention.triton_lists import rows_of_entries


@gluon.constexpr_function
def _bits(first, end):
    """Powers of two from `first`, below `end`."""
    return [1 << i for i in range(first.bit_length() - 1, end.bit_length() - 1)]


@gluon.constexpr_function
def scores_layout(BLOCK_H, WARPS):
    """Accumulators of ``wgmma.m64n{BLOCK_H}k16``: lane (g, c) of warp w has rows 16 w + g and + 8."""
    return gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_H, 16])


@gluon.constexpr_function
def words_layout(WARPS):
    """16 words of a row: lane (g, c) has words 4 c to 4 c + 3 of rows g and g + 8."""
    warps = [[row, 0] for row in _bits(16, 16 * WARPS)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], lanes, warps, [], [16 * WARPS, 16])


@gluon.constexpr_function
def block_scales_layout(WARPS):
    """FP4's scales [rows, 8] of 16 words (`words_layout`), each in the lane that has its two words."""
    warps = [[row, 0, 0] for row in _bits(16, 16 * WARPS)]
    lanes = [[0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    words = [[0, 0, 1], [0, 1, 0], [8, 0, 0]]
    return gl.DistributedLinearLayout(words, lanes, warps, [], [16 * WARPS, 8, 2])


@gluon.constexpr_function
def _tile_scales_layout(WARPS):
    """Four float32 scales of a row: lane (g, c) has all four of rows g and g + 8."""
    warps = [[row, 0] for row in _bits(16, 16 * WARPS)]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], lanes, warps, [], [16 * WARPS, 4])


# Each lane copies 16 bytes, and four lanes 64 bytes of a row, which are whole sectors except in
# `fp8_block_scale` (656 bytes per row, its rope at byte 528). In every segment but the scales, a lane copies
# parts of the same two rows, so that it reads two row numbers.
@gluon.constexpr_function
def _copy_rope_layout(WARPS):
    values = [[0, 1], [0, 2], [0, 4], [0, 32], [8 * WARPS, 0]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    warps = [[row, 0] for row in _bits(8, 8 * WARPS)]
    return gl.DistributedLinearLayout(values, lanes, warps, [], [16 * WARPS, 64])


@gluon.constexpr_function
def _copy_scales_layout(WARPS, SCALE):
    """Layout with fewer lanes per row: with four, at least half of the lanes would copy no scales."""
    if SCALE == "fp32":
        return gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    return gl.BlockedLayout([1, 16], [16, 2], [WARPS, 1], [1, 0])


#: Words [rows, 16]. Rows are 64 bytes: the four lanes of the next row use the other half of the banks.
_S_WORDS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
#: FP4's scales [rows, 32]. In every second group of four rows, the halves of a row are swapped: a warp reads
#: 8 bytes of each of 8 rows, and rows g and g + 4 would otherwise use the same banks.
_S_BLOCK_SCALES = gl.constexpr(gl.SwizzledSharedLayout(16, 4, 2, [1, 0]))
_S_TILE_SCALES = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))
S_NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
#: bfloat16 tiles that `wgmma` reads, lines of 128 bytes.
A_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


# The first of the REG_PARTS parts of a row is the rope; the others are the last 64-byte units of the latent.
@gluon.constexpr_function
def words_of_latent(R, NOPE):
    """Number of 64-byte units of a latent."""
    return R // (128 if NOPE == "e2m1" else 64)


@gluon.constexpr_function
def copied_words(R, NOPE, REG_PARTS):
    """Number of 64-byte units of a latent that are copied to shared memory."""
    return words_of_latent(R, NOPE) - max(0, REG_PARTS - 1)


@gluon.constexpr_function
def rope_order(ROPE, REG_PARTS):
    """Order of a rope's columns as an operand, for `in_operand_order`."""
    return "bf16 words" if ROPE == "bf16" and REG_PARTS > 0 else ROPE


@gluon.jit
def load_entries(kv_indices, start, end, kv_indices_stride, WARPS: gl.constexpr):
    """A block of entries of a list from `start`, int32 or int64; -1 from `end` on."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    position = start + gl.arange(0, 16 * WARPS, L)
    return gl.load(kv_indices + position.to(gl.int64) * kv_indices_stride, mask=position < end, other=-1)


@gluon.jit
def row_numbers(entries, row_count, PAGE: gl.constexpr, PAGE_ROWS: gl.constexpr, DCP_SIZE: gl.constexpr):
    """int32 row numbers of list entries, -1 for entries without a row. A pool has less than 2**31 rows."""
    rows, is_row = rows_of_entries(entries, row_count, PAGE, PAGE_ROWS, DCP_SIZE)
    return gl.where(is_row, rows, -1).to(gl.int32)


@gluon.jit
def allocate_raw(
    R: gl.constexpr, NOPE: gl.constexpr, SCALE: gl.constexpr, ROPE: gl.constexpr, REG_PARTS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Shared memory for a block: (words of every 64 bytes, scales, rope, row numbers of the next block).

    The buffers are separate, because Triton puts barriers between uses of parts of one buffer.
    """
    BLOCK: gl.constexpr = 16 * WARPS
    words = ()
    for _ in gl.static_range(copied_words(R, NOPE, REG_PARTS)):
        words = words + (gl.allocate_shared_memory(gl.int32, [BLOCK, 16], _S_WORDS),)  # noqa: RUF005
    numbers = gl.allocate_shared_memory(gl.int32, [BLOCK], S_NUMBERS)
    if SCALE == "ue5m3":
        scales = gl.allocate_shared_memory(gl.uint8, [BLOCK, R // 16], _S_BLOCK_SCALES)
    elif SCALE == "fp32":
        scales = gl.allocate_shared_memory(gl.float32, [BLOCK, R // 128], _S_TILE_SCALES)
    else:
        scales = numbers
    if REG_PARTS > 0 or ROPE == "":
        rope = numbers
    elif ROPE == "bf16":
        rope = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, 64], A_TILE)
    else:
        rope = gl.allocate_shared_memory(gl.int32, [BLOCK, 16], _S_WORDS)
    return words, scales, rope, numbers


@gluon.jit
def row_starts(rows_ptr, numbers, ROW_STRIDE: gl.constexpr):
    """Pointers to the rows of `numbers` [rows, 1], and a mask of the valid numbers."""
    live = numbers >= 0
    rows = rows_ptr + gl.maximum(numbers, 0).to(gl.int64) * ROW_STRIDE
    return rows.expand_dims(1), live.expand_dims(1)


@gluon.jit
def copy_rows(
    rows_ptr, raw, ROW_STRIDE: gl.constexpr, R: gl.constexpr, NOPE: gl.constexpr, SCALE: gl.constexpr,
    SCALE_AT: gl.constexpr, ROPE: gl.constexpr, ROPE_AT: gl.constexpr, REG_PARTS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Start to copy the rows whose numbers are in shared memory; zeros where the number is -1.

    Contents of another row instead of zeros might decode to NaN, and a weight of 0 times NaN is NaN.
    """
    words, scales, rope, numbers = raw
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    rows, live = row_starts(rows_ptr, numbers.load(gl.SliceLayout(1, WORDS)), ROW_STRIDE)
    column = gl.arange(0, 16, gl.SliceLayout(0, WORDS))[None, :]
    at = gl.multiple_of(rows.to(gl.pointer_type(gl.int32)) + column, [16, 16])
    for c in gl.static_range(copied_words(R, NOPE, REG_PARTS)):
        async_copy.async_copy_global_to_shared(words[c], at + c * 16, mask=live)
    if REG_PARTS == 0 and ROPE == "bf16":
        HALVES: gl.constexpr = _copy_rope_layout(WARPS)
        start = gl.convert_layout(rows.reshape([16 * WARPS]), gl.SliceLayout(1, HALVES), assert_trivial=True)
        is_row = gl.convert_layout(live.reshape([16 * WARPS]), gl.SliceLayout(1, HALVES), assert_trivial=True)
        column = gl.arange(0, 64, gl.SliceLayout(0, HALVES))[None, :]
        at = (start.expand_dims(1) + ROPE_AT).to(gl.pointer_type(gl.bfloat16)) + column
        async_copy.async_copy_global_to_shared(rope, gl.multiple_of(at, [16, 16]), mask=is_row.expand_dims(1))
    elif REG_PARTS == 0 and ROPE != "":
        async_copy.async_copy_global_to_shared(rope, at + ROPE_AT // 4, mask=live)
    if SCALE != "":
        SCALES: gl.constexpr = _copy_scales_layout(WARPS, SCALE)
        rows, live = row_starts(rows_ptr, numbers.load(gl.SliceLayout(1, SCALES)), ROW_STRIDE)
        start = (rows + SCALE_AT).to(gl.pointer_type(scales.dtype))
        column = gl.arange(0, scales.shape[1], gl.SliceLayout(0, SCALES))[None, :]
        async_copy.async_copy_global_to_shared(scales, gl.multiple_of(start + column, [16, 16]), mask=live)


@gluon.jit
def load_register_parts(
    rows_ptr, numbers, ROW_STRIDE: gl.constexpr, R: gl.constexpr, NOPE: gl.constexpr, ROPE: gl.constexpr,
    ROPE_AT: gl.constexpr, REG_PARTS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Load the parts of rows that are not copied to shared memory, int32 [rows, 16] each: words of the
    latent, then of the rope.

    Zeros where the number is -1, as in `copy_rows`.
    """
    parts = ()
    if REG_PARTS > 0:
        WORDS: gl.constexpr = words_layout(WARPS)
        rows, live = row_starts(
            rows_ptr, gl.convert_layout(numbers, gl.SliceLayout(1, WORDS), assert_trivial=True), ROW_STRIDE
        )
        column = gl.arange(0, 16, gl.SliceLayout(0, WORDS))[None, :]
        at = gl.multiple_of(rows.to(gl.pointer_type(gl.int32)) + column, [16, 16])
        FIRST: gl.constexpr = copied_words(R, NOPE, REG_PARTS)
        for c in gl.static_range(REG_PARTS - 1):
            parts = parts + (gl.load(at + (FIRST + c) * 16, mask=live, other=0),)  # noqa: RUF005
        for c in gl.static_range(2 if ROPE == "bf16" else 1 if ROPE != "" else 0):
            parts = parts + (gl.load(at + (ROPE_AT // 4 + c * 16), mask=live, other=0),)  # noqa: RUF005
    return parts


@gluon.jit
def words_of(words, parts, which: gl.constexpr, COPIED: gl.constexpr, WARPS: gl.constexpr):
    """int32 [rows, 16], 64 bytes of every row, from shared memory or, for register parts, from registers."""
    if which < COPIED:
        return words[which].load(words_layout(WARPS))
    else:
        return parts[which - COPIED]


@gluon.jit
def _bf16_words(words, WARPS: gl.constexpr):
    """int32 [rows, 16] -> their 32 bfloat16 values."""
    low = words.to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (words >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    x = gl.join(low, high).reshape([16 * WARPS, 4, 2, 2, 2])  # row, c, w1, w0, h
    return x.permute([0, 2, 3, 1, 4]).reshape([16 * WARPS, 32])  # row; w1, w0, c, h


@gluon.jit
def bf16_operand(words, more, A: gl.constexpr, WARPS: gl.constexpr):
    """Words of 32 values and of the next 32 -> operand bfloat16 [rows, 64]."""
    x = gl.join(_bf16_words(words, WARPS), _bf16_words(more, WARPS))
    return gl.convert_layout(x.permute([0, 2, 1]).reshape([16 * WARPS, 64]), A, assert_trivial=True)


@gluon.jit
def _e2m1_pair(magnitudes, signs):
    """Two e2m1 codes as bfloat16; magnitudes at bits 6 to 8 and 22 to 24, signs at 15 and 31."""
    return (magnitudes & 0x01C001C0) | (signs & -0x7FFF8000)


@gluon.jit
def _scaled(pair, both, dtype: gl.constexpr = gl.bfloat16):
    """(low, high) bfloat16 of int32 `pair` times those of `both`, as bfloat16 or float32."""
    pair = gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [pair, both], dtype=gl.int32, is_pure=True, pack=1
    )
    if dtype == gl.float32:
        low, high = pair << 16, pair & -0x10000
    else:
        low, high = pair.to(gl.int16), (pair >> 16).to(gl.int16)
    return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)


@gluon.jit
def decoded_e2m1(codes, scales, chunk: gl.constexpr, A: gl.constexpr, WARPS: gl.constexpr):
    """int32 [rows, 16], uint8 [rows, R / 16] in shared memory -> bfloat16 [rows, 128], values times 2**-16.

    As `triton_operands._fp4_operand`: e2m1 bits are the numbers times 2**-126, scales get a factor of 2**110.
    """
    scale = scales.slice(8 * chunk, 8, dim=1).load(gl.SliceLayout(2, block_scales_layout(WARPS)))
    return e2m1_operand(codes, scale, A, WARPS)


@gluon.jit
def e2m1_operand(codes, scale, A: gl.constexpr, WARPS: gl.constexpr):
    """As `decoded_e2m1`, with the scales uint8 [rows, 8] of the chunk in registers."""
    BLOCK: gl.constexpr = 16 * WARPS
    WORDS: gl.constexpr = words_layout(WARPS)
    scale = (scale.to(gl.int16) << 7).to(gl.float16, bitcast=True).to(gl.float32) * (2.0**110)
    both = scale.to(gl.int32, bitcast=True)
    both = both | (both >> 16)
    both = both.expand_dims(2).broadcast_to([BLOCK, 8, 2]).reshape([BLOCK, 16])
    both = gl.convert_layout(both, WORDS, assert_trivial=True)
    low0, high0 = _scaled(_e2m1_pair(codes << 6, codes << 12), both)
    low1, high1 = _scaled(_e2m1_pair(codes << 2, codes << 8), both)
    low2, high2 = _scaled(_e2m1_pair(codes >> 2, codes << 4), both)
    low3, high3 = _scaled(_e2m1_pair(codes >> 6, codes), both)
    first = gl.join(gl.join(low0, high0), gl.join(low1, high1))  # row, word; h, i1
    second = gl.join(gl.join(low2, high2), gl.join(low3, high3))
    x = gl.join(first, second).reshape([BLOCK, 4, 4, 2, 2, 2])  # row, c, w, h, i1, i2
    x = x.permute([0, 2, 5, 4, 1, 3]).reshape([BLOCK, 128])  # row; w, i2, i1, c, h
    return gl.convert_layout(x, A, assert_trivial=True)


@gluon.jit
def e4m3_values(codes, EXPONENT: gl.constexpr, WARPS: gl.constexpr, dtype: gl.constexpr = gl.bfloat16):
    """int32 [rows, 16] -> bfloat16 or float32 [rows, 64], the values times 2**EXPONENT.

    Codes i and i + 2 of a word are decoded together. Moved to bfloat16's sign, exponent and mantissa, they
    are the numbers times 2**-120.
    """
    BLOCK: gl.constexpr = 16 * WARPS
    BITS: gl.constexpr = (127 + 120 + EXPONENT) << 7  # 2**(120 + EXPONENT) as bfloat16
    both = gl.full([BLOCK, 16], BITS | (BITS << 16), gl.int32, words_layout(WARPS))
    low0, high0 = _scaled(((codes << 4) & 0x07F007F0) | ((codes << 8) & -0x7FFF8000), both, dtype)
    low1, high1 = _scaled(((codes >> 4) & 0x07F007F0) | (codes & -0x7FFF8000), both, dtype)
    x = gl.join(gl.join(low0, high0), gl.join(low1, high1)).reshape([BLOCK, 4, 4, 2, 2])  # row, c, w, h, i1
    return x.permute([0, 2, 4, 1, 3]).reshape([BLOCK, 64])  # row; w, i1, c, h


@gluon.jit
def decoded_e4m3(words, A: gl.constexpr, EXPONENT: gl.constexpr, WARPS: gl.constexpr):
    """Words of 64 values -> operand bfloat16 [rows, 64], the values times 2**EXPONENT."""
    return gl.convert_layout(e4m3_values(words, EXPONENT, WARPS), A, assert_trivial=True)


@gluon.jit
def decoded_e4m3_twice(words, more, A: gl.constexpr, WARPS: gl.constexpr):
    """Words of 64 values and of the next 64 -> operand bfloat16 [rows, 128]."""
    x = gl.join(e4m3_values(words, 0, WARPS), e4m3_values(more, 0, WARPS))
    x = x.permute([0, 2, 1]).reshape([16 * WARPS, 128])
    return gl.convert_layout(x, A, assert_trivial=True)


@gluon.jit
def tile_scales(scales, S: gl.constexpr, WARPS: gl.constexpr):
    """float32 [rows, 4] in shared memory -> scales of the four tiles, [rows, 1] each, laid out as scores."""
    x = scales.load(_tile_scales_layout(WARPS)).reshape([16 * WARPS, 2, 2])
    even, odd = gl.split(x)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    numbers = (first, second, third, fourth)
    found = ()
    for i in gl.static_range(4):
        part = gl.convert_layout(numbers[i], gl.SliceLayout(1, S), assert_trivial=True)
        found = found + (part[:, None],)  # noqa: RUF005
    return found


@gluon.jit
def in_operand_order(x, ENCODING: gl.constexpr):
    """[N, D] in the order of values -> in that of an operand's columns; D is 128, or 64 except for e2m1."""
    N: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    if ENCODING == "e2m1":
        x = x.reshape([N, 4, 4, 2, 2, 2]).permute([0, 2, 4, 5, 1, 3])  # c, w, h, i2, i1 -> w, i2, i1, c, h
    elif ENCODING == "bf16 words":
        # part, c, w1, w0, h -> part, w1, w0, c, h
        x = x.reshape([N, D // 32, 4, 2, 2, 2]).permute([0, 1, 3, 4, 2, 5])
    elif ENCODING == "e4m3":
        # part, c, w, h, i1 -> part, w, i1, c, h
        x = x.reshape([N, D // 64, 4, 4, 2, 2]).permute([0, 1, 3, 5, 2, 4])
    return x.reshape([N, D])


@gluon.jit
def in_value_order(x, ENCODING: gl.constexpr):
    """[128, N] in the order of an operand's columns -> in the order of values."""
    N: gl.constexpr = x.shape[1]
    if ENCODING == "e2m1":
        # w, i2, i1, c, h -> c, w, h, i2, i1
        x = x.reshape([4, 2, 2, 4, 2, N]).permute([3, 0, 4, 1, 2, 5])
    else:
        # part, w, i1, c, h -> part, c, w, h, i1
        x = x.reshape([2, 4, 2, 4, 2, N]).permute([0, 3, 1, 4, 2, 5])
    return x.reshape([128, N])
