"""Memory of a host tier: allocated by SGLang, pinned chunk by chunk so that a log can follow it."""

from __future__ import annotations

import logging
import math
import mmap
import time
from collections.abc import Sequence
from typing import Any

import torch

from sgl_kvpool import metrics
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.transfer.gpu_engine import RegisteredChunks

logger = logging.getLogger(__name__)

__all__ = ["CHUNK_BYTES", "HostTierTooLarge", "chunk_step", "page_chunks", "pin", "too_much"]

#: Bytes that are pinned in one call: some seconds' worth.
CHUNK_BYTES = 16 << 30
#: Then 4 GiB, 1 GiB and 256 MiB, where CUDA refuses one.
_SHRINKING = (0, 2, 4, 6)
#: Seconds between two lines that say how far pinning is.
_PROGRESS_SECONDS = 10.0


class HostTierTooLarge(Refusal):
    """A host tier that does not fit into memory."""


def too_much(
    size_bytes: int, count: int, by_ratio: bool, error: BaseException, unit: str = "tokens"
) -> HostTierTooLarge:
    """The error for a host tier that does not fit into memory.

    Parameters
    ----------
    size_bytes, count : int
        Of the tier.
    by_ratio : bool
        Whether --hicache-ratio gave them; else --hicache-size did.
    error : exception
        What the allocation ended with.
    unit : str
        What is counted: tokens or states.
    """
    from sglang.srt.mem_cache.pool_host import base

    if by_ratio:
        remedy = "Give a smaller --hicache-ratio, fewer --max-total-tokens, a narrower --kv-cache-layout"
    else:
        remedy = "Give a smaller --hicache-size (GB)"
    reserve = base.HICACHE_HOST_MEMORY_RESERVE_BYTES
    return HostTierTooLarge(
        f"the host tier needs {size_bytes / 1e9:.2f} GB for {count} {unit} and could not get them "
        f"({type(error).__name__}: {error}); SGLang keeps {reserve / 1e9:.1f} GB of host memory free. "
        f"{remedy}, or leave out --enable-hierarchical-cache"
    )


def chunk_step(page_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Bytes from one chunk of `page_chunks` to the next."""
    step = math.lcm(page_bytes, mmap.PAGESIZE)
    return step * max(1, chunk_bytes // step)


def page_chunks(total_bytes: int, page_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> list[tuple[int, int]]:
    """Chunks of a buffer, none of which ends inside a page.

    A copy must not cross two registrations, and no memory page of the system (4096 bytes) may be in two. So
    chunks are multiples of both.

    Parameters
    ----------
    total_bytes : int
        Of the buffer.
    page_bytes : int
        What one copy moves at most.
    chunk_bytes : int
        About how long a chunk should be; at least the common multiple.

    Returns
    -------
    list of tuple of int
        Offset and size in bytes, in order, without gaps.
    """
    step = chunk_step(page_bytes, chunk_bytes)
    return [(offset, min(step, total_bytes - offset)) for offset in range(0, total_bytes, step)]


def pin(
    buffer: torch.Tensor, page_bytes: int, cudart: Any = None, chunk_bytes: int = CHUNK_BYTES
) -> RegisteredChunks | None:
    """Register a host buffer with CUDA, chunk by chunk; in smaller chunks if it refuses one.

    Drivers refuse long calls now and then where shorter ones work (SGLang's pull request 39744), and a tier
    that is not pinned moves each layer by itself while the scheduler waits.

    Parameters
    ----------
    buffer : Tensor, on the CPU, contiguous
        SGLang's `HostKVCache.destroy` unregisters what is registered here.
    page_bytes : int
        What one copy moves at most.
    cudart : module, optional
        `torch.cuda.cudart()` unless given.
    chunk_bytes : int
        About how much is registered in one call, at first; then a quarter of it, and so on.

    Returns
    -------
    RegisteredChunks or None
        None if no size worked: then nothing is registered, and the memory stays pageable.
    """
    from sglang.srt.mem_cache.pool_host.common import _CUDA_HOST_REGISTERED_RANGES_ATTR

    cudart = torch.cuda.cudart() if cudart is None else cudart
    sizes = [chunk_bytes >> shift for shift in _SHRINKING]
    # Sizes that make the same chunks are one attempt.
    attempts = {tuple(page_chunks(buffer.nbytes, page_bytes, size)): size for size in reversed(sizes)}
    for chunks, size in reversed(attempts.items()):
        registered, refusal = _register(cudart, buffer, chunks)
        if refusal is None:
            setattr(buffer, _CUDA_HOST_REGISTERED_RANGES_ATTR, registered)
            return RegisteredChunks(buffer.data_ptr(), chunk_step(page_bytes, size))
        logger.warning("sgl-kvpool: pinning the host tier in %d chunks: %s", len(chunks), refusal)
    metrics.failed("registration", str(refusal))
    return None


def _register(
    cudart: Any, buffer: torch.Tensor, chunks: Sequence[tuple[int, int]]
) -> tuple[list[tuple[int, int]], str | None]:
    """What was registered; nothing, and why, if a chunk was refused."""
    registered: list[tuple[int, int]] = []
    said = time.monotonic()
    for offset, size in chunks:
        address = buffer.data_ptr() + offset
        status = cudart.cudaHostRegister(address, size, 0)
        if int(status) != 0:
            _undo(cudart, registered)
            _forget_error()
            return [], (
                f"cudaHostRegister of {size} bytes, {offset} of {buffer.nbytes} done: error {int(status)}, "
                f"{cudart.cudaGetErrorString(status)}"
            )
        registered.append((address, size))
        if time.monotonic() - said > _PROGRESS_SECONDS:
            said = time.monotonic()
            done, total = (offset + size) / 1e9, buffer.nbytes / 1e9
            logger.info("sgl-kvpool: pinning the host tier, %.0f of %.0f GB", done, total)
    return registered, None


def _forget_error() -> None:
    """Take back what CUDA keeps of a failed call: the next launch of a kernel would report it as its own."""
    if torch.cuda.is_available():
        try:
            torch.zeros(1, device="cuda")
        except RuntimeError as error:  # what was kept, or a GPU that is gone: the next call says it again
            logger.debug("sgl-kvpool: after a failed registration: %s", error)


def _undo(cudart: Any, registered: list[tuple[int, int]]) -> None:
    """Unregister chunks, the last first."""
    left = [size for address, size in reversed(registered) if int(cudart.cudaHostUnregister(address)) != 0]
    if left:
        logger.warning(
            "sgl-kvpool: %d bytes of the host tier stay registered until the server ends", sum(left)
        )
