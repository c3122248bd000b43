"""Byte view of host pages. Needs torch alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sgl_kvpool.canonical import CanonicalGroup, CanonicalKVCaches
from sgl_kvpool.page_runs import PageRuns

__all__ = ["host_view"]


def host_view(
    pages: torch.Tensor, group: CanonicalGroup, layers: Sequence[int], page_size: int, row_bytes: int
) -> CanonicalKVCaches:
    """View of page-major host pages as the counterpart of a group of device pages.

    Parameters
    ----------
    pages : Tensor [pages, page_bytes], uint8
    group : CanonicalGroup
        Of the device; its layers are those of the view.
    layers : sequence of int
        Place of each of them among the layers of a host page.
    page_size : int
        Tokens.
    row_bytes : int

    Returns
    -------
    CanonicalKVCaches
        With one group of the same name.
    """
    layer_bytes = page_size * row_bytes
    references = tuple(
        replace(layer, runs=PageRuns(tensor_index=0, offset_bytes=place * layer_bytes, run_bytes=layer_bytes))
        for layer, place in zip(group.layers, layers, strict=True)
    )
    ours = replace(group, layers=references, num_pages=len(pages))
    return CanonicalKVCaches((pages.view(torch.int8),), (ours,))
