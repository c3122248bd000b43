"""Bytes of a pool's pages without the pool's methods, rows to write there, and the error for other bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from sgl_kvpool.codec import reference
from sgl_kvpool.layout import RowFormat
from sgl_kvpool.memory.arrangement import global_slots

if TYPE_CHECKING:
    from sgl_kvpool.srt.pool.mla import LayoutMLATokenToKVPool
    from sgl_kvpool.srt.pool.row_pool import RowPool


class PageBytes:
    """Some pages of a pool in all layers, in SGLang's tensors or in the buffer that all layers share.

    `describe` is not used, since it needs classes of SGLang that a pool without a host tier does not need.
    """

    def __init__(self, pool: LayoutMLATokenToKVPool, pages: Sequence[int]):
        rows, page_size = pool.size // pool.page_size * pool.page_size + pool.page_size, pool.page_size
        if pool.placement is None or pool.cross_layer is None:
            tensors = [buffer.view(torch.uint8)[:rows].squeeze(1) for buffer in pool.kv_buffer]
            self._views = [tensor.unflatten(0, (-1, page_size)) for tensor in tensors]
        else:
            layers = pool.placement.arrangement.axes.index("L")
            self._views = list(pool.placement.by_axes(pool.cross_layer.view(torch.uint8)).unbind(layers))
        self.pages = list(pages)
        self._index = torch.tensor(self.pages, device=pool.device)
        self._shape = (len(self.pages), pool.page_size, pool.row_format.row_bytes)

    @classmethod
    def of_index_keys(cls, pool: LayoutMLATokenToKVPool, pages: Sequence[int]) -> PageBytes:
        """Some pages of index keys, `[layers with keys, pages, 1, bytes]`."""
        self = cls(pool, pages)
        self._views = pool.index_pages
        self._shape = (len(self.pages), 1, self._views[0].shape[1] if self._views else 0)
        return self

    def read(self) -> torch.Tensor:
        """`[layers, pages, page_size, row_bytes]` uint8, a copy on the CPU."""
        layers = [view[self._index].cpu().view(self._shape) for view in self._views]
        return torch.stack(layers) if layers else torch.empty((0, *self._shape), dtype=torch.uint8)

    def write(self, rows: torch.Tensor) -> None:
        """Write rows of the shape that `read` returns into the pages."""
        for view, layer in zip(self._views, rows, strict=True):
            view[self._index] = layer.reshape(len(self.pages), *view.shape[1:]).to(view.device)


def slots_of_rank(pool: RowPool, slots: torch.Tensor) -> torch.Tensor:
    """SGLang's numbers of slots of this rank's pool: others if ranks share a prefix pool (`--dcp-size`)."""
    return global_slots(slots, pool.dcp_rank, pool.dcp_size)


def random_values(tokens: int, fmt: RowFormat, seed: int) -> torch.Tensor:
    """`[tokens, R + P]` bf16 on the CPU: normal values, times powers of two from 1/8 to 4 by token."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tokens, fmt.head_dim, generator=generator)
    return (values * torch.exp2(torch.arange(tokens) % 6 - 3.0)[:, None]).bfloat16()


def encoded(values: torch.Tensor, fmt: RowFormat, k_scale: float) -> torch.Tensor:
    """Rows of bf16 values `[tokens, R + P]` by the codec in torch, `[tokens, row_bytes]` uint8 on the CPU."""
    rank = fmt.kv_lora_rank
    rows = torch.empty(len(values), fmt.row_bytes, dtype=torch.uint8)
    rope = values[:, rank:] if fmt.qk_rope_head_dim else None
    reference.encode_rows(rows, values[:, :rank], rope, fmt, k_scale)
    return rows


def decoded(rows: torch.Tensor, fmt: RowFormat, k_scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Values of rows on the CPU by the codec in torch, `[tokens, R + P]`."""
    rank = fmt.kv_lora_rank
    values = torch.empty(len(rows), fmt.head_dim, dtype=dtype)
    rope = values[:, rank:] if fmt.qk_rope_head_dim else None
    reference.gather_parts(rows, None, fmt, values[:, :rank], rope, k_scale)
    return values


class Difference(Exception):
    """A check failed; the text names what was checked and, if bytes or values are wrong, the place of one."""


def require_same_bytes(
    found: torch.Tensor, expected: torch.Tensor, feature: str, place: Callable[..., str]
) -> None:
    """Raise a Difference that names the first byte that differs.

    `found` and `expected` are rows `[..., bytes]` uint8 on the CPU; another shape is a difference too.
    `place` names a row by its index, one number per axis but the last.
    """
    if found.shape != expected.shape:
        raise Difference(f"{feature}: {tuple(found.shape)} bytes were read, expected {tuple(expected.shape)}")
    wrong = (found != expected).nonzero()
    if len(wrong):
        *row, byte = wrong[0].tolist()
        found_byte, expected_byte = int(found[(*row, byte)]), int(expected[(*row, byte)])
        raise Difference(
            f"{feature}: byte {byte} of {place(*row)} is 0x{found_byte:02x}, expected 0x{expected_byte:02x} "
            f"({len(wrong)} bytes differ)"
        )
