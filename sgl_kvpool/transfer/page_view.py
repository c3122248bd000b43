"""Byte view of pages that hold the parts of a group one after the other. Needs torch alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sgl_kvpool.layout import RowFormat
from sgl_kvpool.memory.canonical import CanonicalGroup, CanonicalKVCaches
from sgl_kvpool.memory.runs import PageRuns

__all__ = ["host_view", "packed_view"]


def packed_view(pages: torch.Tensor, group: CanonicalGroup, offset_bytes: int = 0) -> CanonicalKVCaches:
    """View of pages as the counterpart of a group, its parts one after the other in their order.

    Parameters
    ----------
    pages : Tensor [pages, page_bytes], uint8
    group : CanonicalGroup
        Parts may have different sizes.
    offset_bytes : int
        Place of the first in a page.

    Returns
    -------
    CanonicalKVCaches
        With one group of the same name.
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
    """View of page-major host pages as the counterpart of a group of device pages.

    Parameters
    ----------
    pages : Tensor [pages, bytes], uint8
        Longer than the rows, where something follows them.
    group : CanonicalGroup
        Of the device; its layers are those of the view.
    layers : sequence of int
        Place of each of them among the layers of a host page.
    page_size : int
        Tokens.
    rows : RowFormat
        On the host.
    content : str, optional
        What its bytes mean, if that is not what the device's do.

    Returns
    -------
    CanonicalKVCaches
        With one group of the same name.
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
