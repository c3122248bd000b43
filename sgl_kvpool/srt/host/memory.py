"""Memory of a host tier: pinning in chunks so that the log shows progress, and the error for too little."""

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

#: Bytes that are pinned in one call, which takes some seconds.
CHUNK_BYTES = 16 << 30
#: Shifts of the chunk size if CUDA refuses a chunk: 16 GiB, then 4 GiB, 1 GiB and 256 MiB.
_SHRINKING = (0, 2, 4, 6)
#: Seconds between two log lines about the progress of pinning.
_PROGRESS_SECONDS = 10.0


class HostTierTooLarge(Refusal):
    """Error for a host tier that does not fit into memory."""


def require_room(size_bytes: int, tokens: int, by_ratio: bool | None = None) -> None:
    """Raise HostTierTooLarge if SGLang would not allocate `size_bytes`; parameters as for `too_much`.

    For pools of SGLang's beside the rows, whose own errors name no argument.
    """
    from sglang.srt.mem_cache.pool_host import base

    available = base.host_memory_budget_bytes(0)  # 0: reserves nothing
    if size_bytes > available:
        error = ValueError(f"{available / 1e9:.2f} GB are left")
        raise too_much(size_bytes, tokens, by_ratio, error)


def too_much(
    size_bytes: int, count: int, by_ratio: bool | None, error: BaseException, unit: str = "tokens"
) -> HostTierTooLarge:
    """The error for a host tier of `count` tokens or states that does not fit into memory.

    `by_ratio`: whether --hicache-ratio set the size; otherwise --hicache-size did. None: one of them did.
    """
    from sglang.srt.mem_cache.pool_host import base

    if by_ratio:
        remedy = "Give a smaller --hicache-ratio, fewer --max-total-tokens, a narrower --kv-cache-layout"
    else:
        either = "" if by_ratio is False else "--hicache-ratio or "
        remedy = f"Give a smaller {either}--hicache-size (GB)"
    reserve = base.HICACHE_HOST_MEMORY_RESERVE_BYTES
    return HostTierTooLarge(
        f"the host tier needs {size_bytes / 1e9:.2f} GB for {count} {unit} and could not get them "
        f"({type(error).__name__}: {error}); SGLang keeps {reserve / 1e9:.1f} GB of host memory free. "
        f"{remedy}, or leave out --enable-hierarchical-cache"
    )


def chunk_step(page_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Bytes between the beginnings of two chunks of `page_chunks`."""
    step = math.lcm(page_bytes, mmap.PAGESIZE)
    return step * max(1, chunk_bytes // step)


def page_chunks(total_bytes: int, page_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> list[tuple[int, int]]:
    """Offsets and sizes in bytes of the chunks of a buffer, in order, without gaps, of whole pages.

    A copy must not cross two registrations, and a memory page of the system (4096 bytes) must not be in two
    registrations. Therefore all chunks but the last are multiples of both page sizes; `page_bytes` includes
    padding, and `chunk_bytes` is approximate.
    """
    step = chunk_step(page_bytes, chunk_bytes)
    return [(offset, min(step, total_bytes - offset)) for offset in range(0, total_bytes, step)]


def pin(buffer: torch.Tensor, page_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> RegisteredChunks | None:
    """Register a host buffer with CUDA in chunks, and in smaller chunks if CUDA refuses one.

    Drivers sometimes refuse a large chunk although they accept smaller ones (SGLang's pull request 39744).
    Without pinned memory, each layer is moved separately while the scheduler waits. SGLang's
    `HostKVCache.destroy` unregisters the buffer. None if no chunk size worked: then nothing is registered,
    and the memory stays pageable.
    """
    from sglang.srt.mem_cache.pool_host.common import _CUDA_HOST_REGISTERED_RANGES_ATTR

    cudart = torch.cuda.cudart()
    sizes = [chunk_bytes >> shift for shift in _SHRINKING]
    # Try chunk sizes that give the same chunks only once.
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
    """The registered chunks, or an empty list and the reason if a chunk was refused."""
    registered: list[tuple[int, int]] = []
    last_logged = time.monotonic()
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
        if time.monotonic() - last_logged > _PROGRESS_SECONDS:
            last_logged = time.monotonic()
            done, total = (offset + size) / 1e9, buffer.nbytes / 1e9
            logger.info("sgl-kvpool: pinning the host tier, %.0f of %.0f GB", done, total)
    return registered, None


def _forget_error() -> None:
    """Clear the error that CUDA keeps of a failed call, which the next kernel launch would report."""
    if torch.cuda.is_available():
        try:
            torch.zeros(1, device="cuda")
        except RuntimeError as error:  # the kept error; if the GPU is lost, the next call raises again
            logger.debug("sgl-kvpool: after a failed registration: %s", error)


def _undo(cudart: Any, registered: list[tuple[int, int]]) -> None:
    left = [size for address, size in reversed(registered) if int(cudart.cudaHostUnregister(address)) != 0]
    if left:
        logger.warning(
            "sgl-kvpool: %d bytes of the host tier stay registered until the server ends", sum(left)
        )


def warn_of_small_tier(tier: Any, pool_tokens: int) -> None:
    """Log that a host tier has fewer tokens than the device's pool, if prompts are then not backed up.

    `write_back` backs up what leaves the device, so that the two do not hold the same pages.
    """
    from sglang.srt.runtime_context import get_memory

    memory, tokens = get_memory(), pool_tokens * tier.dcp_size
    in_tree = memory.enable_hierarchical_cache and memory.hicache_host_memory_mode == "cache"
    if not in_tree or memory.hicache_write_policy == "write_back" or tier.logical_size >= tokens:
        return
    rounded = tier.logical_size - tier.logical_page_size  # SGLang rounds up
    wanted = memory.hicache_ratio * tokens / max(rounded, 1)
    if memory.hicache_size:
        given = "--hicache-size"
    elif memory.hicache_host_memory_fraction is None:
        given = f"--hicache-ratio of at least {wanted:.2f}"
    else:
        given = (
            f"--hicache-host-memory-fraction (it is {memory.hicache_host_memory_fraction}, and SGLang has "
            f"lowered the ratio to {memory.hicache_ratio:.2f}; {wanted:.2f} is needed)"
        )
    logger.warning(
        "sgl-kvpool: the host tier has %d tokens and the device's pool %d: pages on the device fill the "
        "tier, and further prompts are neither backed up nor stored; give a larger %s, or "
        "--hicache-write-policy write_back",
        tier.logical_size,
        tokens,
        given,
    )
