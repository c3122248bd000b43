"""Conversion of one segment of a row between bytes and values on a GPU, for every encoding.

Callers pass pointers to the starts of rows and byte offsets from a RowFormat. Attention kernels have decoders
of their own (``attention/triton_operands.py``). A new encoding is one branch here in each direction.
"""

import triton
import triton.language as tl

from sgl_kvpool.codec.triton_scalars import (
    decode_e2m1_pairs,
    e4m3_bytes,
    e4m3_values,
    encode_e2m1_blocks,
    finite_fp32,
    fp32_of_bf16_bits,
    fp32_to,
    ue5m3_values,
)

_FP32_TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def load_values(
    rows,  # [ROWS, 1] pointers to uint8, the start of each row
    live,  # [ROWS, 1] bool; rows with False give zeros
    k_scale,  # divisor used by the encoder, or None
    FIRST: tl.constexpr,  # index of the first value within the segment
    COUNT: tl.constexpr,  # values to load, a power of two
    ENCODING: tl.constexpr,
    VALUES_AT: tl.constexpr,  # byte offset of the segment
    SCALE: tl.constexpr,  # encoding of the segment's stored scales; "" without stored scales
    BLOCK: tl.constexpr,  # values per stored scale
    SCALE_AT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """fp32 [ROWS, COUNT] values of one segment."""
    ROWS: tl.constexpr = rows.shape[0]
    index = tl.arange(0, COUNT)[None, :]
    if ENCODING == "bf16":
        words = (rows + (VALUES_AT + 2 * FIRST)).to(tl.pointer_type(tl.int16))
        return fp32_of_bf16_bits(tl.load(words + index, mask=live, other=0))
    elif ENCODING == "e4m3":
        codes = tl.load(rows + (VALUES_AT + FIRST) + index, mask=live, other=0)
        x = e4m3_values(codes, NATIVE)
        if SCALE == "fp32":
            words = (rows + (SCALE_AT + FIRST // BLOCK * 4)).to(tl.pointer_type(tl.float32))
            tile = tl.arange(0, COUNT // BLOCK)[None, :]
            scale = tl.load(words + tile, mask=live, other=0.0)
            x = tl.reshape(x, [ROWS, COUNT // BLOCK, BLOCK]) * scale[:, :, None]
            return tl.reshape(x, [ROWS, COUNT])
        elif k_scale is not None:
            return x * k_scale
        else:
            return x
    else:
        tl.static_assert(ENCODING == "e2m1" and SCALE == "ue5m3")
        pair = tl.arange(0, COUNT // 2)[None, :]
        packed = tl.load(rows + (VALUES_AT + FIRST // 2) + pair, mask=live, other=0)
        block = tl.arange(0, COUNT // BLOCK)[None, :]
        scale_bytes = tl.load(rows + (SCALE_AT + FIRST // BLOCK) + block, mask=live, other=0)
        # decode_e2m1_pairs gives values times 2**-14; this product and the one below are exact.
        scale = ue5m3_values(scale_bytes.to(tl.int32)) * 16384.0
        x = tl.reshape(decode_e2m1_pairs(packed), [ROWS, COUNT // BLOCK, BLOCK])
        return tl.reshape(x * scale[:, :, None], [ROWS, COUNT])


@triton.jit
def load_as(
    rows, live, k_scale, FIRST: tl.constexpr, COUNT: tl.constexpr, ENCODING: tl.constexpr,
    VALUES_AT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, SCALE_AT: tl.constexpr,
    NATIVE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """`load_values` cast to DTYPE; bf16 to bf16 copies the bits, including NaN payloads."""
    if ENCODING == "bf16" and tl.bfloat16 == DTYPE:
        words = (rows + (VALUES_AT + 2 * FIRST)).to(tl.pointer_type(tl.int16))
        bits = tl.load(words + tl.arange(0, COUNT)[None, :], mask=live, other=0)
        return bits.to(tl.bfloat16, bitcast=True)
    else:
        x = load_values(
            rows, live, k_scale, FIRST, COUNT, ENCODING, VALUES_AT, SCALE, BLOCK, SCALE_AT, NATIVE
        )
        return fp32_to(x, DTYPE, NATIVE)


@triton.jit
def store_values(
    bits,  # [ROWS, COUNT] int16, the bf16 values; the other arguments are those of `load_values`
    rows, live, k_scale, FIRST: tl.constexpr, COUNT: tl.constexpr, ENCODING: tl.constexpr,
    VALUES_AT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, SCALE_AT: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Encode values and write them, and their scales, into one segment."""
    ROWS: tl.constexpr = rows.shape[0]
    index = tl.arange(0, COUNT)[None, :]
    if ENCODING == "bf16":
        words = (rows + (VALUES_AT + 2 * FIRST)).to(tl.pointer_type(tl.int16))
        tl.store(words + index, bits, mask=live)  # bits are copied, including NaN payloads
    elif ENCODING == "e4m3":
        x = finite_fp32(bits)
        if SCALE == "fp32":
            tiles = tl.reshape(x, [ROWS, COUNT // BLOCK, BLOCK])
            scale = tl.div_rn(tl.max(tl.abs(tiles), 2), 448.0)
            scale = tl.maximum(scale, _FP32_TINY)
            words = (rows + (SCALE_AT + FIRST // BLOCK * 4)).to(tl.pointer_type(tl.float32))
            tile = tl.arange(0, COUNT // BLOCK)[None, :]
            tl.store(words + tile, scale, mask=live)
            x = tl.div_rn(tiles, tl.broadcast_to(scale[:, :, None], tiles.shape))
            x = tl.reshape(x, [ROWS, COUNT])
        elif k_scale is not None:
            x = tl.div_rn(x, tl.zeros_like(x) + k_scale)
        # A thread stores the codes of the 8 values that it loads at once. With 16 values Triton would make it
        # load 32 bytes, as two loads that each touch every sector of its warp's values.
        at = tl.max_contiguous(rows + (VALUES_AT + FIRST) + index, [1, 8])
        tl.store(at, e4m3_bytes(x, NATIVE), mask=live)
    else:
        tl.static_assert(ENCODING == "e2m1" and SCALE == "ue5m3" and BLOCK == 16)
        packed, scale_bytes = encode_e2m1_blocks(finite_fp32(bits), ROWS, COUNT)
        pair = tl.arange(0, COUNT // 2)[None, :]
        tl.store(rows + (VALUES_AT + FIRST // 2) + pair, packed, mask=live)
        block = tl.arange(0, COUNT // BLOCK)[None, :]
        tl.store(rows + (SCALE_AT + FIRST // BLOCK) + block, scale_bytes, mask=live)
