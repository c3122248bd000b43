"""A host tier with one copy of each page for all ranks of a machine: who writes what, and what they compare.

Rows of MLA are the same on every rank of tensor parallelism. Rank r of a machine stores the pages whose
number is r modulo the machine's ranks, and all load from the one copy. SGLang's own agreements say when: a
backup, and a load, is finished when it is on every rank, and until then the tree keeps its pages.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Callable

import numpy as np
import torch

from sgl_kvpool import metrics
from sgl_kvpool.srt.host.allocation_log import AllocationLog, first_difference, slots_in_words
from sgl_kvpool.srt.host.lost_pages import LostPages
from sgl_kvpool.srt.host.node_ranks import NodeRanks
from sgl_kvpool.srt.host.shared_segment import SharedSegment
from sgl_kvpool.transfer.slots import DevicePages

__all__ = ["SharedTier"]

logger = logging.getLogger(__name__)


class SharedTier:
    """What the ranks of a machine have in common of a tier of rows.

    Parameters
    ----------
    ranks : NodeRanks

    Attributes
    ----------
    log : AllocationLog
        Of this rank's allocator.
    lost : LostPages
        Of all ranks; behind the pages in the segment.
    has_to_compare : bool
        Whether the ranks are in a step in which they have not compared yet.
    may_submit : bool
        Whether they have, so that backups may be submitted. Those of a tier that has ended store nothing.
    """

    lost: LostPages
    has_to_compare = False
    may_submit = False

    def __init__(self, ranks: NodeRanks):
        self.ranks = ranks
        self.log = AllocationLog()
        self._segment: SharedSegment | None = None

    def room_problem(self, wanted_bytes: int, available_bytes: int) -> str | None:
        """Why the segment does not fit into memory, for some rank of any machine; None if it does.

        Parameters
        ----------
        wanted_bytes, available_bytes : int
            This rank's part of the segment, and SGLang's share of the free memory for it.
        """
        (spare,) = self.ranks.minimum(available_bytes - wanted_bytes)
        if spare >= 0:
            return None
        return (
            f"a rank's part of the tier that {self.ranks.count} ranks share has {wanted_bytes / 1e9:.2f} GB, "
            f"and {(wanted_bytes + spare) / 1e9:.2f} GB are free for it"
        )

    def allocate(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the pages, `shape` of `dtype`, and of the flags of lost ones behind it."""
        pages_bytes = math.prod(shape) * dtype.itemsize
        flags_at = -(-pages_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        flags_bytes = self.ranks.count * shape[0]
        self._segment = SharedSegment(self.ranks, flags_at + flags_bytes)
        memory = self._segment.memory
        columns = memory[flags_at : flags_at + flags_bytes].numpy().reshape(self.ranks.count, shape[0])
        self.lost = LostPages(columns, self.ranks.rank)
        return memory[:pages_bytes].view(dtype).view(shape)

    @property
    def is_interleaved(self) -> bool:
        """Whether the memory alternates between NUMA nodes."""
        return self._segment is not None and self._segment.is_interleaved

    def own_part(
        self, host_pages: np.ndarray, device_pages: np.ndarray | DevicePages
    ) -> tuple[np.ndarray, np.ndarray | DevicePages]:
        """Of a backup's lists, the pages that this rank stores."""
        own = np.flatnonzero(host_pages % self.ranks.count == self.ranks.rank)
        if isinstance(device_pages, DevicePages):
            return host_pages[own], device_pages.take(own)
        return host_pages[own], device_pages[own]

    def begin_step(self) -> None:
        """From now on no copy is submitted, until the ranks have compared what they have given out."""
        self.may_submit = self.lost.is_closed
        self.has_to_compare = not self.may_submit

    def end_step(self) -> None:
        """What is queued from now on waits for the next step."""
        self.may_submit = self.has_to_compare = False

    def compare_in(self, data: torch.Tensor, reduce: Callable[[torch.Tensor], object]) -> None:
        """Compare what the ranks have given out, in a collective of SGLang's; every rank has to call it.

        The first time that they differ, the tier ends on all of them, before a copy is submitted: a rank
        would write over pages of others. All its pages count as lost.

        Parameters
        ----------
        data : Tensor [n], int64
            SGLang's numbers, which get the minimum over the ranks.
        reduce : callable
            Takes a tensor, and puts the minimum over the ranks in its place.
        """
        self.has_to_compare = False
        digest = self.log.digest
        extended = torch.cat([data, torch.tensor([digest, -digest])])
        reduce(extended)
        data.copy_(extended[:-2])
        least, negative = extended[-2:].tolist()
        if least != -negative:
            self.end(f"at {first_difference(self.ranks.gather_all(self.log.latest()))}")
        self.may_submit = True

    def end_at_load(self, slots: np.ndarray) -> None:
        """End the tier: the ranks are about to load different slots; every rank has to call it."""
        if not self.lost.is_closed:
            lists = self.ranks.gather_all(slots_in_words(slots))
            said = [f"rank {rank}: {words}" for rank, words in enumerate(lists)]
            self.end(f"at a load, {'; '.join(said)}")

    def end(self, why: str) -> None:
        """Take all pages for lost from now on."""
        self.lost.close()
        metrics.failed("tier_disagreement", why)

    def in_words(self, tokens: int) -> str:
        """For the log, of a tier that holds so many tokens."""
        spread = ", interleaved over NUMA nodes" if self.is_interleaved else ""
        return (
            f"one copy for the {self.ranks.count} ranks of this machine{spread}: {tokens} tokens, "
            f"{self.ranks.fewest} times those of a tier for each rank"
        )
