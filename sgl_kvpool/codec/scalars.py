"""Number formats of rows in torch: e2m1, ue5m3 and e4m3.

======  ====  ==========================================================================
format  bits  values
======  ====  ==========================================================================
e2m1    4     sign, then 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP Microscaling, FP4)
ue5m3   8     no sign, 5 exponent bits (bias 15), 3 mantissa bits: the upper 8 of the 15
              bits of a non-negative fp16; 2**-17 ... 61440, byte 0 is 0
e4m3    8     ``torch.float8_e4m3fn``; largest 448
======  ====  ==========================================================================

All rounding is to nearest, ties to even. Inputs are fp32 and have been made finite by
`finite_fp32`. ``triton_scalars.py`` and ``csrc/row_codec.h`` implement the same rules; all three must store
the same bytes, so no expression here may be rewritten into one that rounds differently.
"""

from functools import cache

import torch

E2M1_MAX = 6.0
E4M3_MAX = 448.0
#: Byte of the largest ue5m3 scale, 61440. The bytes above it would be infinity and NaN as fp16.
UE5M3_MAX_BYTE = 0xF7
UE5M3_MAX = 61440.0
#: Smallest normal fp32, the floor of fp32 block scales.
FP32_TINY = float(torch.finfo(torch.float32).tiny)

_BF16_MAX = float(torch.finfo(torch.bfloat16).max)


def finite_fp32(values: torch.Tensor) -> torch.Tensor:
    """bf16 values as fp32; NaN becomes 0 and infinities the largest finite bf16."""
    return values.float().nan_to_num_(nan=0.0, posinf=_BF16_MAX, neginf=-_BF16_MAX)


def divide_(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """Divide in place, with one rounding.

    The divisor becomes a tensor, because with a Python number torch multiplies by the reciprocal on CUDA.
    """
    return values.div_(torch.full((), divisor, dtype=values.dtype, device=values.device))


def pairwise_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis (a power of two) as a tree: adjacent pairs first, in index order.

    The order is part of the encoding rules: `Tensor.sum` and `tl.sum` guarantee no order, and the choice
    between two scales must not depend on the machine.
    """
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def ue5m3_bytes(values: torch.Tensor) -> torch.Tensor:
    """Nearest ue5m3 of non-negative fp32 values, as int32 bytes; at most `UE5M3_MAX_BYTE`.

    A value that rounds to 0 gives byte 0; the caller decides whether that is allowed.
    """
    bits = values.view(torch.int32)
    # Drop 20 of 23 mantissa bits, then re-bias the exponent from 127 to 15.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 15) << 3)
    # Below 2**-14 the steps are 2**-17 wide, which is the spacing of fp32 between 64 and 128: the
    # addition itself rounds.
    subnormal = (values + 64.0).view(torch.int32) - 0x42800000
    return torch.where(values < 2.0**-14, subnormal, normal).clamp_(max=UE5M3_MAX_BYTE)


def ue5m3_values(scale_bytes: torch.Tensor) -> torch.Tensor:
    """fp32 values of integer ue5m3 bytes: shifted left by 7 they are the same numbers in fp16."""
    return (scale_bytes.to(torch.int16) << 7).view(torch.float16).float()


def ue5m3_candidates(largest: torch.Tensor) -> list[torch.Tensor]:
    """Bytes of the scales that an encoder tries for a block, in order, from the block's largest magnitude.

    With b6 and b4 the bytes of largest / 6 and largest / 4, the order is b6, b6 - 1, b6 + 1, b4 - 1, b4, each
    clamped to 1 to `UE5M3_MAX_BYTE`. For decoded values the candidates include the scale of their block, or
    one that represents the same values, so that encoding them again keeps the values. With b6 + 4
    and b6 + 5 instead of b4 - 1 and b4 the error is as small (0.082 for N(0, 1)), but in blocks below 2**-12
    the candidates do not include that scale.
    """
    sixth = ue5m3_bytes(divide_(largest.clone(), E2M1_MAX))
    quarter = ue5m3_bytes(largest * 0.25)
    tried = (sixth, sixth - 1, sixth + 1, quarter - 1, quarter)
    return [scale_bytes.clamp(1, UE5M3_MAX_BYTE) for scale_bytes in tried]


def round_to_e2m1(magnitudes: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 magnitude of non-negative fp32 values, as fp32; values above 6 give 6."""
    magnitudes = magnitudes.clamp(max=E2M1_MAX)
    # e2m1 steps are half of the value's power of two, and 0.5 below 1. 2**22 times that power of
    # two is a number whose fp32 spacing is exactly the step, so adding it rounds and subtracting it
    # gives the rounded value back.
    power = magnitudes.clamp(min=1.0).view(torch.int32).bitwise_and_(0x7F800000)
    spacer = (power + (22 << 23)).view(torch.float32)
    return (magnitudes + spacer).sub_(spacer)


def e2m1_codes(rounded: torch.Tensor, signed: torch.Tensor) -> torch.Tensor:
    """4-bit codes (uint8) of magnitudes from `round_to_e2m1`, with the signs of `signed`."""
    # Multiplied by 2**-14, the magnitude's three bits are bits 9 to 11 of an fp16 (1.0 has exponent bits 1).
    bits = (torch.copysign(rounded, signed) * 2.0**-14).to(torch.float16).view(torch.int16)
    return (((bits >> 9) & 7) | ((bits >> 12) & 8)).to(torch.uint8)


@cache
def e2m1_pairs_table(device: torch.device) -> torch.Tensor:
    """Decoder of packed e2m1: ``table[scale byte * 256 + code byte]`` is two bf16 in one int32.

    Significands of e2m1 have 2 bits and those of ue5m3 have 4, so a bf16 (8 bits) holds the
    product without rounding. The table is int32 [65536], 256 KiB.
    """
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([magnitudes, -magnitudes])  # [16] by code
    scales = ue5m3_values(torch.arange(256))  # [256]
    decoded = (scales[:, None] * values[None, :]).to(torch.bfloat16)  # [256, 16]
    even = decoded[:, None, :].expand(256, 16, 16)  # the low nibble varies fastest
    odd = decoded[:, :, None].expand(256, 16, 16)
    return torch.stack([even, odd], dim=-1).view(torch.int32).reshape(-1).to(device)


def round_to_e4m3_(values: torch.Tensor) -> torch.Tensor:
    """The nearest `torch.float8_e4m3fn` of fp32 values, which are first clamped to +-448 in place."""
    return values.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


@cache
def e4m3_pairs_table(device: torch.device) -> torch.Tensor:
    """Decoder of e4m3: ``table[two bytes as uint16]`` is two bf16 (exact) in one int32, [65536]."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16)
    first = values[None, :].expand(256, 256)  # little-endian: the first byte varies fastest
    second = values[:, None].expand(256, 256)
    return torch.stack([first, second], dim=-1).view(torch.int32).reshape(-1).to(device)
