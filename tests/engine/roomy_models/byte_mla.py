"""Loaded by SGLang in the scheduler process, before the host tier is built."""

from sglang.srt.mem_cache.pool_host import base

from sgl_kvpool.demo.models.absorbed import EntryClass  # noqa: F401

base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
