"""Access to the bytes of a pool's pages without the pool's methods, and rows to write into the pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sgl_kvpool.codec import reference
from sgl_kvpool.layout import RowFormat

if TYPE_CHECKING:
    from sgl_kvpool.srt.pool.mla import LayoutMLATokenToKVPool

__all__ = ["PageBytes", "decoded", "encoded", "random_values"]


class PageBytes:
    """Some pages of a pool in all layers, in SGLang's tensors or in the buffer that all layers share.

    `describe` is not used, since it needs classes of SGLang that a pool without a host tier does not need.

    Parameters
    ----------
    pool : LayoutMLATokenToKVPool
    pages : sequence of int
    """

    def __init__(self, pool: LayoutMLATokenToKVPool, pages: Sequence[int]):
        rows, page_size = pool.size // pool.page_size * pool.page_size + pool.page_size, pool.page_size
        if pool.cross_layer is None:
            tensors = [buffer.view(torch.uint8)[:rows].squeeze(1) for buffer in pool.kv_buffer]
            self._views = [tensor.unflatten(0, (-1, page_size)) for tensor in tensors]
        else:
            group = pool.cross_layer.group
            (layers,) = group.layers
            self._views = [group.layer_view(layer.name).view(torch.uint8) for layer in layers if layer]
        self.pages = list(pages)
        self._index = torch.tensor(self.pages, device=pool.device)
        self._shape = (len(self.pages), pool.page_size, pool.row_format.row_bytes)

    def read(self) -> torch.Tensor:
        """`[layers, pages, page_size, row_bytes]` uint8, a copy on the CPU."""
        layers = [view[self._index].cpu().view(self._shape) for view in self._views]
        return torch.stack(layers) if layers else torch.empty((0, *self._shape), dtype=torch.uint8)

    def write(self, rows: torch.Tensor) -> None:
        """Write rows of the shape that `read` returns into the pages."""
        for view, layer in zip(self._views, rows, strict=True):
            view[self._index] = layer.reshape(len(self.pages), *view.shape[1:]).to(view.device)


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
