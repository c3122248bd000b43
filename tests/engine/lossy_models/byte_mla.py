"""Loaded by SGLang in the scheduler process, before the host tier is built."""

from sglang.srt.mem_cache.pool_host import base

from sgl_kvpool.demo.models.absorbed import EntryClass  # noqa: F401
from sgl_kvpool.transfer.channel import TransferChannel

base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
_run = TransferChannel.run


def run(self, transfer, part=None):
    if self.direction == "to_host":
        raise OSError(5, "lost on purpose")
    _run(self, transfer, part)


TransferChannel.run = run
