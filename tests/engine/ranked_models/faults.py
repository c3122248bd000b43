"""Loaded by SGLang in each scheduler process: faults of rank 1 alone, of two tensor-parallel ranks.

Each lasts for as long as a file of its name lies in the folder that the variable RANK_1_FAULTS names.
"""

import os
import time
from pathlib import Path

from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from sglang.srt.runtime_context import get_parallel

from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool
from sgl_kvpool.transfer.channel import TransferChannel

_run, _get, _alloc = TransferChannel.run, HiCacheFile.get, HierarchicalMLAHostPool.alloc
_open = os.open


def _befalls_us(fault):
    return get_parallel().tp_rank == 1 and (Path(os.environ["RANK_1_FAULTS"]) / fault).exists()


def run(self, transfer, part=None):
    if self.direction == "to_host" and _befalls_us("lose_backups"):
        raise OSError(5, "lost on purpose")
    if self.direction == "to_host" and _befalls_us("slow_backups"):
        time.sleep(0.3)
    _run(self, transfer, part)


def get(self, key, *args, **kwargs):
    if _befalls_us(key):
        raise OSError(5, "unreadable on purpose")
    return _get(self, key, *args, **kwargs)


def alloc(self, need_size):
    """A page more than the other rank's allocator gives out."""
    if _befalls_us("move_allocator"):
        _alloc(self, self.page_size)
    return _alloc(self, need_size)


def opened(path, *args, **kwargs):
    """Opens no memory of the other rank."""
    if str(path).startswith("/proc/") and _befalls_us("open_memory"):
        raise PermissionError(1, "refused on purpose")
    return _open(path, *args, **kwargs)


os.open = opened
TransferChannel.run, HiCacheFile.get, HierarchicalMLAHostPool.alloc = run, get, alloc
