"""Byte views of pages that hold the parts of a group one after the other. Torch is the only dependency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sgl_kvpool.layout import RowFormat
from sgl_kvpool.memory.canonical import CanonicalGroup, CanonicalKVCaches
from sgl_kvpool.memory.runs import PageRuns

__all__ = ["host_view", "packed_view"]


def packed_view(pages: torch.Tensor, group: CanonicalGroup, offset_bytes: int = 0) -> CanonicalKVCaches:
    """View of pages that hold the parts of a group one after the other, in the group's order.

    Parameters
    ----------
    pages : Tensor [pages, page_bytes], uint8
    group : CanonicalGroup
        Parts may have different sizes.
    offset_bytes : int
        Offset of the first part in a page.

    Returns
    -------
    CanonicalKVCaches
        View with one group of the same name.
    """
    references = []
    for layer in group.layers:
        runs = PageRuns(tensor_index=0, offset_bytes=offset_bytes, run_bytes=layer.runs.size_bytes)
        references.append(replace(layer, runs=runs))
        offset_bytes += layer.runs.size_bytes
    ours = replace(group, layers=tuple(references), num_pages=len(pages))
    return CanonicalKVCaches((pages.view(torch.int8),), (ours,))


def host_view(
    pages: torch.Tensor,
    group: CanonicalGroup,
    layers: Sequence[int],
    page_size: int,
    rows: RowFormat,
    content: str | None = None,
) -> CanonicalKVCaches:
    """View of page-major host pages that corresponds to a group of device pages.

    Parameters
    ----------
    pages : Tensor [pages, bytes], uint8
        Host pages; longer than their rows if other data follows.
    group : CanonicalGroup
        Group of the device; the view has the same layers.
    layers : sequence of int
        Position of each layer among the layers of a host page.
    page_size : int
        Tokens of a page.
    rows : RowFormat
        Row format on the host.
    content : str, optional
        Meaning of the host's bytes, if it differs from the device's.

    Returns
    -------
    CanonicalKVCaches
        View with one group of the same name.
    """
    layer_bytes = page_size * rows.row_bytes
    references = tuple(
        replace(
            layer,
            runs=PageRuns(tensor_index=0, offset_bytes=place * layer_bytes, run_bytes=layer_bytes),
            content=layer.content if content is None else content,
        )
        for layer, place in zip(group.layers, layers, strict=True)
    )
    ours = replace(group, layers=references, num_pages=len(pages))
    return CanonicalKVCaches((pages.view(torch.int8),), (ours,))
