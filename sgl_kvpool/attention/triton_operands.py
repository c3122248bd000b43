"""Operands of matrix instructions from stored rows and from queries, on a GPU.

A matrix instruction of Hopper multiplies bfloat16 here, and bfloat16 can represent every encoding of a row
without rounding: e4m3 has 4 significant bits, a product of e2m1 and ue5m3 at most 6, and bfloat16 has 8 with
the exponents of float32. Factors that do not fit are left out, and the caller multiplies float32 results by
them: FP4's factor, the tile scales of `fp8_block_scale`, k_scale.

`NATIVE` is False in Triton's interpreter, which has neither bfloat16 arithmetic nor inline PTX: operands are
then the same numbers in float32.
"""

import triton
import triton.language as tl

from sgl_kvpool.codec.triton_scalars import fp32_of_bf16_bits, fp32_to

#: Operands of FP4 latents are the values times 2 to the power of this; see `_fp4_operand`.
VALUE_SCALE_EXPONENT = -16
#: Factors of FP4's operands, of e4m3 codes (their bits are the numbers times 2**-120) and of ue5m3 scales
#: (which also make up for the bits of e2m1 codes, the numbers times 2**-126).
_OPERAND_FACTOR = tl.constexpr(2.0**VALUE_SCALE_EXPONENT)
_E4M3_FACTOR = tl.constexpr(2.0**120)
_SCALE_FACTOR = tl.constexpr(2.0 ** (126 + VALUE_SCALE_EXPONENT))


@triton.jit
def rounded_operand(x, NATIVE: tl.constexpr):
    """float32 -> operand, rounded to nearest even bfloat16."""
    rounded = fp32_to(x, tl.bfloat16, NATIVE)
    if NATIVE:
        return rounded
    else:
        return fp32_of_bf16_bits(rounded.to(tl.int16, bitcast=True))


@triton.jit
def permuted(x, ENCODING: tl.constexpr):
    """[D, N] in the order of values -> in the order of an operand's columns, and back.

    The bits of column numbers are permuted, within a word (`_fp4_operand`, `_e4m3_operand`) and between words
    (`_spread`). This is done to queries and to results, once per program, because addresses in that order
    would not be contiguous.
    """
    D: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    if ENCODING == "e2m1":
        x = tl.reshape(tl.permute(tl.reshape(x, [D // 8, 2, 2, 2, N]), (0, 3, 2, 1, 4)), [D, N])
        return tl.trans(_spread(tl.trans(x), ENCODING))
    elif ENCODING == "e4m3":
        x = tl.reshape(tl.permute(tl.reshape(x, [D // 4, 2, 2, N]), (0, 2, 1, 3)), [D, N])
        return tl.trans(_spread(tl.trans(x), ENCODING))
    else:
        return x


@triton.jit
def _spread(x, ENCODING: tl.constexpr):
    """[N, D] with columns permuted so that operands are stored to shared memory without bank conflicts.

    Eight adjacent threads each decode 16 bytes of the same row, which become 4 groups of 8 columns for e2m1
    and 2 for e4m3, and store one group at a time. In the order of values these 8 groups would lie in 4 or 2
    lines of 128 bytes, at the same banks. Therefore the bits of a group's number, whose upper 3 bits are the
    thread's number, are permuted: the 8 groups become one line. (With 4 threads per row, as for a
    rope, the order of values has no conflicts. For e2m1 it would have two-way conflicts, but 4 threads read
    an e2m1 latent only if `kv_lora_rank` is not a multiple of 256.)
    """
    N: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    if ENCODING == "e2m1" and D % 256 == 0:
        groups = tl.reshape(x, [N, D // 256, 2, 2, 2, 2, 2, 8])
        return tl.reshape(tl.permute(groups, (0, 1, 6, 5, 4, 3, 2, 7)), [N, D])
    elif ENCODING == "e4m3" and D % 128 == 0:
        groups = tl.reshape(x, [N, D // 128, 2, 4, 2, 8])
        return tl.reshape(tl.permute(groups, (0, 1, 4, 3, 2, 5)), [N, D])
    else:
        return x


@triton.jit
def load_stored(
    rows,  # [ROWS, 1] pointers to uint8, the start of each row, at multiples of 16
    live,  # [ROWS, 1] bool; other rows give zeros
    FIRST: tl.constexpr,  # index of the first value within the segment
    COUNT: tl.constexpr,  # values, a power of two
    ENCODING: tl.constexpr,
    VALUES_AT: tl.constexpr,  # byte offset of the segment
    SCALE: tl.constexpr,  # encoding of its stored scales, "" if none
    BLOCK: tl.constexpr,  # values per stored scale
    SCALE_AT: tl.constexpr,
    DIRECT: tl.constexpr,  # whether bf16 may go to shared memory without a register
):
    """Stored values of a segment with their scales, for `operand_of`: (values, scales)."""
    if ENCODING == "bf16":
        at = rows + (VALUES_AT + 2 * FIRST)
        if DIRECT:
            column = tl.arange(0, COUNT)[None, :]
            return (tl.load(at.to(tl.pointer_type(tl.bfloat16)) + column, mask=live, other=0.0),)
        else:
            # Loaded as words like the other encodings: loads of other shapes would need rows' addresses in
            # several layouts.
            word = tl.arange(0, COUNT // 2)[None, :]
            return (tl.load(at.to(tl.pointer_type(tl.int32)) + word, mask=live, other=0),)
    elif ENCODING == "e4m3":
        word = tl.arange(0, COUNT // 4)[None, :]
        words = (rows + (VALUES_AT + FIRST)).to(tl.pointer_type(tl.int32))
        codes = tl.load(words + word, mask=live, other=0)
        if SCALE == "fp32":
            tl.static_assert(BLOCK == COUNT)
            words = (rows + (SCALE_AT + FIRST // BLOCK * 4)).to(tl.pointer_type(tl.float32))
            return codes, tl.load(words, mask=live, other=0.0)  # [ROWS, 1]
        else:
            return (codes,)
    else:
        tl.static_assert(ENCODING == "e2m1" and SCALE == "ue5m3" and BLOCK == 16)
        word = tl.arange(0, COUNT // 8)[None, :]
        words = (rows + (VALUES_AT + FIRST // 2)).to(tl.pointer_type(tl.int32))
        codes = tl.load(words + word, mask=live, other=0)
        block = tl.arange(0, COUNT // 16)[None, :]
        scales = rows + (SCALE_AT + FIRST // 16) + block
        return codes, tl.load(scales, mask=live, other=0)


@triton.jit
def operand_of(stored, ENCODING: tl.constexpr, NATIVE: tl.constexpr):
    """Operand [ROWS, COUNT] from the result of `load_stored`, columns in the order of `permuted`.

    e4m3 is without its scale, e2m1 is multiplied by ``2**VALUE_SCALE_EXPONENT``.
    """
    if ENCODING == "bf16":
        if tl.bfloat16 == stored[0].dtype:
            return stored[0]
        else:
            return _bf16_operand(stored[0], NATIVE)
    elif ENCODING == "e4m3":
        return _e4m3_operand(stored[0], NATIVE)
    else:
        return _fp4_operand(stored[0], stored[1], NATIVE)


@triton.jit
def side_by_side(a, b):
    """[ROWS, N] and [ROWS, N] -> [ROWS, 2 N], without a move between registers."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), [a.shape[0], 2 * a.shape[1]])


@triton.jit
def _bf16_operand(words, NATIVE: tl.constexpr):
    """int32 [ROWS, N] with two bf16 each -> operand [ROWS, 2 N]."""
    low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
    if NATIVE:
        x = tl.join(low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True))
    else:
        x = tl.join(fp32_of_bf16_bits(low), fp32_of_bf16_bits(high))
    return tl.reshape(x, [words.shape[0], 2 * words.shape[1]])


@triton.jit
def _e4m3_operand(codes, NATIVE: tl.constexpr):
    """int32 [ROWS, N] with four e4m3 each -> operand [ROWS, 4 N].

    As `_fp4_operand`, with codes i and i + 2 of a word for i = 0, 1: moved to bfloat16's sign, lowest four
    exponent bits and highest mantissa bits, a code is its number times 2**-120. Before
    `_spread`, column bits c1 c0 hold the value c0 c1 of a word. (Conversion through fp16 and float32, with
    the GPU's own instructions, would take as many instructions and more registers.)
    """
    ROWS: tl.constexpr = codes.shape[0]
    N: tl.constexpr = codes.shape[1]
    scale = tl.full([ROWS, N], _E4M3_FACTOR, tl.float32)
    low0, high0 = _scaled_pair(((codes << 4) & 0x07F007F0) | ((codes << 8) & -0x7FFF8000), scale, NATIVE)
    low1, high1 = _scaled_pair(((codes >> 4) & 0x07F007F0) | (codes & -0x7FFF8000), scale, NATIVE)
    x = tl.reshape(tl.join(tl.join(low0, low1), tl.join(high0, high1)), [ROWS, 4 * N])
    return _spread(x, "e4m3")


@triton.jit
def _fp4_operand(codes, scales, NATIVE: tl.constexpr):
    """int32 [ROWS, N] with eight e2m1 each, uint8 [ROWS, N / 2] of ue5m3 -> operand [ROWS, 8 N].

    Two values are processed in one 32-bit register: codes i and i + 4 of a word, for i from 0 to 3. When
    their bits are moved to bfloat16's sign, lowest two exponent bits and highest mantissa bit, they are the
    e2m1 numbers times 2**-126; one packed product with the scale times 2**110 gives the values times 2**-16.
    The two values stay adjacent in the result, so its columns are not in the order of the values: before
    `_spread`, column bits c2 c1 c0 hold the value c0 c1 c2 of a word.
    """
    ROWS: tl.constexpr = codes.shape[0]
    N: tl.constexpr = codes.shape[1]
    # Shifted left by 7, a ue5m3 is the same number in fp16; its 4 significant bits fit into bfloat16.
    half = (scales.to(tl.int16) << 7).to(tl.float16, bitcast=True)
    scale = half.to(tl.float32) * _SCALE_FACTOR
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], [ROWS, N // 2, 2]), [ROWS, N])
    low0, high0 = _scaled_pair(_fp4_bits(codes << 6, codes << 12), scale, NATIVE)
    low1, high1 = _scaled_pair(_fp4_bits(codes << 2, codes << 8), scale, NATIVE)
    low2, high2 = _scaled_pair(_fp4_bits(codes >> 2, codes << 4), scale, NATIVE)
    low3, high3 = _scaled_pair(_fp4_bits(codes >> 6, codes), scale, NATIVE)
    low = tl.join(tl.join(low0, low1), tl.join(low2, low3))
    high = tl.join(tl.join(high0, high1), tl.join(high2, high3))
    return _spread(tl.reshape(tl.join(low, high), [ROWS, 8 * N]), "e2m1")


@triton.jit
def _fp4_bits(magnitudes, signs):
    """Two codes as bfloat16; magnitudes at bits 6 to 8 and 22 to 24, signs at 15 and 31."""
    return (magnitudes & 0x01C001C0) | (signs & -0x7FFF8000)


@triton.jit
def _scaled_pair(pair, scale, NATIVE: tl.constexpr):
    """Both bfloat16 of int32 `pair` times float32 `scale`, which is at least 0 and exact in bfloat16."""
    if NATIVE:
        bits = scale.to(tl.int32, bitcast=True)
        both = bits | (bits >> 16)  # the scale has no sign and no bits below the upper 16
        pair = tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [pair, both], dtype=tl.int32, is_pure=True, pack=1
        )
        low = pair.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        low = (pair << 16).to(tl.float32, bitcast=True) * scale
        high = (pair & -0x10000).to(tl.float32, bitcast=True) * scale
    return low, high


@triton.jit
def operand_factor(ENCODING: tl.constexpr):
    """Factor by which the operands of an encoding are multiplied."""
    if ENCODING == "e2m1":
        return tl.constexpr(_OPERAND_FACTOR)
    else:
        return tl.constexpr(1.0)


@triton.jit
def load_queries(
    columns,  # [1, N] pointers, the first value of each query's segment
    exists,  # bool [1, N]
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    ENCODING: tl.constexpr,  # of the segment
    FACTOR: tl.constexpr,  # a power of two
    NATIVE: tl.constexpr,
):
    """Operand [COUNT, N] of query values times FACTOR, in the order of `permuted`."""
    values = FIRST + tl.arange(0, COUNT)[:, None]
    DTYPE: tl.constexpr = columns.dtype.element_ty
    if tl.bfloat16 == DTYPE:
        words = columns.to(tl.pointer_type(tl.int16))
        x = fp32_of_bf16_bits(tl.load(words + values, mask=exists, other=0))
    else:
        x = tl.load(columns + values, mask=exists, other=0.0).to(tl.float32)
    return permuted(rounded_operand(x * FACTOR, NATIVE), ENCODING)
