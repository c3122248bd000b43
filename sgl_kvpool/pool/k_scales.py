"""The k_scales of pools, as a part of names: rows that were divided by other scales are other rows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sgl_kvpool.pool.mla import LayoutMLATokenToKVPool

__all__ = ["k_scales_digest"]


def k_scales_digest(pools: Sequence[LayoutMLATokenToKVPool]) -> str:
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
