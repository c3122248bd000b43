"""Torch codec: the reference of the Triton kernels and of the C++, and the decoder on a CPU.

``sgl_kvpool.codec`` has checked the arguments; this module does not validate. On a CPU, rows are processed in
chunks of `_CHUNK_ROWS`, whose intermediate tensors stay in a core's cache: otherwise each elementwise pass
between input and output would go through memory.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from sgl_kvpool.codec import scalars
from sgl_kvpool.layout import Encoding, RowFormat, Segment

#: Rows per chunk on a CPU: 1 MB of fp32 for a latent of 512.
_CHUNK_ROWS = 512


class _Scratch:
    """Buffers that the chunks of one call share: allocation costs more time than the arithmetic."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor that reuses the memory of earlier tensors with this name."""
        count = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < count:
            buffer = self._buffers[name] = torch.empty(count, dtype=dtype, device=self._device)
        return buffer[:count].view(shape)


# An encoder takes bf16 [tokens, count], the values per stored scale (0 without scales) and k_scale (1.0 for
# layouts without); it returns the bytes of the values and of the scales (None without scales), uint8 [tokens,
# size_bytes].

_Encoded = tuple[torch.Tensor, torch.Tensor | None]


def _encode_bf16(values: torch.Tensor, block: int, k_scale: float) -> _Encoded:
    return values.contiguous().view(torch.uint8), None  # bits are copied, including NaN payloads


def _encode_e4m3(values: torch.Tensor, block: int, k_scale: float) -> _Encoded:
    scaled = scalars.divide_(scalars.finite_fp32(values), k_scale)
    return scalars.round_to_e4m3_(scaled).view(torch.uint8), None


def _encode_e4m3_fp32(values: torch.Tensor, block: int, k_scale: float) -> _Encoded:
    tiles = scalars.finite_fp32(values).unflatten(-1, (-1, block))  # [tokens, tiles, block]
    largest = tiles.abs().amax(-1, keepdim=True)  # [tokens, tiles, 1]
    scale = scalars.divide_(largest, scalars.E4M3_MAX).clamp_(min=scalars.FP32_TINY)
    codes = scalars.round_to_e4m3_(tiles.div_(scale)).view(torch.uint8).flatten(-2)
    return codes, scale.flatten(-2).view(torch.uint8)


def _encode_e2m1_ue5m3(values: torch.Tensor, block: int, k_scale: float) -> _Encoded:
    signed = scalars.finite_fp32(values).unflatten(-1, (-1, block))  # [tokens, blocks, block]
    sizes = signed.abs()
    largest = sizes.amax(-1, keepdim=True)  # [tokens, blocks, 1]
    candidates = scalars.ue5m3_candidates(largest)
    scale_byte, rounded, error = _try_scale(sizes, candidates[0])
    for candidate in candidates[1:]:
        tried = _try_scale(sizes, candidate)
        better = tried[2] < error  # strict: at a tie the earlier candidate stays
        scale_byte = torch.where(better, tried[0], scale_byte)
        rounded = torch.where(better, tried[1], rounded)
        error = torch.minimum(tried[2], error)
    scale_byte = torch.where(largest > 0, scale_byte, 0).flatten(-2)
    codes = scalars.e2m1_codes(rounded, signed).flatten(-2)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)  # even element in the low nibble
    return packed, scale_byte.to(torch.uint8)


def _try_scale(
    sizes: torch.Tensor, scale_byte: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale byte [tokens, blocks, 1], e2m1 magnitudes shaped as `sizes`, error [tokens, blocks, 1]."""
    scale = scalars.ue5m3_values(scale_byte)
    rounded = scalars.round_to_e2m1(sizes / scale)
    # rounded * scale is exact; the difference, the square and the sums round once each.
    difference = sizes - rounded * scale
    return scale_byte, rounded, scalars.pairwise_sum(difference.mul_(difference)).unsqueeze(-1)


_ENCODERS: dict[tuple[Encoding, Encoding | None], Callable[..., _Encoded]] = {
    (Encoding.BF16, None): _encode_bf16,
    (Encoding.E4M3, None): _encode_e4m3,
    (Encoding.E4M3, Encoding.FP32): _encode_e4m3_fp32,
    (Encoding.E2M1, Encoding.UE5M3): _encode_e2m1_ue5m3,
}

# A decoder takes the bytes of the values and of the scales (None without scales), uint8 [tokens, size_bytes]
# views of dense rows, and k_scale; it writes `out`, [tokens, count] of any float dtype.


def _decode_bf16(
    codes: torch.Tensor, scales: torch.Tensor | None, k_scale: float, out: torch.Tensor, scratch: _Scratch
) -> None:
    out.copy_(codes.view(torch.bfloat16))


def _look_up(table: torch.Tensor, index: torch.Tensor, scratch: _Scratch) -> torch.Tensor:
    """Look up pairs of bf16 values, [tokens, 2 n], by int16 indices [tokens, n], read as unsigned."""
    wide = scratch("wide index", index.shape, torch.int32).copy_(index.view(torch.uint16))
    pairs = scratch("pairs", index.shape, torch.int32)
    torch.index_select(table, 0, wide.view(-1), out=pairs.view(-1))
    return pairs.view(torch.bfloat16)


def _decode_e4m3(
    codes: torch.Tensor, scales: torch.Tensor | None, k_scale: float, out: torch.Tensor, scratch: _Scratch
) -> None:
    # Two bytes at a time by table: torch's own cast from e4m3 is several times slower on a CPU.
    values = _look_up(scalars.e4m3_pairs_table(codes.device), codes.view(torch.int16), scratch)
    if scales is None and k_scale == 1.0:
        out.copy_(values)
        return
    # A product of a bf16 and an fp32 tensor takes a slow mixed path on a CPU, hence the copy.
    x = scratch("fp32", values.shape, torch.float32).copy_(values)
    if scales is None:
        x.mul_(k_scale)  # k_scale is an fp32 value already
    else:
        factors = scales.contiguous().view(torch.float32).unsqueeze(-1)  # [tokens, tiles, 1]
        x.unflatten(-1, (factors.shape[1], -1)).mul_(factors)
    out.copy_(x)


def _decode_e2m1_ue5m3(
    codes: torch.Tensor, scales: torch.Tensor | None, k_scale: float, out: torch.Tensor, scratch: _Scratch
) -> None:
    assert scales is not None
    # The 8 code bytes of a block share a scale byte: an int64 holds 8 copies of the scale byte.
    spread = scratch("spread", scales.shape, torch.int64).copy_(scales).mul_(0x0101010101010101)
    # Passes over int16 are the cheapest here; the index below wraps into the sign bit.
    high = scratch("high", codes.shape, torch.int16).copy_(spread.view(torch.uint8))
    index = scratch("index", codes.shape, torch.int16).copy_(codes).add_(high, alpha=256)
    out.copy_(_look_up(scalars.e2m1_pairs_table(codes.device), index, scratch))


_DECODERS: dict[tuple[Encoding, Encoding | None], Callable[..., None]] = {
    (Encoding.BF16, None): _decode_bf16,
    (Encoding.E4M3, None): _decode_e4m3,
    (Encoding.E4M3, Encoding.FP32): _decode_e4m3,
    (Encoding.E2M1, Encoding.UE5M3): _decode_e2m1_ue5m3,
}


def encode_rows(
    rows: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor | None, fmt: RowFormat, k_scale: float
) -> None:
    """Encode bf16 [tokens, R] and [tokens, P] (or None) into `rows`, uint8 [tokens, row_bytes]."""
    rows[:, fmt.payload_bytes :] = 0
    encode_nope = _ENCODERS[fmt.nope.encoding, _scale_encoding(fmt)]
    for chunk in _chunks(rows):
        codes, scales = encode_nope(k_nope[chunk], fmt.scale_block_values, k_scale)
        _bytes_of(rows[chunk], fmt.nope).copy_(codes)
        if fmt.scale is not None and scales is not None:
            _bytes_of(rows[chunk], fmt.scale).copy_(scales)
        if fmt.rope is not None and k_rope is not None:
            codes, _ = _ENCODERS[fmt.rope.encoding, None](k_rope[chunk], 0, k_scale)
            _bytes_of(rows[chunk], fmt.rope).copy_(codes)


def store_rows(
    row_buffer: torch.Tensor,
    slots: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor | None,
    fmt: RowFormat,
    k_scale: float,
    encode: Callable[..., None] = encode_rows,
) -> None:
    """Encode with `encode`, and scatter; negative slots are skipped."""
    kept = slots >= 0
    if not bool(kept.all()):
        slots, k_nope = slots[kept], k_nope[kept]
        k_rope = None if k_rope is None else k_rope[kept]
    rows = torch.empty(len(k_nope), fmt.row_bytes, dtype=torch.uint8, device=row_buffer.device)
    encode(rows, k_nope, k_rope, fmt, k_scale)
    word = _widest_word(row_buffer)
    row_buffer.view(word).index_copy_(0, slots.long(), rows.view(word))


def gather_parts(
    row_buffer: torch.Tensor,
    slots: torch.Tensor | None,
    fmt: RowFormat,
    nope_out: torch.Tensor,
    rope_out: torch.Tensor | None,
    k_scale: float,
) -> None:
    """Decode the rows of `slots` (zeros for negative slots), or all rows in order if `slots` is None."""
    if len(nope_out) == 0:
        return
    if slots is not None and len(row_buffer) == 0:  # all slots are negative
        nope_out.zero_()
        if rope_out is not None:
            rope_out.zero_()
        return
    decode_nope = _DECODERS[fmt.nope.encoding, _scale_encoding(fmt)]
    word = _widest_word(row_buffer)
    words = row_buffer.view(word)
    scratch = _Scratch(row_buffer.device)
    for chunk in _chunks(nope_out):
        # Dense copies of whole rows: their bytes can be viewed as any wider dtype below.
        tokens = len(nope_out[chunk])
        dense = scratch("rows", (tokens, words.shape[1]), word)
        if slots is None:
            dense.copy_(words[chunk])
        else:
            torch.index_select(words, 0, slots[chunk].clamp(min=0), out=dense)
        rows = dense.view(torch.uint8)
        scales = None if fmt.scale is None else _bytes_of(rows, fmt.scale)
        decode_nope(_bytes_of(rows, fmt.nope), scales, k_scale, nope_out[chunk], scratch)
        if fmt.rope is not None and rope_out is not None:
            codes = _bytes_of(rows, fmt.rope)
            _DECODERS[fmt.rope.encoding, None](codes, None, k_scale, rope_out[chunk], scratch)
    if slots is not None:
        absent = (slots < 0).nonzero().squeeze(-1)
        if len(absent):
            nope_out.index_fill_(0, absent, 0)
            if rope_out is not None:
                rope_out.index_fill_(0, absent, 0)


def _chunks(rows: torch.Tensor) -> Iterator[slice]:
    """Slices of rows that are processed together; on a GPU one slice of all rows."""
    step = _CHUNK_ROWS if rows.device.type == "cpu" else max(len(rows), 1)
    for first in range(0, len(rows), step):
        yield slice(first, first + step)


def _scale_encoding(fmt: RowFormat) -> Encoding | None:
    return None if fmt.scale is None else fmt.scale.encoding


def _bytes_of(rows: torch.Tensor, segment: Segment) -> torch.Tensor:
    """uint8 [tokens, size_bytes] view of one segment of rows."""
    return rows[:, segment.offset_bytes : segment.end_bytes]


def _widest_word(rows: torch.Tensor) -> torch.dtype:
    """Widest integer dtype as which rows can be viewed: copies of words are several times faster."""
    for word in (torch.int64, torch.int32, torch.int16):
        size = word.itemsize
        if not any(n % size for n in (rows.shape[1], rows.stride(0), rows.storage_offset())):
            return word
    return torch.uint8
