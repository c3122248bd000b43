"""A host tier with one copy of each page for all ranks of a machine: which rank writes what, and when.

Rows of MLA are the same on every rank of tensor parallelism. Rank r of a machine stores the pages whose index
is r modulo the machine's number of ranks, and all ranks load from the one copy. SGLang's own collectives
order this: a backup or a load is finished when it is finished on every rank, and until then the tree keeps
its pages.
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
    """State of a tier of rows that the ranks of a machine share.

    Parameters
    ----------
    ranks : NodeRanks

    Attributes
    ----------
    log : AllocationLog
        Log of this rank's allocator.
    lost : LostPages
        Lost pages of all ranks; stored behind the pages in the segment.
    has_to_compare : bool
        Whether the ranks are in a step in which they have not compared their logs yet.
    may_submit : bool
        Whether backups may be submitted: the ranks have compared their logs in this step, or the tier has
        ended, so that backups store nothing.
    """

    lost: LostPages
    has_to_compare = False
    may_submit = False

    def __init__(self, ranks: NodeRanks):
        self.ranks = ranks
        self.log = AllocationLog()
        self._segment: SharedSegment | None = None

    def room_problem(self, wanted_bytes: int, available_bytes: int) -> str | None:
        """Reason why a rank of any machine lacks memory for its part of the segment; None if all fit.

        Parameters
        ----------
        wanted_bytes, available_bytes : int
            Size of this rank's part of the segment, and the host memory that SGLang lets this rank take.
        """
        (spare,) = self.ranks.minimum(available_bytes - wanted_bytes)
        if spare >= 0:
            return None
        return (
            f"a rank's part of the tier of {self.ranks.count} ranks needs {wanted_bytes / 1e9:.2f} GB, "
            f"but only {(wanted_bytes + spare) / 1e9:.2f} GB are free for it"
        )

    def allocate(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the pages, `shape` of `dtype`, with the flags of lost pages behind it."""
        pages_bytes = math.prod(shape) * dtype.itemsize
        flags_at = -(-pages_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        flags_bytes = self.ranks.count * shape[0]
        self._segment = SharedSegment(self.ranks, flags_at + flags_bytes)
        memory = self._segment.memory
        flags = memory[flags_at : flags_at + flags_bytes].numpy().reshape(self.ranks.count, shape[0])
        self.lost = LostPages(flags, self.ranks.rank)
        return memory[:pages_bytes].view(dtype).view(shape)

    @property
    def is_interleaved(self) -> bool:
        """Whether the memory alternates between NUMA nodes."""
        return self._segment is not None and self._segment.is_interleaved

    def own_part(
        self, host_pages: np.ndarray, device_pages: np.ndarray | DevicePages
    ) -> tuple[np.ndarray, np.ndarray | DevicePages]:
        """Select the pages of a backup's lists that this rank stores."""
        own = np.flatnonzero(host_pages % self.ranks.count == self.ranks.rank)
        if isinstance(device_pages, DevicePages):
            return host_pages[own], device_pages.take(own)
        return host_pages[own], device_pages[own]

    def begin_step(self) -> None:
        """Keep backups queued until the ranks have compared their allocation logs."""
        self.may_submit = self.lost.is_closed
        self.has_to_compare = not self.may_submit

    def end_step(self) -> None:
        """Keep further backups queued until the ranks compare their logs in the next step."""
        self.may_submit = self.has_to_compare = False

    def compare_in(self, data: torch.Tensor, reduce: Callable[[torch.Tensor], object]) -> None:
        """Compare the allocation logs of the ranks in a collective of SGLang's; every rank has to call it.

        At the first difference the tier ends on all ranks before a copy is submitted, because a rank would
        overwrite pages of others. All pages of the tier then count as lost.

        Parameters
        ----------
        data : Tensor [n], int64
            SGLang's values, which are replaced by their minimum over the ranks.
        reduce : callable
            Function that replaces a tensor by its minimum over the ranks.
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
            by_rank = [f"rank {rank}: {words}" for rank, words in enumerate(lists)]
            self.end(f"at a load, {'; '.join(by_rank)}")

    def end(self, why: str) -> None:
        """End the tier: treat all pages as lost from now on."""
        self.lost.close()
        metrics.failed("tier_disagreement", why)

    def in_words(self, tokens: int) -> str:
        """Text for the log about a tier of `tokens` tokens."""
        spread = ", interleaved over NUMA nodes" if self.is_interleaved else ""
        return (
            f"one copy for the {self.ranks.count} ranks of this machine{spread}: {tokens} tokens, "
            f"{self.ranks.fewest} times as many as with a tier for each rank"
        )
