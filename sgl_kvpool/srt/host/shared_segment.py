"""The ranks of a machine, and memory that all of them map: a host tier with one copy of each page.

The first rank makes an anonymous file (memfd), and the others open it through /proc. The file has no name in
any file system, so its memory is released when the last process that maps it ends, for whatever reason.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sgl_kvpool.memory.numa import interleave, numa_nodes
from sgl_kvpool.refusal import Refusal

logger = logging.getLogger(__name__)

#: Constant of <linux/mman.h>, since Linux 5.14; Python does not define it.
_MADV_POPULATE_WRITE = 23
#: Bytes faulted in by one call; progress is logged between calls.
_STEP_BYTES = 1 << 30
_PROGRESS_SECONDS = 10.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SharingRefused(Refusal):
    """Error on all ranks of a group: the system does not let the ranks of a machine share memory."""


@dataclass(frozen=True)
class NodeRanks:
    """Ranks of a group that run on this machine.

    `group` is the gloo group of all ranks that hold the same rows, on one or several machines, `members` its
    ranks on this machine in order, and `rank` the index of this process among them. `fewest` is the number of
    ranks on the machine with the fewest: the tiers of all machines have this many parts.
    """

    group: Any
    members: tuple[int, ...]
    rank: int
    fewest: int

    @classmethod
    def of(cls, group: Any) -> NodeRanks:
        """Find the ranks of a group on this machine; every rank of the group has to call it."""
        places: list[Any] = [None] * dist.get_world_size(group)
        here = _machine()
        dist.all_gather_object(places, here, group=group)
        _raise_first(places)
        members = tuple(rank for rank, place in enumerate(places) if place == here)
        fewest = min(Counter(places).values())
        return cls(group, members, members.index(dist.get_rank(group)), fewest)

    @property
    def count(self) -> int:
        return len(self.members)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Values of all ranks of this machine, in order; every rank of the group has to call it."""
        found = self.gather_all(value)
        return [found[member] for member in self.members]

    def gather_all(self, value: Any) -> list[Any]:
        """Values of all ranks of the group, on every machine, in order; every rank has to call it."""
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, value, group=self.group)
        return found

    def minimum(self, *values: int) -> list[int]:
        """Minimum of each value over all ranks of the group, on all machines."""
        least = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.group)
        return least.tolist()


def _raise_first(found: list[Any]) -> None:
    """Raise the first exception among values of all ranks, on all: one that went on would wait for others."""
    for value in found:
        if isinstance(value, Exception):
            raise value


def _machine() -> tuple[str, int] | SharingRefused:
    """Kernel and PID namespace: equal for processes that can open each other's files in /proc."""
    try:
        return _BOOT_ID.read_text().strip(), os.stat("/proc/self/ns/pid").st_ino
    except OSError as error:
        return SharingRefused(
            f"{error.filename} tells which ranks are on one machine and cannot be read ({error.strerror}); "
            "give --kv-host-sharing rank"
        )


class SharedSegment:
    """Memory mapping that all ranks of a machine share; every rank of the group creates it with one size.

    Each rank has faulted in its part of `memory`, `[size_bytes]` uint8 zeros. `is_interleaved`: whether its
    memory pages alternate between NUMA nodes. If a rank of the group cannot map the memory, all ranks raise
    SharingRefused; if the kernel does not provide it, OSError.
    """

    def __init__(self, ranks: NodeRanks, size_bytes: int):
        self._mapping: mmap.mmap | None = None
        descriptor, problem = -1, None
        if ranks.is_leader:
            try:
                descriptor = os.memfd_create("sgl-kvpool-host-tier", os.MFD_CLOEXEC)
                os.ftruncate(descriptor, size_bytes)
            except OSError as error:
                problem = f"{type(error).__name__}: {error}"
        (owner, number, failed), *_ = ranks.gather((os.getpid(), descriptor, problem))
        if failed is None:
            try:
                if not ranks.is_leader:
                    descriptor = os.open(f"/proc/{owner}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
                self._mapping = mmap.mmap(descriptor, size_bytes)
            except (OSError, ValueError, OverflowError) as error:
                failed = f"{type(error).__name__}: {error}"
        if failed is not None:
            failed = SharingRefused(
                f"the ranks of a machine could not share {size_bytes / 1e9:.2f} GB of host memory "
                f"({failed}); give --kv-host-sharing rank, or a smaller --hicache-size"
            )
        found = ranks.gather_all(failed)
        if descriptor >= 0:
            os.close(descriptor)
        _raise_first(found)
        assert self._mapping is not None
        self.memory = torch.frombuffer(self._mapping, dtype=torch.uint8)
        with suppress(OSError):  # a kernel without huge pages
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.is_interleaved = self._interleave()
        # The kernel keeps the memory policy with the file, for all mappings; every rank sets the same policy.
        # No page may be allocated earlier.
        ranks.gather(None)
        step = -(-size_bytes // ranks.count // mmap.PAGESIZE) * mmap.PAGESIZE
        failed = self._fault_in(ranks.rank * step, min(size_bytes, (ranks.rank + 1) * step))
        _raise_first(ranks.gather_all(failed))

    def _interleave(self) -> bool:
        """Interleave memory over NUMA nodes; else a page is on the node of the rank that faults it in."""
        nodes = numa_nodes()
        if len(nodes) < 2:
            return False
        problem = interleave(self.memory.data_ptr(), self.memory.nbytes, nodes)
        if problem is not None:
            logger.info("sgl-kvpool: the host tier does not alternate between NUMA nodes: mbind: %s", problem)
        return problem is None

    def _fault_in(self, begin: int, end: int) -> OSError | None:
        """Fault in memory now, since a few GB take a second; the kernel's error, None without one."""
        assert self._mapping is not None
        last_logged = time.monotonic()
        for offset in range(begin, end, _STEP_BYTES):
            size = min(_STEP_BYTES, end - offset)
            try:
                self._mapping.madvise(_MADV_POPULATE_WRITE, offset, size)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    return error
                self.memory[offset : offset + size].zero_()  # a kernel without MADV_POPULATE_WRITE
            if time.monotonic() - last_logged > _PROGRESS_SECONDS:
                last_logged = time.monotonic()
                done, total = (offset + size - begin) / 1e9, (end - begin) / 1e9
                logger.info(
                    "sgl-kvpool: making the shared host tier, %.0f of %.0f GB of this rank", done, total
                )
        return None
