"""Rows that a batch writes, found once per step for all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sgl_kvpool.srt.pool.arranged import RowWriteLoc

if TYPE_CHECKING:
    import torch

    from sgl_kvpool.srt.pool.row_pool import RowPool

__all__ = ["RowsToWrite"]


class RowsToWrite:
    """Where the tokens of a batch are stored, as row numbers of a pool.

    Parameters
    ----------
    pool : RowPool
    """

    def __init__(self, pool: RowPool):
        self.pool = pool
        self._slots: torch.Tensor | None = None
        self._rows: RowWriteLoc | None = None

    def forget(self) -> None:
        """To be called at every step, and inside a CUDA graph too: SGLang fills the same tensor anew, and
        what a graph is to work out again must be part of it."""
        self._slots = self._rows = None

    def of(self, forward_batch) -> RowWriteLoc:
        """Rows of a batch's tokens; worked out anew if SGLang has another `out_cache_loc` by now.

        Between graphs of prefill every layer has a new view of the same slots; the memory is what counts, and
        it is kept, so that no other tensor can be there.
        """
        slots, rows = forward_batch.out_cache_loc, self._rows
        if rows is None or self._slots is None or not _same_memory(self._slots, slots):
            loc = KVWriteLoc.for_batch(forward_batch)
            rows = RowWriteLoc(self.pool.slot_to_row(loc.loc), physical=loc.physical)
            self._slots, self._rows = slots, rows
        return rows


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
