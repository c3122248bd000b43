"""Checks of pools' k_scales, and a digest of them for storage keys: stored bytes depend on the scales."""

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
    """The k_scales by layer id as Python floats.

    Raises
    ------
    ValueError
        If a key is not a layer id, or a scale is not finite and positive in float32.
    """
    checked = {}
    for layer_id, k_scale in (k_scales or {}).items():
        if not isinstance(layer_id, int):
            raise Refusal(f"k_scales has a key {layer_id!r}; keys are model layer ids (int)")
        try:
            checked[layer_id] = float(k_scale)
            stored = torch.tensor(checked[layer_id], dtype=torch.float32).item()
        except (TypeError, ValueError, RuntimeError) as error:
            raise Refusal(f"k_scale={k_scale!r} of layer {layer_id} is not a number") from error
        if not 0.0 < stored < float("inf"):
            raise Refusal(
                f"k_scale={k_scale} of layer {layer_id} is not finite and positive in float32; "
                "the checkpoint's KV scales are damaged, or choose a layout without k_scale"
            )
    return checked


def k_scales_digest(pools: Sequence[_ScaledPool]) -> str:
    """Digest of the k_scales of some pools, for storage keys and handshakes.

    Parameters
    ----------
    pools : sequence of LayoutMLATokenToKVPool
        The target's pool, then those of drafts.

    Returns
    -------
    str
        8 hexadecimal digits that depend on every layer's k_scale; empty if all are 1.
    """
    scales = [[pool.k_scale(pool.start_layer + i) for i in range(pool.layer_num)] for pool in pools]
    if all(scale == 1.0 for layers in scales for scale in layers):
        return ""
    return hashlib.blake2b(repr(scales).encode(), digest_size=4).hexdigest()
