"""The k_scales of pools: what they may be, and as a part of names: rows divided by others are other rows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from sgl_kvpool.refusal import Refusal

__all__ = ["checked_k_scales", "k_scales_digest"]


class _ScaledPool(Protocol):
    """A pool whose layers have k_scales."""

    start_layer: int
    layer_num: int

    def k_scale(self, layer_id: int) -> float: ...


def checked_k_scales(k_scales: Mapping[int, float] | None) -> dict[int, float]:
    """k_scales by layer, as Python's numbers.

    Raises
    ------
    ValueError
        A key that is no layer id, or a scale that is not finite and positive as kernels see it.
    """
    checked = {}
    for layer_id, k_scale in (k_scales or {}).items():
        if not isinstance(layer_id, int):
            raise Refusal(f"k_scales has a key {layer_id!r}; keys are model layer ids (int)")
        try:
            checked[layer_id] = float(k_scale)
            stored = torch.tensor(checked[layer_id], dtype=torch.float32).item()
        except (TypeError, ValueError, RuntimeError) as error:
            raise Refusal(f"k_scale={k_scale!r} of layer {layer_id} is no number") from error
        if not 0.0 < stored < float("inf"):
            raise Refusal(
                f"k_scale={k_scale} of layer {layer_id} is not finite and positive in float32; "
                "the checkpoint's KV scales are damaged, or choose a layout that uses none"
            )
    return checked


def k_scales_digest(pools: Sequence[_ScaledPool]) -> str:
    """Name of what the rows of some pools were divided by, for storage keys and handshakes.

    Parameters
    ----------
    pools : sequence of LayoutMLATokenToKVPool
        The target's, then those of drafts.

    Returns
    -------
    str
        8 hexadecimal digits that depend on every layer's scale; empty if all are 1.
    """
    scales = [[pool.k_scale(pool.start_layer + i) for i in range(pool.layer_num)] for pool in pools]
    if all(scale == 1.0 for layers in scales for scale in layers):
        return ""
    return hashlib.blake2b(repr(scales).encode(), digest_size=4).hexdigest()
