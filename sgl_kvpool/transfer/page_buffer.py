"""The page buffer of the `staged` engine: device memory that pages go through."""

from __future__ import annotations

import weakref
from typing import Any

import torch

__all__ = ["PageBuffer", "buffer_bytes", "staged_state_bytes"]

#: Slots of a buffer: while the copy engine empties or fills one, kernels work on the next.
_SLOTS = 4
#: Bytes of a slot, if a page is not longer. Long enough that a wait between two slots costs less than 1 % of
#: the 300 us that a link needs for it; the first slot of a store, which nothing overlaps, stays short.
_SLOT_BYTES = 16 << 20
#: What slots begin at multiples of, so that kernels find pages where they were told.
_ALIGNMENT_BYTES = 256
#: Pages of a slot at most.
_SLOT_PAGES = 16


def _slot_bytes(page_bytes: int) -> int:
    wanted = max(page_bytes, min(_SLOT_BYTES, _SLOT_PAGES * page_bytes))
    return -(-wanted // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def buffer_bytes(page_bytes: int) -> int:
    """Bytes of the buffers of both directions.

    Parameters
    ----------
    page_bytes : int
        Of a host page of all layers.

    Returns
    -------
    int
        At most 128 MiB, or, if pages are longer than 16 MiB, 8 of them.
    """
    return 2 * _SLOTS * _slot_bytes(page_bytes)


def staged_state_bytes(state_bytes: int, largest_part_bytes: int) -> int:
    """What a slot takes at least of a host slot of states, whose parts travel in groups.

    Parameters
    ----------
    state_bytes : int
        Of all layers: tens of megabytes, of which several would be a good part of a GPU's memory.
    largest_part_bytes : int
        Of one state of one layer, which is not taken apart.
    """
    return min(state_bytes, max(largest_part_bytes, _SLOT_BYTES))


class PageBuffer:
    """Device memory for the pages of one direction, and the streams and events that keep them apart.

    Parameters
    ----------
    page_bytes : int
        Of a host page of all layers.
    device : torch.device
    calls : module
        Of `gpu_calls`.

    Attributes
    ----------
    slot_bytes : int
    handle : int
        Of csrc/staging.h's `Staging`.
    """

    def __init__(self, page_bytes: int, device: torch.device, calls: Any) -> None:
        self.slot_bytes = _slot_bytes(page_bytes)
        self.memory = torch.empty(_SLOTS, self.slot_bytes, dtype=torch.uint8, device=device)
        self.handle: int = calls.make_staging(self.memory.data_ptr(), self.slot_bytes, _SLOTS)
        weakref.finalize(self, calls.free_staging, self.handle)

    def pages(self, page_bytes: int) -> torch.Tensor:
        """The first slot as pages, `[pages, page_bytes]` uint8."""
        count = self.slot_bytes // page_bytes
        return self.memory[0, : count * page_bytes].view(count, page_bytes)
