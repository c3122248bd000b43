"""Rows that have another format on the host than on the device, and what compiled code is told of it.

A row in the other format is what the codec makes of it: `encode_rows(decode_rows(row))`, through bf16. A
latent that both formats store alike keeps its bytes instead: encoded again, a block might get another of its
scales. `convert` is the codec's way, `codec/csrc/row_conversion.h` the engines'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sgl_kvpool.codec import decode_rows, encode_rows
from sgl_kvpool.codec.compiled import latent_id, row_layout
from sgl_kvpool.layout import Encoding, MLAKVCacheLayout, RowFormat
from sgl_kvpool.refusal import use
from sgl_kvpool.transfer.host_options import HOST_LAYOUTS

__all__ = ["CONVERTED_ALIGNMENT_BYTES", "RowConversion", "host_layout_problem", "narrower_layouts"]

#: Bytes that conversions load and store at once, so rows have to begin at multiples of it. Those of a dense
#: pool are padded to it; of those of DSA pools, 264 bytes are no such multiple.
CONVERTED_ALIGNMENT_BYTES = 16


def narrower_layouts(device: RowFormat) -> tuple[MLAKVCacheLayout, ...]:
    """Layouts that rows of the device can be stored in on the host, of fewer bytes, the widest first."""
    found = [
        layout
        for layout in map(MLAKVCacheLayout, HOST_LAYOUTS[1:])
        if _bytes(layout, device) < device.row_bytes and not _odd_sizes(layout, device)
    ]
    return tuple(sorted(found, key=lambda layout: -_bytes(layout, device)))


def host_layout_problem(device: RowFormat, host: MLAKVCacheLayout) -> str | None:
    """Why rows of the device cannot be stored in a layout on the host; None if they can.

    Parameters
    ----------
    device : RowFormat
        Of the device pool.
    host : MLAKVCacheLayout
        Of the host tier; the device's own is "same" and no conversion.
    """
    able = narrower_layouts(device)
    if host is device.layout or host in able:
        return None
    if _bytes(host, device) < device.row_bytes and _odd_sizes(host, device):
        reason = f"conversions need rows of a multiple of {CONVERTED_ALIGNMENT_BYTES} bytes"
    else:
        tokens = "as many" if _bytes(host, device) == device.row_bytes else "fewer"
        reason = f"the host tier would hold {tokens} tokens, and none better"
    return (
        f"its rows have {_bytes(host, device)} bytes, those of layout {device.layout} on the device "
        f"{device.row_bytes}: {reason}; {use(['same', *map(str, able)])}"
    )


def _odd_sizes(host: MLAKVCacheLayout, device: RowFormat) -> bool:
    """Whether rows of the device, or those of a layout on the host, cannot be converted."""
    return any(n % CONVERTED_ALIGNMENT_BYTES for n in (_bytes(host, device), device.row_bytes))


def _bytes(layout: MLAKVCacheLayout, like: RowFormat) -> int:
    return like.in_layout(layout).row_bytes


@dataclass(frozen=True, kw_only=True)
class RowConversion:
    """Rows of `source` are to become rows of `target`.

    Attributes
    ----------
    source, target : RowFormat
        Of one geometry.
    k_scales : tuple of float
        By the layers of the group; for formats that use them.
    """

    source: RowFormat
    target: RowFormat
    k_scales: tuple[float, ...]

    def reversed(self) -> RowConversion:
        """The way back."""
        return replace(self, source=self.target, target=self.source)

    def convert(self, rows: torch.Tensor, layer: int) -> torch.Tensor:
        """Rows of a layer with torch, on their device.

        Parameters
        ----------
        rows : Tensor [tokens, source.row_bytes], uint8
        layer : int
            Its place in the group.

        Returns
        -------
        Tensor [tokens, target.row_bytes], uint8
        """
        k_scale, rank = self.k_scales[layer], self.source.kv_lora_rank
        values = decode_rows(rows, self.source, k_scale=k_scale)
        nope, rope = values[:, :rank], values[:, rank:]
        # What encoders make of NaN and infinities, before they look for them (KVPOOL_CHECK_FINITE): rows
        # were looked at when they were first stored, and slots that nobody filled may hold anything.
        if self.target.nope.encoding is not Encoding.BF16:
            nope = _finite(nope)
        if self.target.rope is not None and self.target.rope.encoding is not Encoding.BF16:
            rope = _finite(rope)
        converted = encode_rows(nope, rope, self.target, k_scale=k_scale)
        if latent_id(self.source) == latent_id(self.target) and (
            self.source.nope.uses_k_scale == self.target.nope.uses_k_scale
        ):
            for mine, theirs in zip(_latent(self.source), _latent(self.target), strict=True):
                converted[:, theirs] = rows[:, mine]
        return converted

    def numbers(self) -> tuple[list[int], list[int]]:
        """Both formats as `RowLayout` of codec/csrc/row_conversion.h."""
        return row_layout(self.source), row_layout(self.target)


def _finite(values: torch.Tensor) -> torch.Tensor:
    largest = torch.finfo(values.dtype).max
    return values.nan_to_num(nan=0.0, posinf=largest, neginf=-largest)


def _latent(fmt: RowFormat) -> list[slice]:
    """Bytes of the latent values, and of their scales."""
    segments = (fmt.nope, fmt.scale)
    return [slice(part.offset_bytes, part.end_bytes) for part in segments if part is not None]
