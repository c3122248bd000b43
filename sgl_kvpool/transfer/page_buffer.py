"""The page buffer of the `staged` engine: device memory through which pages are moved."""

from __future__ import annotations

import weakref
from typing import Any

import torch

__all__ = ["PageBuffer", "buffer_bytes", "staged_state_bytes"]

#: Slots of a buffer: while the copy engine empties or fills one, kernels work on the next.
_SLOTS = 4
#: Maximum bytes of a slot, unless a page is longer. The link needs 300 us for them: a wait between two slots
#: costs less than 1 % of that. A larger slot would lengthen a store's first gather, which overlaps with no
#: copy.
_SLOT_BYTES = 16 << 20
#: Alignment of slots; kernels choose their word size by addresses relative to a slot.
_ALIGNMENT_BYTES = 256
#: Maximum number of whole pages in a slot. Loads move groups of layers, of which a slot holds more pages.
_SLOT_PAGES = 16


def _slot_bytes(page_bytes: int) -> int:
    wanted = max(page_bytes, min(_SLOT_BYTES, _SLOT_PAGES * page_bytes))
    return -(-wanted // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def buffer_bytes(page_bytes: int) -> int:
    """Bytes of the buffers of both directions.

    Parameters
    ----------
    page_bytes : int
        Bytes of a host page of all layers; `staged_state_bytes` for states.

    Returns
    -------
    int
        At most 128 MiB, or 8 pages if a page is longer than 16 MiB.
    """
    return 2 * _SLOTS * _slot_bytes(page_bytes)


def staged_state_bytes(state_bytes: int, largest_part_bytes: int) -> int:
    """Minimum bytes of a buffer slot for states, whose parts are moved in groups.

    Parameters
    ----------
    state_bytes : int
        Bytes of the states of all layers in a host slot: tens of megabytes. Buffers with several slots of
        this size would take a large part of a GPU's memory.
    largest_part_bytes : int
        Bytes of the largest state of one layer, which is moved whole.
    """
    return min(state_bytes, max(largest_part_bytes, _SLOT_BYTES))


class PageBuffer:
    """Device memory for the pages of one direction, with the stream and the events that order its use.

    Parameters
    ----------
    page_bytes : int
        Bytes of a host page of all layers; `staged_state_bytes` for states.
    device : torch.device
    calls : module
        Module that `gpu_calls` returns.

    Attributes
    ----------
    slot_bytes : int
    handle : int
        Address of the `Staging` object of csrc/staging.h.
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
