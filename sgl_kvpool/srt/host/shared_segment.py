"""Memory that all ranks of a machine map: a host tier with one copy of each page.

The first rank makes an anonymous file (memfd), and the others open it through /proc. The file has no name in
any file system, so its memory is released when the last process that maps it ends, for whatever reason.
"""

from __future__ import annotations

import logging
import mmap
import os
import time

import torch

from sgl_kvpool.memory.numa import interleave, numa_nodes
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.srt.host.node_ranks import NodeRanks

__all__ = ["SharedSegment"]

logger = logging.getLogger(__name__)

#: Constant of <linux/mman.h>, since Linux 5.14; Python does not define it.
_MADV_POPULATE_WRITE = 23
#: Bytes faulted in by one call; progress is logged between calls.
_STEP_BYTES = 1 << 30
_PROGRESS_SECONDS = 10.0


class SharedSegment:
    """Memory mapping that all ranks of a machine share.

    Every rank of the group has to create it with the same size.

    Parameters
    ----------
    ranks : NodeRanks
    size_bytes : int

    Attributes
    ----------
    memory : Tensor [size_bytes], uint8
        Zeros that are resident in memory: each rank has faulted in its part.
    is_interleaved : bool
        Whether its memory pages alternate between the machine's NUMA nodes.

    Raises
    ------
    Refusal
        On all ranks, if one rank of the group could not map the memory.
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
        # Gather the errors of all machines; otherwise ranks of a machine without errors would later wait for
        # the others.
        problems = [found for found in ranks.gather_all(failed) if found is not None]
        if descriptor >= 0:
            os.close(descriptor)
        if problems:
            raise Refusal(
                f"the ranks of a machine could not share {size_bytes / 1e9:.2f} GB of host memory "
                f"({problems[0]}); give --kv-host-sharing rank, or a smaller --hicache-size"
            )
        assert self._mapping is not None
        self.memory = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.is_interleaved = self._interleave()
        # The kernel keeps the memory policy with the file, for all mappings; every rank sets the same policy.
        # No page may be allocated earlier.
        ranks.gather(None)
        step = -(-size_bytes // ranks.count // mmap.PAGESIZE) * mmap.PAGESIZE
        self._fault_in(ranks.rank * step, min(size_bytes, (ranks.rank + 1) * step))
        ranks.gather(None)

    def _interleave(self) -> bool:
        """Interleave memory over NUMA nodes; else a page is on the node of the rank that faults it in."""
        nodes = numa_nodes()
        if len(nodes) < 2:
            return False
        problem = interleave(self.memory.data_ptr(), self.memory.nbytes, nodes)
        if problem is not None:
            logger.info("sgl-kvpool: the host tier does not alternate between NUMA nodes: mbind: %s", problem)
        return problem is None

    def _fault_in(self, begin: int, end: int) -> None:
        """Fault in memory before a request has to wait for it: the kernel provides a few GB per second."""
        assert self._mapping is not None
        last_logged = time.monotonic()
        for offset in range(begin, end, _STEP_BYTES):
            size = min(_STEP_BYTES, end - offset)
            try:
                self._mapping.madvise(_MADV_POPULATE_WRITE, offset, size)
            except OSError:  # a kernel without MADV_POPULATE_WRITE
                self.memory[offset : offset + size].zero_()
            if time.monotonic() - last_logged > _PROGRESS_SECONDS:
                last_logged = time.monotonic()
                done, total = (offset + size - begin) / 1e9, (end - begin) / 1e9
                logger.info(
                    "sgl-kvpool: making the shared host tier, %.0f of %.0f GB of this rank", done, total
                )
