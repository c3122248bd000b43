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
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
import xxhash

from sgl_kvpool import metrics
from sgl_kvpool.srt.host.shared_segment import NodeRanks, SharedSegment
from sgl_kvpool.transfer.slots import DevicePages

logger = logging.getLogger(__name__)

#: Number of operations that are kept to name the first one in which ranks differ: those of a few hundred
#: requests.
_KEPT = 1024
#: 62 bits, so that the digest and its negative are int64.
_DIGEST_BITS = 62


class SharedTier:
    """State of a tier of rows that the ranks of a machine share; `log` is that of this rank's allocator."""

    #: Lost pages of all ranks; stored behind the pages in the segment.
    lost: LostPages
    #: Whether the ranks have not compared their logs in this step yet.
    has_to_compare = False
    #: Whether backups may be submitted: the logs were compared, or the tier has ended and stores nothing.
    may_submit = False

    def __init__(self, ranks: NodeRanks):
        self.ranks = ranks
        self.log = AllocationLog()
        self._segment: SharedSegment | None = None

    def room_problem(self, wanted_bytes: int, available_bytes: int) -> str | None:
        """Reason why a rank of any machine lacks memory for its part of the segment; None if all fit.

        `available_bytes` is the host memory that SGLang lets this rank take.
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

    def own_part(
        self, host_pages: np.ndarray, device_pages: np.ndarray | DevicePages
    ) -> tuple[np.ndarray, np.ndarray | DevicePages]:
        """Select the pages of a backup's lists that this rank stores."""
        own = np.flatnonzero(host_pages % self.ranks.count == self.ranks.rank)
        if isinstance(device_pages, DevicePages):
            return host_pages[own], device_pages.take(own)
        return host_pages[own], device_pages[own]

    def begin_step(self) -> None:
        """Begin of a step: backups wait until the ranks have compared their allocation logs."""
        self.may_submit = self.lost.is_closed
        self.has_to_compare = not self.may_submit

    def end_step(self) -> None:
        """End of a step: backups now wait for the next comparison of logs."""
        self.may_submit = self.has_to_compare = False

    def compare_in(self, data: torch.Tensor, reduce: Callable[[torch.Tensor], object]) -> None:
        """Compare the allocation logs of the ranks in a collective of SGLang's; every rank has to call it.

        At the first difference the tier ends on all ranks before a copy is submitted, because a rank would
        overwrite pages of others. All pages of the tier then count as lost. `reduce` replaces a tensor, such
        as `data` `[n]` int64, by its minimum over the ranks.
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
        assert self._segment is not None
        spread = ", interleaved over NUMA nodes" if self._segment.is_interleaved else ""
        return (
            f"one copy for the {self.ranks.count} ranks of this machine{spread}: {tokens} tokens, "
            f"{self.ranks.fewest} times as many as with a tier for each rank"
        )


class LostPages:
    """Host pages lost in their backup, of one rank or of ranks that share a tier.

    Each rank has flags that only it writes, and a page is lost if any rank has flagged it. Therefore a slow
    rank cannot clear the flag of another rank. `flags` is `[ranks, pages]` uint8 zeros, in memory that the
    ranks share.
    """

    def __init__(self, flags: np.ndarray, rank: int = 0):
        self._flags, self._own = flags, flags[rank]
        self.is_closed = False

    @classmethod
    def private(cls, count: int) -> LostPages:
        """Flags of `count` pages that belong to this process alone."""
        return cls(np.zeros((1, count), dtype=np.uint8))

    def of(self, pages: np.ndarray) -> np.ndarray:
        """Flags of some pages, `[pages]` bool: whether each is lost."""
        return np.asarray(self._flags[:, pages].any(axis=0) | self.is_closed)

    def any(self, pages: np.ndarray | slice | int) -> bool:
        return self.is_closed or self.any_flagged(pages)

    def any_flagged(self, pages: np.ndarray | slice | int) -> bool:
        """Like `any`, but a closed tier does not count: loads that the ranks had agreed on still finish."""
        return bool(self._flags[:, pages].any())

    def set(self, pages: np.ndarray | slice | int, lost: bool) -> None:
        self._own[pages] = lost

    def close(self) -> None:
        """Mark every page as lost from now on; each rank has to call it."""
        self.is_closed = True


class AllocationLog:
    """A rolling digest of the allocations and frees of one rank in order, and the latest operations.

    Ranks that share a tier run the same scheduler, so they give the same pages to the same requests. If they
    did not, one rank would overwrite a page of another.
    """

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self._count = 0
        self._latest: deque[tuple[int, str, int]] = deque(maxlen=_KEPT)

    def add(self, what: str, slots: np.ndarray) -> None:
        """Record an operation, "alloc", "free" or "clear", with the slots (int64) that it concerns."""
        self._hash.update(what.encode())
        self._hash.update(np.ascontiguousarray(slots, dtype=np.int64).data)
        self._count += 1
        self._latest.append((self._count, f"{what} of {slots_in_words(slots)}", self.digest))

    @property
    def digest(self) -> int:
        """Digest from 0 to 2 ** 62 - 1, equal on ranks with the same operations."""
        return _int62(self._hash)

    def latest(self) -> list[tuple[int, str, int]]:
        return list(self._latest)


def slots_digest(slots: np.ndarray) -> int:
    """Digest of one list in its order, from 0 to 2 ** 62 - 1."""
    return _int62(xxhash.xxh3_64(np.ascontiguousarray(slots, dtype=np.int64).data))


def slots_in_words(slots: np.ndarray) -> str:
    return f"{len(slots)} slots from {slots[0]}" if len(slots) else "0 slots"


def _int62(hashed: xxhash.xxh3_64) -> int:
    return hashed.intdigest() >> (64 - _DIGEST_BITS)


def first_difference(histories: list[list[tuple[int, str, int]]]) -> str:
    """Text about the first operation in which ranks differ, given `AllocationLog.latest` of each."""
    by_number = [{number: (what, digest) for number, what, digest in history} for history in histories]
    for number in sorted(set().union(*by_number)):
        entries = [entries.get(number) for entries in by_number]
        digests = {entry[1] if entry else None for entry in entries}
        # An operation that one rank no longer keeps cannot be compared.
        oldest = max((min(entries) for entries in by_number if entries), default=0)
        if len(digests) > 1 and number >= oldest:
            texts = [f"rank {rank}: {entry[0] if entry else 'nothing'}" for rank, entry in enumerate(entries)]
            return f"operation {number}, {'; '.join(texts)}"
    return f"an operation before the latest {_KEPT}"
