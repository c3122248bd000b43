"""Bytes of rows, index keys and states in a host tier, which decide how its memory is divided.

Only `TierBytes.of` imports SGLang, because `sgl-kvpool plan` uses the rest without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["TierBytes", "rows_declared"]


@dataclass(frozen=True, kw_only=True)
class TierBytes:
    """Bytes in the host tier for everything that the device pools hold, by kind.

    Attributes
    ----------
    rows : int
        Rows in the host's layout, including packed drafts, padding and checksums.
    index_keys : int
        Index keys of models with sparse attention, which are kept under the rows' page indices.
    states : int
    device_rows : int
        Rows in the device's layout.
    """

    rows: int
    index_keys: int
    states: int
    device_rows: int

    @classmethod
    def of(
        cls, rows: Any, states: Any, row_drafts: Sequence[Any] = (), state_drafts: Sequence[Any] = ()
    ) -> TierBytes:
        """Bytes for a hybrid model.

        Parameters
        ----------
        rows : LayoutMLATokenToKVPool
            The target's pool of rows, or the hybrid pool that contains it.
        states : MambaPool
            The target's pool of states.
        row_drafts, state_drafts : sequence
            Pools of the drafts that are packed with the target. As for `rows`, a hybrid pool may stand for
            the pool of rows in it, because SGLang lists a draft of a hybrid model by its hybrid pool.
        """
        from sgl_kvpool.srt.host.page_format import HostPageFormat
        from sgl_kvpool.srt.host.state_view import StateView

        declared = [pool.host_pool_decls() for pool in (rows, *row_drafts)]
        pools = [rows_declared(decls) for decls in declared]
        rows = pools[0]
        host_row = rows.row_format.in_layout(rows.host_tier.host_layout(rows.kv_cache_layout)).row_bytes
        layers = sum(pool.layer_num for pool in pools)
        page = HostPageFormat.of_rows(layers * rows.page_size * host_row, rows.page_size)
        index_bytes = sum(_beside_rows(decl) for decls in declared for decl in decls if not decl.is_primary)
        view = StateView.of((states, *state_drafts))
        return cls(
            rows=_capacity(rows) * page.bytes_per_token(rows.page_size),
            index_keys=_capacity(rows) * index_bytes,
            states=_capacity(states) * HostPageFormat.of_states(view.group.bytes_per_page).size_bytes,
            device_rows=_capacity(rows) * layers * rows.row_format.row_bytes,
        )

    def split(self, size: float) -> tuple[float, float]:
        """Split a size so that the host holds the same multiple of the device's rows and of its states."""
        total = self.rows + self.index_keys + self.states
        return size * self.rows / total, size * self.states / total

    def planned_gb(self, ratio: float, size_gb: float) -> tuple[float, float]:
        """GB for rows and for states by --hicache-ratio, or by --hicache-size if that is not 0."""
        if size_gb:
            return self.split(size_gb)
        return ratio * self.device_rows / 1e9, ratio * self.states / 1e9


def rows_declared(decls: Sequence[Any]) -> Any:
    """Device pool of the rows in a pool's declaration for a host tier; for a hybrid pool its inner pool."""
    return next(decl.device_pool for decl in decls if decl.is_primary)


def _beside_rows(decl: Any) -> int:
    """Bytes per token, over all layers, of data that the host keeps under the rows' page indices."""
    layers = decl.owned_device_layers
    count = decl.device_pool.layer_num if layers is None else len(layers)
    return count * decl.storage_info.bytes_per_token_per_layer


def _capacity(pool: Any) -> int:
    """Tokens or state slots of a pool, as SGLang counts them for a host tier."""
    return pool.size if pool.host_capacity_tokens is None else pool.host_capacity_tokens
