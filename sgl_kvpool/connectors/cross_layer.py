"""Pages of several layers in one buffer, so that a page of all layers is one run of bytes.

A `CrossLayerGroup` holds layers with the same page size that the same backend reads, one position
each::

    page_major     [pages,         positions, page_bytes]
    token_major    [pages, tokens, positions, page_bytes / tokens]
    head_major     [pages, heads,  positions, page_bytes / heads]

Layers come in sets with page indices of their own (full attention, sliding window), and a page belongs to
one set at a time. So sets lie on the same bytes: position i of the buffer is the i-th layer of every set. A
set with fewer layers than the longest leaves holes, which are listed and never read, written or counted.

`allocate_cross_layer` makes such groups. Bytes lie where a `RowPlacement` says, as in pools of a server.
Torch is the only dependency.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from sgl_kvpool.memory.arrangement import KVArrangement, RowPlacement
from sgl_kvpool.memory.canonical import LayerReference
from sgl_kvpool.refusal import whole_number


@dataclass(frozen=True, kw_only=True)
class LayerPages:
    """Description of a layer for an allocator.

    `name`: Model layer id, or a name.
    `page_bytes`: Bytes of the layer in a page.
    `backend`: Reader of the pages. Layers share a buffer only if this is the same object: two backends may
      read pages of equal size differently.
    `page_size_tokens`: Tokens of a page as the backend's kernels see it.
    `heads`: Number of KV heads, for `head_major`.
    `padded_page_bytes`: Distance to the next position; `page_bytes` unless given. Only `page_major` can pad.
    `content`: Meaning of the bytes of a page, for `LayerReference`.
    ValueError: if a size is not a positive integer, the padded page is smaller than the page, or no backend
      is given.
    """

    name: int | str
    page_bytes: int
    backend: Any
    page_size_tokens: int = 1
    heads: int = 1
    padded_page_bytes: int | None = None
    content: str = "bytes"

    def __post_init__(self) -> None:
        for field in ("page_bytes", "page_size_tokens", "heads", "padded_page_bytes"):
            value = getattr(self, field)
            if value is not None or field != "padded_page_bytes":
                value = whole_number(f"layer {self.name}: {field}", value)
                object.__setattr__(self, field, value)
        if self.span_bytes < self.page_bytes:
            raise ValueError(
                f"layer {self.name}: padded_page_bytes={self.padded_page_bytes} is less than the page's "
                f"{self.page_bytes} bytes"
            )
        if self.backend is None:
            raise ValueError(f"layer {self.name} names no backend; give the backend that reads its pages")

    @property
    def span_bytes(self) -> int:
        """Bytes of a page with its padding."""
        return self.page_bytes if self.padded_page_bytes is None else self.padded_page_bytes

    @property
    def key(self) -> tuple:
        """Key that is equal for layers that may share a buffer."""
        return (self.span_bytes, id(self.backend), self.page_size_tokens, self.heads)


@dataclass(frozen=True, kw_only=True)
class CrossLayerGroup:
    """Layers with the same pages and the same backend in one int8 tensor; see the module's docstring.

    Made by `allocate_cross_layer` alone, which checks its parts. `layers`: For each set the layer at each
    position; None is a hole.
    """

    arrangement: KVArrangement
    tensor: torch.Tensor
    layers: tuple[tuple[LayerPages | None, ...], ...]

    @property
    def first(self) -> LayerPages:
        """One layer of the group; the others have the same geometry."""
        return next(layer for members in self.layers for layer in members if layer is not None)

    @property
    def pages(self) -> int:
        return self.tensor.shape[0]

    @property
    def positions(self) -> int:
        """Layers side by side in a page, holes included."""
        return len(self.layers[0])

    @property
    def span_bytes(self) -> int:
        return self.first.span_bytes

    @property
    def chunks(self) -> int:
        """Chunks of a layer's page: its tokens, its heads, or 1."""
        return _chunks(self.arrangement, self.first)

    @cached_property
    def placement(self) -> RowPlacement:
        """Where the positions lie; a chunk of a layer is a row."""
        return placement_of(self.arrangement, self.first, self.pages, self.positions)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of all positions."""
        return self.placement.page_bytes

    @property
    def holes(self) -> tuple[tuple[int, int], ...]:
        """Positions without a layer, as (set, position)."""
        return tuple(
            (number, position)
            for number, members in enumerate(self.layers)
            for position, layer in enumerate(members)
            if layer is None
        )

    def _place(self, name: int | str) -> tuple[int, LayerPages]:
        for members in self.layers:
            for position, layer in enumerate(members):
                if layer is not None and layer.name == name:
                    return position, layer
        raise KeyError(f"layer {name!r} is not in this group")

    def layer_view(self, name: int | str) -> torch.Tensor:
        """Bytes of a layer, zero-copy.

        Returns Tensor, int8: `[pages, page_bytes]` if page-major, else `[pages, tokens or heads, bytes of
          each]`, strided. View it with the layer's dtype and split its last axis; never copy it.
        """
        position, layer = self._place(name)
        view = self.tensor.select(-2, position)
        return view[..., : layer.page_bytes] if self.chunks == 1 else view

    def references(self, number: int, tensor_index: int, part: str = "kv") -> tuple[LayerReference, ...]:
        """Where the layers of set `number` lie in a page of `canonical_tensor()`; holes are left out."""
        found = []
        for position, layer in enumerate(self.layers[number]):
            if layer is None:
                continue
            runs = self.placement.page_runs(position, tensor_index)
            if layer.page_bytes < self.span_bytes:  # a padded page is one run
                runs = replace(runs, run_bytes=layer.page_bytes)
            content = layer.content + (" by head" if "H" in self.arrangement.axes else "")
            found.append(LayerReference(layer_id=layer.name, part=part, runs=runs, content=content))
        return tuple(found)

    def canonical_tensor(self) -> torch.Tensor:
        """The buffer as `[pages, page_bytes]` int8, without a copy."""
        return self.tensor.view(self.pages, self.page_bytes)


def _chunks(arrangement: KVArrangement, layer: LayerPages) -> int:
    """Size of the axis between page and layer: tokens if token-major, heads if head-major, else 1."""
    between = arrangement.axes[1 : arrangement.axes.index("L")]
    return {"": 1, "N": layer.page_size_tokens, "H": layer.heads}[between]


def check_chunks(arrangement: KVArrangement, layer: LayerPages) -> None:
    """Raise ValueError, with the reason, for a page that an arrangement cannot split."""
    if arrangement.has_contiguous_layers:
        raise ValueError(f"{arrangement} keeps layers apart and has no page of all layers")
    chunks = _chunks(arrangement, layer)
    if chunks > 1 and layer.span_bytes != layer.page_bytes:
        # Padding would lie between the chunks, where a kernel's stride cannot skip it.
        raise ValueError(f"layer {layer.name}: a {arrangement} page cannot be padded; use page_major")
    if layer.span_bytes % chunks:
        raise ValueError(
            f"layer {layer.name}: a page of {layer.span_bytes} bytes cannot be split into {chunks} chunks of "
            f"the same size for {arrangement}; use page_major"
        )


def placement_of(arrangement: KVArrangement, layer: LayerPages, pages: int, positions: int) -> RowPlacement:
    """Placement of layers with the geometry of `layer`; head_major has heads in the place of tokens."""
    if arrangement is KVArrangement.PAGE_MAJOR:
        return RowPlacement(arrangement, positions, pages, 1, layer.span_bytes)
    chunks = _chunks(arrangement, layer)
    return RowPlacement(KVArrangement.TOKEN_MAJOR, positions, pages, chunks, layer.span_bytes // chunks)


def shape_of(arrangement: KVArrangement, layer: LayerPages, pages: int, positions: int) -> tuple[int, ...]:
    """Shape of the tensor of a group whose layers have the geometry of `layer`."""
    placement = placement_of(arrangement, layer, pages, positions)
    axes = "BLC" if arrangement is KVArrangement.PAGE_MAJOR else placement.arrangement.axes
    return tuple(placement.sizes[axis] for axis in axes)
