"""Number formats of rows in Triton: the arithmetic of ``scalars.py``, byte for byte.

Rules that keep the bytes the same on every machine:

* division is `tl.div_rn`; Triton's ``/`` on fp32 is approximate;
* encoding kernels are compiled with ``enable_fp_fusion=False``: a fused multiply-add rounds once where the
  rules round twice;
* sums go through `pairwise_sum_16`; the compiler chooses the order of `tl.sum`.

`NATIVE` says whether the GPU's own conversions between fp32 and bf16 or e4m3 are used; those for e4m3 exist
from sm_89 on. The integer forms beside them give the same results everywhere, also in Triton's interpreter,
whose own conversions truncate.
"""

import triton
import triton.language as tl

_BF16_MAX = tl.constexpr(3.3895313892515355e38)
_E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def fp32_of_bf16_bits(bits):
    """int16 bits of a bf16 -> fp32; a shift, because the cast of Triton's interpreter loses denormals."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def finite_fp32(bits):
    """int16 bits of a bf16 -> fp32; NaN becomes 0 and infinities the largest finite bf16."""
    x = fp32_of_bf16_bits(bits)
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, -_BF16_MAX), _BF16_MAX)


@triton.jit
def fp32_to(x, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 -> DTYPE (bf16, fp16 or fp32), rounded to nearest even."""
    if tl.bfloat16 == DTYPE and not NATIVE:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def e4m3_bytes(x, NATIVE: tl.constexpr):
    """Nearest e4m3 of fp32, clamped to +-448 first, as uint8."""
    x = tl.minimum(tl.maximum(x, -_E4M3_MAX), _E4M3_MAX)
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Drop 20 of 23 mantissa bits, then re-bias the exponent from 127 to 7.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        # Below 2**-6 the steps are 2**-9 wide, the spacing of fp32 from 2**14 on.
        subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(tl.abs(x) < 0.015625, subnormal, normal)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_values(codes, NATIVE: tl.constexpr):
    """uint8 e4m3 -> fp32, exact."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = codes.to(tl.int16)
        half = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)  # the value times 2**-8 as fp16
        x = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((wide & 0x7F) == 0x7F, float("nan"), x)


@triton.jit
def ue5m3_bytes(x):
    """Nearest ue5m3 of non-negative fp32, as int32, at most 0xF7 (61440)."""
    bits = x.to(tl.int32, bitcast=True)
    # Drop 20 of 23 mantissa bits, then re-bias the exponent from 127 to 15.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 15) << 3)
    # Below 2**-14 the steps are 2**-17 wide, the spacing of fp32 from 64 on: adding rounds.
    subnormal = (x + 64.0).to(tl.int32, bitcast=True) - 0x42800000
    return tl.minimum(tl.where(x < 6.103515625e-05, subnormal, normal), 0xF7)


@triton.jit
def ue5m3_values(scale_bytes):
    """Integer ue5m3 bytes -> fp32: shifted left by 7 they are the same numbers in fp16."""
    return (scale_bytes << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def pairwise_sum_16(x, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """fp32 [ROWS, BLOCKS, 16] -> [ROWS, BLOCKS]: a tree, adjacent pairs first, in index order."""
    a, b = tl.split(tl.reshape(x, [ROWS, BLOCKS, 8, 2]))
    a, b = tl.split(tl.reshape(a + b, [ROWS, BLOCKS, 4, 2]))
    a, b = tl.split(tl.reshape(a + b, [ROWS, BLOCKS, 2, 2]))
    a, b = tl.split(a + b)
    return a + b


@triton.jit
def round_to_e2m1(sizes):
    """Nearest e2m1 magnitude of non-negative fp32, as fp32; values above 6 give 6. See scalars.py."""
    sizes = tl.minimum(sizes, 6.0)
    power = tl.maximum(sizes, 1.0).to(tl.int32, bitcast=True) & 0x7F800000
    spacer = (power + (22 << 23)).to(tl.float32, bitcast=True)
    return (sizes + spacer) - spacer


@triton.jit
def _candidate(sixth, quarter, NUMBER: tl.constexpr):
    """Byte of candidate scale NUMBER: see `ue5m3_candidates` of scalars.py."""
    if NUMBER == 0:
        scale_byte = sixth
    elif NUMBER < 3:
        scale_byte = sixth + (2 * NUMBER - 3)
    else:
        scale_byte = quarter + (NUMBER - 4)
    return tl.minimum(tl.maximum(scale_byte, 1), 0xF7)


@triton.jit
def _squared_error(sizes, scale, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Sum of squared errors [ROWS, BLOCKS] of magnitudes [ROWS, BLOCKS, 16] at scales [ROWS, BLOCKS]."""
    # If a quotient is halfway between two e2m1 magnitudes, the product with the rounded reciprocal may round
    # to either of them, with the same error; all other quotients are at least 2**-10 away from the middle.
    rounded = round_to_e2m1(sizes * tl.div_rn(1.0, scale)[:, :, None])
    # rounded * scale is exact; the difference, the square and the sums round once each.
    difference = sizes - rounded * scale[:, :, None]
    return pairwise_sum_16(difference * difference, ROWS, BLOCKS)


@triton.jit
def encode_e2m1_blocks(x, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """fp32 [ROWS, COUNT] -> packed uint8 [ROWS, COUNT / 2], ue5m3 uint8 [ROWS, COUNT / 16]."""
    BLOCKS: tl.constexpr = COUNT // 16
    signed = tl.reshape(x, [ROWS, BLOCKS, 16])
    sizes = tl.abs(signed)
    largest = tl.max(sizes, 2)
    sixth = ue5m3_bytes(tl.div_rn(largest, 6.0))
    quarter = ue5m3_bytes(largest * 0.25)
    scale_byte = _candidate(sixth, quarter, 0)
    error = _squared_error(sizes, ue5m3_values(scale_byte), ROWS, BLOCKS)
    for number in tl.static_range(1, 5):
        tried = _candidate(sixth, quarter, number)
        its_error = _squared_error(sizes, ue5m3_values(tried), ROWS, BLOCKS)
        better = its_error < error  # strict: at a tie the earlier candidate stays
        scale_byte = tl.where(better, tried, scale_byte)
        error = tl.minimum(its_error, error)
    # Round quotients to multiples of 2**-12, which makes a quotient halfway between two magnitudes exact.
    products = sizes * tl.div_rn(1.0, ue5m3_values(scale_byte))[:, :, None]
    rounded = round_to_e2m1((tl.minimum(products, 6.0) + 3072.0) - 3072.0)
    scale_byte = tl.where(largest > 0, scale_byte, 0)
    # Multiplied by 2**-14, the magnitude's three bits are bits 9 to 11 of an fp16.
    half = (rounded * 6.103515625e-05).to(tl.float16).to(tl.int16, bitcast=True)
    sign = (signed.to(tl.int32, bitcast=True) >> 28) & 8
    codes = (half >> 9).to(tl.int32) | sign
    even, odd = tl.split(tl.reshape(codes, [ROWS, COUNT // 2, 2]))
    return (even | (odd << 4)).to(tl.uint8), scale_byte.to(tl.uint8)


@triton.jit
def decode_e2m1_pairs(packed):
    """uint8 [ROWS, N] -> fp32 [ROWS, 2 N], the e2m1 values times 2**-14 (exact)."""
    wide = packed.to(tl.int16)
    codes = tl.reshape(tl.join(wide, wide >> 4), [packed.shape[0], 2 * packed.shape[1]])
    half = ((codes & 7) << 9) | ((codes & 8) << 12)
    return half.to(tl.float16, bitcast=True).to(tl.float32)
