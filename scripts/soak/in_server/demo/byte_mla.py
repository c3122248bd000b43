"""Loaded by SGLang in the scheduler process, before pools are built."""

from sglang.srt.mem_cache.pool_host import base

from scripts.soak.in_server import entry  # noqa: F401
from sgl_kvpool.demo.models.absorbed import EntryClass  # noqa: F401

# SGLang keeps 10 GiB of host memory free, which tiers of a few MB do not need.
base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
