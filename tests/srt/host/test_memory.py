"""Memory of the host tier: real limits, and registration with CUDA in chunks."""

import mmap
import resource
from pathlib import Path

import pytest
import torch
from host_tier import host_pool
from hypothesis import given
from hypothesis import strategies as st
from pools import device_pool

from sgl_kvpool.srt.host.memory import page_chunks, pin
from sgl_kvpool.transfer.gpu_engine import RegisteredChunks

# ------------------------------------------------------------------ too much


def test_a_ratio_that_does_not_fit(no_reserve):
    pool = device_pool("bf16")
    with pytest.raises(ValueError, match=r"needs \d{4,}\.\d\d GB for \d+ tokens.*--hicache-ratio, fewer"):
        host_pool(pool, ratio=1e9)


def test_sglangs_reserve_is_named(published, monkeypatch):
    """Without the fixture that removes the reserve: SGLang keeps all memory of this machine free."""
    from sglang.srt.mem_cache.pool_host import base

    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 1 << 50)
    with pytest.raises(ValueError, match=r"keeps 1125899\.9 GB of host memory free"):
        host_pool(device_pool("fp4"))


def test_what_sglang_keeps_free(published):
    """Our copy of SGLang's reserve, which the demo and the doctor read without importing SGLang."""
    from sglang.srt.mem_cache.pool_host import base

    from sgl_kvpool.transfer.host_options import RESERVED_BYTES

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


# ------------------------------------------------------------------ chunks


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


#: `torch.cuda.cudart()` returns this where there is a driver; its enum and messages need no driver.
cudart_of_torch = torch._C._cudart


class Cudart:
    """Counts registrations as CUDA does; fails at call `fail_at`, or if a chunk is longer than `longest`."""

    def __init__(self, fail_at=None, longest=None):
        self.fail_at, self.longest, self.registered, self.calls = fail_at, longest, {}, 0
        self.unregistered = []

    def cudaHostRegister(self, address, size, flags):
        self.calls += 1
        if self.calls - 1 == self.fail_at or (self.longest is not None and size > self.longest):
            return cudart_of_torch.cudaError(2)
        for begin, length in self.registered.items():
            assert address + size <= begin or begin + length <= address, "registered twice"
        self.registered[address] = size
        return cudart_of_torch.cudaError(0)

    def cudaHostUnregister(self, address):
        self.unregistered.append(address)
        return cudart_of_torch.cudaError(0 if self.registered.pop(address, None) else 1)

    cudaGetErrorString = staticmethod(cudart_of_torch.cudaGetErrorString)


def buffer(pages=37, page_bytes=4096 * 3):
    return torch.empty(pages * page_bytes, dtype=torch.uint8), page_bytes


def test_registered_in_chunks_and_unregistered_by_sglang(monkeypatch):
    from sglang.srt.mem_cache.pool_host.common import _cuda_host_unregister

    memory, page_bytes = buffer()
    cudart = Cudart()
    chunks = pin(memory, page_bytes, cudart, chunk_bytes=10 * page_bytes)
    assert chunks == RegisteredChunks(memory.data_ptr(), 10 * page_bytes)
    assert sorted(cudart.registered.values()) == [7 * page_bytes, *[10 * page_bytes] * 3]
    assert sum(cudart.registered.values()) == memory.nbytes
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    _cuda_host_unregister(memory)
    assert cudart.registered == {}


@pytest.mark.parametrize("fail_at", [0, 1, 3])
def test_a_chunk_that_fails_undoes_the_others(fail_at, failures, caplog):
    """Shorter chunks are tried then; no copy may cross a chunk boundary."""
    memory, page_bytes = buffer()
    cudart = Cudart(fail_at)
    chunks = pin(memory, page_bytes, cudart, chunk_bytes=10 * page_bytes)
    assert chunks == RegisteredChunks(memory.data_ptr(), 2 * page_bytes)
    assert sorted(cudart.registered.values()) == [page_bytes, *[2 * page_bytes] * 18]
    assert cudart.calls == fail_at + 1 + 19
    assert failures() == {}
    done = fail_at * 10 * page_bytes
    assert f"in 4 chunks: cudaHostRegister of {(7 if fail_at == 3 else 10) * page_bytes} bytes" in caplog.text
    assert f"{done} of {memory.nbytes} done: error 2, out of memory" in caplog.text


def test_a_tier_whose_memory_cannot_be_pinned_is_pageable(no_reserve, monkeypatch, failures):
    """SGLang's `destroy` then unregisters nothing; it unregisters what was pinned."""
    from sglang.srt.mem_cache.pool_host import base

    cudart = Cudart(fail_at=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(base, "_is_cuda", True)  # without CUDA, SGLang never unregisters
    tier = host_pool(device_pool("fp4"), pin_memory=True)
    assert not tier.pin_memory
    tier.destroy()
    assert cudart.unregistered == []
    assert failures() == {"registration": 1}
    pinned = host_pool(device_pool("fp4"), pin_memory=True)
    assert pinned.pin_memory
    assert sum(cudart.registered.values()) == pinned.kv_buffer.nbytes
    pinned.destroy()
    assert len(cudart.unregistered) > 0
    assert cudart.registered == {}


def test_progress_is_said(monkeypatch, caplog):
    from sgl_kvpool.srt.host import memory as module

    monkeypatch.setattr(module, "_PROGRESS_SECONDS", -1.0)
    memory, page_bytes = buffer()
    with caplog.at_level("INFO"):
        assert pin(memory, page_bytes, Cudart(), chunk_bytes=10 * page_bytes)
    assert caplog.text.count("pinning the host tier") == 4
