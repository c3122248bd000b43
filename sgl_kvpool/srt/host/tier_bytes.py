"""Bytes of rows, index keys and states in a host tier, which decide how its memory is divided.

Functions that take pools import SGLang, because `sgl-kvpool plan` uses the rest without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TierBytes:
    """Bytes in the host tier for everything that the device pools hold, by kind."""

    #: Pages: rows in the host's layout and index keys, including packed drafts, padding and checksums.
    rows: int
    states: int
    #: Drafts with a tier of their own, also under the rows' page indices; not part of --hicache-size.
    own_drafts: int = 0
    #: Tokens of the host tier per token of the pool at a ratio of 1: more than 1 if the host's rows are
    #: narrower, because --hicache-ratio counts bytes of rows.
    host_tokens_per_token: float = 1.0

    @classmethod
    def of(
        cls,
        rows: Any,
        states: Any = None,
        row_drafts: Sequence[Any] = (),
        state_drafts: Sequence[Any] = (),
        own_drafts: Sequence[Any] = (),
    ) -> TierBytes:
        """Bytes for a model, whose drafts are packed with the target or have a tier of their own.

        A hybrid pool may stand for the pool of rows in it, because SGLang lists a draft of a hybrid model by
        its hybrid pool.
        """
        from sgl_kvpool.srt.host.page_format import HostPageFormat

        pools = [rows_declared(pool.host_pool_decls()) for pool in (rows, *row_drafts)]
        rows = pools[0]
        host_row = rows.row_format.in_layout(rows.host_tier.host_layout(rows.kv_cache_layout)).row_bytes
        page_rows = sum(pool.layer_num * pool.page_size for pool in pools)
        keys = sum(pool.index_key_bytes for pool in pools)
        page = HostPageFormat.of_rows(page_rows * host_row + keys, rows.page_size)
        tokens, state_bytes = capacity(rows), 0
        if states is not None:
            from sgl_kvpool.srt.host.states import StateView

            slot = HostPageFormat.of_states(StateView.of((states, *state_drafts)).group.bytes_per_page)
            state_bytes = capacity(states) * slot.size_bytes
        return cls(
            rows=tokens * page.bytes_per_token(rows.page_size),
            states=state_bytes,
            # Each rank has all rows of a draft.
            own_drafts=tokens * rows.dcp_size * sum(map(own_draft_bytes, own_drafts)),
            host_tokens_per_token=rows.row_format.row_bytes / host_row,
        )

    def split(self, size: float) -> tuple[float, float]:
        """Split a size so that the host holds the same multiple of the device's rows and of its states."""
        total = self.rows + self.states
        return size * self.rows / total, size * self.states / total

    def planned_gb(self, ratio: float, size_gb: float) -> tuple[float, float]:
        """GB for rows and for states by --hicache-ratio, or by --hicache-size if that is not 0."""
        if size_gb:
            return self.split(size_gb)
        return ratio * self.host_tokens_per_token * self.rows / 1e9, ratio * self.states / 1e9

    @property
    def at_ratio_one(self) -> int:
        """Bytes of all host pools of a rank for --hicache-ratio 1."""
        return int(self.host_tokens_per_token * (self.rows + self.own_drafts)) + self.states


def rows_declared(decls: Sequence[Any]) -> Any:
    """The device pool that holds the rows: the pool itself, or the inner pool of a hybrid pool."""
    return next(decl.device_pool for decl in decls if decl.is_primary)


def capacity(pool: Any) -> int:
    """Tokens or state slots of a pool, as SGLang counts them for a host tier."""
    return pool.size if pool.host_capacity_tokens is None else pool.host_capacity_tokens


def has_our_tier(pool: Any) -> bool:
    """Whether a device pool's host tier is a `HierarchicalMLAHostPool`."""
    from sgl_kvpool.srt.pool.mla import LayoutMLATokenToKVPool

    return isinstance(pool, LayoutMLATokenToKVPool) and pool.has_our_tier


def holds_our_rows(host_pool: Any) -> bool:
    """Whether a host pool is our host pool of rows."""
    from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool

    return isinstance(host_pool, HierarchicalMLAHostPool)


def own_draft_bytes(pool: Any) -> int:
    """Bytes per token, over all layers, in the host tier of a draft that is not packed."""
    pool = getattr(pool, "full_kv_pool", pool)
    if not has_our_tier(pool):
        sizes = pool.get_kv_size_bytes()
        return -(-(sum(sizes) if isinstance(sizes, tuple) else sizes) // pool.size)
    host_layout = pool.host_tier.host_layout(pool.kv_cache_layout)
    row_bytes = pool.row_format.in_layout(host_layout).row_bytes
    # SGLang keeps index keys of such a draft in a pool beside it.
    return pool.layer_num * row_bytes + pool.index_key_bytes // pool.page_size
