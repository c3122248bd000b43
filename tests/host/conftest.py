"""Host tiers on a machine of any size: SGLang keeps 10 GiB of memory free, and these take a megabyte."""

import pytest


@pytest.fixture
def no_reserve(monkeypatch, published):
    from sglang.srt.mem_cache.pool_host import base

    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)
