"""How rows and states of a hybrid model share the memory of a host tier: by the bytes that it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sgl_kvpool.host.state_view import StateView
from sgl_kvpool.host.states import state_slot_bytes

__all__ = ["TierShares"]


@dataclass(frozen=True, kw_only=True)
class TierShares:
    """Bytes on the host of everything that the device pools hold, by kind.

    Attributes
    ----------
    rows : int
        In the host's layout, packed drafts included.
    index_keys : int
        Of models with sparse attention; they are kept under the pages of the rows.
    states : int
    device_rows : int
        The rows again, in the device's layout.
    """

    rows: int
    index_keys: int
    states: int
    device_rows: int

    @classmethod
    def of(
        cls, rows: Any, states: Any, row_drafts: Sequence[Any] = (), state_drafts: Sequence[Any] = ()
    ) -> TierShares:
        """Shares of a hybrid model.

        Parameters
        ----------
        rows : LayoutMLATokenToKVPool
            Of the target.
        states : MambaPool
            Of the target.
        row_drafts, state_drafts : sequence
            Pools of the drafts that are packed with them.
        """
        pools = (rows, *row_drafts)
        host_row = rows.row_format.in_layout(rows.host_tier.host_layout(rows.kv_cache_layout)).row_bytes
        cells = _capacity(rows) * sum(pool.layer_num for pool in pools)
        slot_bytes = state_slot_bytes(StateView.of((states, *state_drafts)))
        return cls(
            rows=cells * host_row,
            index_keys=sum(
                keys.nbytes for pool in pools for keys in getattr(pool, "index_k_with_scale_buffer", ())
            ),
            states=_capacity(states) * slot_bytes,
            device_rows=cells * rows.row_format.row_bytes,
        )

    def split(self, size: float) -> tuple[float, float]:
        """What rows and states get of a size, so that the host holds as much of the one as of the other."""
        total = self.rows + self.index_keys + self.states
        return size * self.rows / total, size * self.states / total

    def planned_gb(self, ratio: float, size_gb: float) -> tuple[float, float]:
        """GB of rows and of states with --hicache-ratio, or with --hicache-size if it is not 0."""
        if size_gb:
            return self.split(size_gb)
        return ratio * self.device_rows / 1e9, ratio * self.states / 1e9


def _capacity(pool: Any) -> int:
    """Tokens, or state slots, as SGLang counts them for a host tier."""
    return pool.size if pool.host_capacity_tokens is None else pool.host_capacity_tokens
