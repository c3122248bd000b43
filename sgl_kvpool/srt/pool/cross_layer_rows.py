"""One buffer for the rows of all layers, token-major or page-major. Torch is the only dependency."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_kvpool.layout import RowFormat
from sgl_kvpool.memory.allocation import allocate_cross_layer
from sgl_kvpool.memory.arrangement import KVArrangement, RowPlacement
from sgl_kvpool.memory.cross_layer import LayerPages

__all__ = ["CrossLayerRows"]


class CrossLayerRows:
    """One zeroed buffer for the rows of several layers.

    Parameters
    ----------
    arrangement : KVArrangement
        `token_major` or `page_major`.
    layer_ids : sequence of int
        Model layer ids in the buffer's order.
    pages, page_size_tokens : int
    fmt : RowFormat
    device : torch.device

    Attributes
    ----------
    group : CrossLayerGroup
        The buffer and the bytes of each layer in it.
    placement : RowPlacement
        Row numbers and strides.
    """

    def __init__(
        self,
        arrangement: KVArrangement,
        layer_ids: Sequence[int],
        pages: int,
        page_size_tokens: int,
        fmt: RowFormat,
        device: torch.device | str,
    ) -> None:
        layers = [
            LayerPages(
                name=layer_id,
                page_bytes=page_size_tokens * fmt.row_bytes,
                backend=fmt,
                page_size_tokens=page_size_tokens,
                content=fmt.tag,
            )
            for layer_id in layer_ids
        ]
        (self.group,) = allocate_cross_layer([layers], pages=pages, arrangement=arrangement, device=device)
        self.placement = RowPlacement(arrangement, len(layers), pages, page_size_tokens, fmt.row_bytes)
        # One buffer has two descriptions, bytes for transfers and rows for kernels, which have to agree.
        last = len(layers) - 1
        if self.layer(last).data_ptr() != self.group.layer_view(layer_ids[last]).data_ptr():
            raise RuntimeError(f"rows and pages of {arrangement} begin at different addresses")
        # `move` indexes this view, which has separate axes for pages and tokens.
        shape = [self.placement.sizes[axis] for axis in arrangement.axes]  # B N L C or B L N C
        self._axes = self.group.tensor.view(shape)

    def layer(self, index: int) -> torch.Tensor:
        """Rows of the layer at a position, `[rows, row_bytes]` uint8, without a copy."""
        return self.placement.layer_view(self.group.tensor.view(-1).view(torch.uint8), index)

    def move(self, target_slots: torch.Tensor, source_slots: torch.Tensor) -> None:
        """Copy the rows of some slots to other slots in all layers at once.

        Sources are read before targets are written, so the lists may share slots.
        """
        target, source = self._place(target_slots), self._place(source_slots)
        self._axes[target] = self._axes[source]

    def _place(self, slots: torch.Tensor) -> tuple:
        slots = slots.reshape(-1).long()
        page_size = self.placement.page_size_tokens
        page, token = slots.div(page_size, rounding_mode="floor"), slots.remainder(page_size)
        if self.placement.arrangement.is_slot_linear:
            return (page, token)
        return (page, slice(None), token)

    def buffer_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Address, size and page size in bytes as transfer engines register them: lists of one buffer."""
        tensor = self.group.tensor
        return [tensor.data_ptr()], [tensor.nbytes], [self.group.page_bytes]
