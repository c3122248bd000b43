"""Rows in torch: the reference of the Triton kernels, and what runs on a CPU.

Callers have been checked by ``sgl_kvpool.codec``; nothing here validates. Work goes in pieces of
`_PIECE_ROWS` rows through scratch buffers that stay in a core's cache: the elementwise passes between
reading a row and writing its values would otherwise each travel through memory. A new encoding is
one entry in `_ENCODERS` and one in `_DECODERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from sgl_kvpool.codec import scalars
from sgl_kvpool.layout import Encoding, RowFormat, Segment

__all__ = ["encode_rows", "gather_parts", "store_rows"]

#: Rows handled at a time on a CPU: 1 MB of fp32 for a latent of 512.
_PIECE_ROWS = 512

# --------------------------------------------------------------------------------------- encoding
# An encoder takes bf16 [tokens, count], values per stored scale (0: none) and k_scale (1.0 where the
# layout has none); it returns the values' bytes and the scales' bytes, uint8 [tokens, size_bytes].

_Encoded = tuple[torch.Tensor, torch.Tensor | None]


def _encode_bf16(values: torch.Tensor, block: int, k_scale: float) -> _Encoded:
    return values.contiguous().view(torch.uint8), None  # bits are kept, NaN payloads too


def _encode_e4m3(values: torch.Tensor, block: int, k_scale: float) -> _Encoded:
    # Division by an fp32 tensor: a Python float would be converted in double precision.
    divisor = torch.tensor(k_scale, dtype=torch.float32, device=values.device)
    scaled = scalars.finite_fp32(values).div_(divisor)
    return scalars.round_to_e4m3(scaled).view(torch.uint8), None


def _encode_e4m3_fp32(values: torch.Tensor, block: int, k_scale: float) -> _Encoded:
    tiles = scalars.finite_fp32(values).unflatten(-1, (-1, block))  # [tokens, tiles, block]
    largest = tiles.abs().amax(-1, keepdim=True)
    scale = largest.div_(scalars.E4M3_MAX).clamp_(min=scalars.FP32_TINY)  # [tokens, tiles, 1]
    codes = scalars.round_to_e4m3(tiles.div_(scale)).view(torch.uint8).flatten(-2)
    return codes, scale.flatten(-2).view(torch.uint8)


def _encode_e2m1_ue5m3(values: torch.Tensor, block: int, k_scale: float) -> _Encoded:
    signed = scalars.finite_fp32(values).unflatten(-1, (-1, block))  # [tokens, blocks, block]
    sizes = signed.abs()
    largest = sizes.amax(-1, keepdim=True)
    lowest_byte = (largest > 0).to(torch.int32)  # a block with values never gets scale 0
    best_byte = best_rounded = best_error = None
    for anchor in scalars.E2M1_ANCHORS:
        scale_byte = torch.maximum(scalars.ue5m3_bytes(largest / anchor), lowest_byte)
        scale = scalars.ue5m3_values(scale_byte)
        divisor = torch.where(scale > 0, scale, 1.0)  # 0 / 1 where all values are 0
        rounded = scalars.round_to_e2m1(sizes / divisor)
        # rounded * scale is exact; difference, square and sums round once each.
        difference = sizes - rounded * scale
        error = scalars.pairwise_sum(difference * difference).unsqueeze(-1)
        if best_byte is None:
            best_byte, best_rounded, best_error = scale_byte, rounded, error
        else:
            better = error < best_error  # strictly: a tie keeps the first anchor
            best_byte = torch.where(better, scale_byte, best_byte)
            best_rounded = torch.where(better, rounded, best_rounded)
    codes = scalars.e2m1_codes(best_rounded, signed).flatten(-2)  # [tokens, count]
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)  # even element in the low nibble
    return packed, best_byte.flatten(-2).to(torch.uint8)


_ENCODERS: dict[tuple[Encoding, Encoding | None], Callable[..., _Encoded]] = {
    (Encoding.BF16, None): _encode_bf16,
    (Encoding.E4M3, None): _encode_e4m3,
    (Encoding.E4M3, Encoding.FP32): _encode_e4m3_fp32,
    (Encoding.E2M1, Encoding.UE5M3): _encode_e2m1_ue5m3,
}

# --------------------------------------------------------------------------------------- decoding
# A decoder takes the bytes of the values and of the scales, uint8 [tokens, size_bytes] views of whole
# rows, values per stored scale and k_scale; it writes [tokens, count] into `out` (any float dtype).


def _decode_bf16(
    codes: torch.Tensor, scales: torch.Tensor | None, block: int, k_scale: float, out: torch.Tensor
) -> None:
    out.copy_(codes.view(torch.bfloat16))


def _e4m3_values(codes: torch.Tensor) -> torch.Tensor:
    """bf16 [tokens, count] of e4m3 bytes. Two at a time by table: torch's cast is 5x slower."""
    table = scalars.e4m3_pairs_table(codes.device)
    index = codes.view(torch.uint16).to(torch.int32)
    pairs = torch.empty_like(index)
    torch.index_select(table, 0, index.view(-1), out=pairs.view(-1))
    return pairs.view(torch.bfloat16)


def _decode_e4m3(
    codes: torch.Tensor, scales: torch.Tensor | None, block: int, k_scale: float, out: torch.Tensor
) -> None:
    values = _e4m3_values(codes)
    if k_scale == 1.0:
        out.copy_(values)
        return
    factor = torch.tensor(k_scale, dtype=torch.float32, device=codes.device)
    # float() first: a product of a bf16 and an fp32 tensor takes a slow mixed path on a CPU.
    out.copy_(values.float().mul_(factor))


def _decode_e4m3_fp32(
    codes: torch.Tensor, scales: torch.Tensor | None, block: int, k_scale: float, out: torch.Tensor
) -> None:
    assert scales is not None
    factors = scales.contiguous().view(torch.float32).unsqueeze(-1)  # [tokens, tiles, 1]
    values = _e4m3_values(codes).float()
    values.unflatten(-1, (-1, block)).mul_(factors)
    out.copy_(values)


def _decode_e2m1_ue5m3(
    codes: torch.Tensor, scales: torch.Tensor | None, block: int, k_scale: float, out: torch.Tensor
) -> None:
    assert scales is not None and block == 16  # 8 code bytes share a scale: one int64 of copies
    table = scalars.e2m1_pairs_table(codes.device)
    spread = (scales.to(torch.int64) * 0x0101010101010101).view(torch.uint8)  # [tokens, count / 2]
    # int16 is the widest type in which these passes stay cheap; the sum wraps into the sign bit.
    index = codes.to(torch.int16).add_(spread.to(torch.int16), alpha=256)
    index = index.view(torch.uint16).to(torch.int32)
    pairs = torch.empty_like(index)
    torch.index_select(table, 0, index.view(-1), out=pairs.view(-1))
    out.copy_(pairs.view(torch.bfloat16))  # exact in bf16, see the table


_DECODERS: dict[tuple[Encoding, Encoding | None], Callable[..., None]] = {
    (Encoding.BF16, None): _decode_bf16,
    (Encoding.E4M3, None): _decode_e4m3,
    (Encoding.E4M3, Encoding.FP32): _decode_e4m3_fp32,
    (Encoding.E2M1, Encoding.UE5M3): _decode_e2m1_ue5m3,
}

# ------------------------------------------------------------------------------------------- rows


def encode_rows(
    rows: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor | None,
    fmt: RowFormat,
    k_scale: float,
) -> None:
    """Write rows, uint8 [tokens, row_bytes], of bf16 [tokens, R] and [tokens, P] or None."""
    rows[:, fmt.payload_bytes :] = 0
    encode_nope = _ENCODERS[fmt.nope.encoding, fmt.scale and fmt.scale.encoding]
    for piece in _pieces(rows):
        codes, scales = encode_nope(k_nope[piece], fmt.scale_block_values, k_scale)
        _bytes_of(rows[piece], fmt.nope).copy_(codes)
        if fmt.scale is not None:
            _bytes_of(rows[piece], fmt.scale).copy_(scales)
        if fmt.rope is not None and k_rope is not None:
            codes, _ = _ENCODERS[fmt.rope.encoding, None](k_rope[piece], 0, k_scale)
            _bytes_of(rows[piece], fmt.rope).copy_(codes)


def store_rows(
    pool: torch.Tensor,
    slots: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor | None,
    fmt: RowFormat,
    k_scale: float,
) -> None:
    """Encode and scatter; negative slots are skipped."""
    kept = slots >= 0
    if not bool(kept.all()):
        slots, k_nope = slots[kept], k_nope[kept]
        k_rope = None if k_rope is None else k_rope[kept]
    rows = torch.empty(len(k_nope), fmt.row_bytes, dtype=torch.uint8, device=pool.device)
    encode_rows(rows, k_nope, k_rope, fmt, k_scale)
    word = _widest_word(pool)
    pool.view(word).index_copy_(0, slots.long(), rows.view(word))


def gather_parts(
    pool: torch.Tensor,
    slots: torch.Tensor | None,
    fmt: RowFormat,
    nope_out: torch.Tensor,
    rope_out: torch.Tensor | None,
    k_scale: float,
) -> None:
    """Decode the rows of `slots`, zeros for negative ones; all rows in order without `slots`."""
    if len(nope_out) == 0:
        return
    if slots is not None and len(pool) == 0:  # only negative slots are left to ask for
        nope_out.zero_()
        if rope_out is not None:
            rope_out.zero_()
        return
    decode_nope = _DECODERS[fmt.nope.encoding, fmt.scale and fmt.scale.encoding]
    words = pool.view(_widest_word(pool))
    for piece in _pieces(nope_out):
        # Whole rows in one dense piece: what follows may then view bytes as any wider type.
        if slots is None:
            rows = pool[piece].contiguous()
        else:
            rows = words.index_select(0, slots[piece].clamp(min=0)).view(torch.uint8)
        scales = None if fmt.scale is None else _bytes_of(rows, fmt.scale)
        codes = _bytes_of(rows, fmt.nope)
        decode_nope(codes, scales, fmt.scale_block_values, k_scale, nope_out[piece])
        if fmt.rope is not None and rope_out is not None:
            codes = _bytes_of(rows, fmt.rope)
            _DECODERS[fmt.rope.encoding, None](codes, None, 0, k_scale, rope_out[piece])
    if slots is not None:
        absent = (slots < 0).nonzero().squeeze(-1)
        if len(absent):
            nope_out.index_fill_(0, absent, 0)
            if rope_out is not None:
                rope_out.index_fill_(0, absent, 0)


def _pieces(rows: torch.Tensor) -> Iterator[slice]:
    """Slices of rows that are handled together; a GPU has no use for small ones."""
    step = _PIECE_ROWS if rows.device.type == "cpu" else max(len(rows), 1)
    for first in range(0, len(rows), step):
        yield slice(first, first + step)


def _bytes_of(rows: torch.Tensor, segment: Segment) -> torch.Tensor:
    """uint8 [tokens, size_bytes] view of one segment of rows."""
    return rows[:, segment.offset_bytes : segment.end_bytes]


def _widest_word(rows: torch.Tensor) -> torch.dtype:
    """Widest integer that rows can be seen as: copies of words are several times faster."""
    for word in (torch.int64, torch.int32, torch.int16):
        size = word.itemsize
        if not any(n % size for n in (rows.shape[1], rows.stride(0), rows.storage_offset())):
            return word
    return torch.uint8
