"""Memory of the host tier: real limits, and chunks; their registration: tests/emulated_cuda."""

import mmap
import resource
from pathlib import Path

import pytest
from host_tier import host_pool
from hypothesis import given
from hypothesis import strategies as st
from pools import device_pool
from sglang.srt.mem_cache.pool_host import base

from sgl_kvpool.srt.host.memory import page_chunks
from sgl_kvpool.transfer.host_options import RESERVED_BYTES


def test_a_ratio_that_does_not_fit(no_reserve):
    pool = device_pool("bf16")
    with pytest.raises(ValueError, match=r"needs \d{4,}\.\d\d GB for \d+ tokens.*--hicache-ratio, fewer"):
        host_pool(pool, ratio=1e9)


def test_sglangs_reserve_is_named(published, monkeypatch):
    """Without the fixture that removes the reserve: SGLang keeps all memory of this machine free."""
    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 1 << 50)
    with pytest.raises(ValueError, match=r"keeps 1125899\.9 GB of host memory free"):
        host_pool(device_pool("fp4"))


def test_what_sglang_keeps_free(published):
    """Our copy of SGLang's reserve, which the demo and the doctor read without importing SGLang."""
    assert base.HICACHE_HOST_MEMORY_RESERVE_BYTES == RESERVED_BYTES


def test_a_real_limit_of_memory(no_reserve):
    """RLIMIT_AS below what the tier needs: the system refuses, and the error says what to do."""
    pool = device_pool("bf16")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), before[1]))
    try:
        with pytest.raises(
            ValueError,
            match=r"needs 0\.\d\d GB for \d+ tokens and could not get them.*--hicache-size \(GB\), or",
        ):
            host_pool(pool, host_size=0.5)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert host_pool(pool, host_size=0.01).page_num > 0


@given(
    pages=st.integers(1, 50_000),
    page_bytes=st.integers(1, 3000).map(lambda n: 16 * n),
    chunk_bytes=st.integers(1, 1 << 24),
)
def test_chunks_cover_everything_once_and_cut_no_page(pages, page_bytes, chunk_bytes):
    chunks = page_chunks(pages * page_bytes, page_bytes, chunk_bytes)
    at = 0
    for offset, size in chunks:
        assert offset == at
        assert offset % page_bytes == offset % mmap.PAGESIZE == 0
        assert size > 0
        at += size
    assert at == pages * page_bytes
    smallest = min(
        n for n in range(page_bytes, page_bytes * mmap.PAGESIZE + 1, page_bytes) if n % mmap.PAGESIZE == 0
    )
    assert all(size <= max(chunk_bytes, smallest) for _, size in chunks)
