"""Conversion of rows whose format on the host differs from the device's.

The converted row is `encode_rows(decode_rows(row))`, through bf16, except that a latent that both formats
store alike keeps its bytes: encoding it again might choose another candidate scale for a block. `convert`
does this with the codec, for engine `torch`; the other engines do it with `codec/csrc/row_conversion.h`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sgl_kvpool.codec import decode_rows, encode_rows
from sgl_kvpool.codec.compiled import row_layout
from sgl_kvpool.layout import Encoding, MLAKVCacheLayout, RowFormat
from sgl_kvpool.refusal import Refusal, use_values
from sgl_kvpool.transfer.host_options import HOST_LAYOUTS, SAME

#: Conversions load and store this many bytes at once, so rows have to begin at multiples of it. Rows of a
#: dense pool are padded to it. Rows of a DSA pool are not; those of 264 bytes, for instance, cannot be
#: converted.
CONVERTED_ALIGNMENT_BYTES = 16


def narrower_layouts(device: RowFormat) -> tuple[MLAKVCacheLayout, ...]:
    """Narrower layouts to which rows of the device can be converted for the host, the widest first."""
    found = [
        layout
        for layout in map(MLAKVCacheLayout, HOST_LAYOUTS[1:])
        if _bytes(layout, device) < device.row_bytes and not _odd_sizes(layout, device)
    ]
    return tuple(sorted(found, key=lambda layout: -_bytes(layout, device)))


def check_host_layout(device: RowFormat, host: MLAKVCacheLayout) -> None:
    """Refuse a --kv-host-layout in which rows of the device cannot be stored."""
    able = narrower_layouts(device)
    if host is device.layout or host in able:
        return
    if _bytes(host, device) < device.row_bytes and _odd_sizes(host, device):
        reason = f"conversions need rows whose size is a multiple of {CONVERTED_ALIGNMENT_BYTES} bytes"
    else:
        tokens = "as many" if _bytes(host, device) == device.row_bytes else "fewer"
        reason = f"the host tier would hold {tokens} tokens, at no higher accuracy"
    raise Refusal(
        f"--kv-host-layout {host} does not work: its rows have {_bytes(host, device)} bytes, those of "
        f"layout {device.layout} on the device {device.row_bytes}: {reason}",
        *use_values("--kv-host-layout", (SAME, *map(str, able))),
    )


def _odd_sizes(host: MLAKVCacheLayout, device: RowFormat) -> bool:
    """Whether the row size of either side rules out a conversion."""
    return any(n % CONVERTED_ALIGNMENT_BYTES for n in (_bytes(host, device), device.row_bytes))


def _bytes(layout: MLAKVCacheLayout, like: RowFormat) -> int:
    return like.in_layout(layout).row_bytes


@dataclass(frozen=True, kw_only=True)
class RowConversion:
    """Conversion of rows of `source` into rows of `target`, which have the same geometry.

    `k_scales` has the k_scale of each layer of the group, for formats that use one.
    """

    source: RowFormat
    target: RowFormat
    k_scales: tuple[float, ...]

    def reversed(self) -> RowConversion:
        return replace(self, source=self.target, target=self.source)

    def convert(self, rows: torch.Tensor, layer: int) -> torch.Tensor:
        """Convert rows of the layer with this index in the group, on their device.

        From `[tokens, source.row_bytes]` to `[tokens, target.row_bytes]`, uint8.
        """
        k_scale, rank = self.k_scales[layer], self.source.kv_lora_rank
        values = decode_rows(rows, self.source, k_scale=k_scale)
        nope, rope = values[:, :rank], values[:, rank:]
        # Replace NaN and infinities as encoders do, but before the encoder's check (KVPOOL_CHECK_FINITE):
        # rows were checked when they were first stored, and unused slots may hold anything.
        if self.target.nope.encoding is not Encoding.BF16:
            nope = _finite(nope)
        if self.target.rope is not None and self.target.rope.encoding is not Encoding.BF16:
            rope = _finite(rope)
        converted = encode_rows(nope, rope, self.target, k_scale=k_scale)
        if self.source.layout.latent is self.target.layout.latent:
            for mine, theirs in zip(_latent(self.source), _latent(self.target), strict=True):
                converted[:, theirs] = rows[:, mine]
        return converted

    def row_layouts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both formats as `RowLayout` of codec/csrc/row_conversion.h."""
        return row_layout(self.source), row_layout(self.target)


def _finite(values: torch.Tensor) -> torch.Tensor:
    largest = torch.finfo(values.dtype).max
    return values.nan_to_num(nan=0.0, posinf=largest, neginf=-largest)


def _latent(fmt: RowFormat) -> list[slice]:
    """Bytes of the latent values, and of their scales."""
    segments = (fmt.nope, fmt.scale)
    return [slice(part.offset_bytes, part.end_bytes) for part in segments if part is not None]
