"""Memory of the device, and pinned memory: blocks that are poisoned, and known after they are freed."""

import bisect
import ctypes
import weakref
from collections import Counter, deque
from typing import Any

import numpy as np
import torch

from emulated_cuda import order, shadows

#: Fills new memory and freed memory. Read as bfloat16 it is -3.7e28, as int32 -286331154.
POISON = 0xEE
#: Alignment of blocks, as in torch's allocator.
ALIGN_BYTES = 512
#: Freed blocks keep their poison until this many bytes were freed after them.
QUARANTINE_BYTES = 1 << 28


class MemoryFault(BaseException):
    """Memory was used after it was freed, or freed while a stream could still use it; as `OrderFault`."""


class Block:
    """A piece of memory of the device, or `pinned` memory of the host.

    `stream` was current when it was allocated, `pool` is the private pool of a CUDA graph, or None, `created`
    and `freed` are lines of code. Before the block is given to others, the allocator waits for the streams of
    `recorded`: those of `record_stream`, and for pinned memory those of torch's own copies.
    """

    def __init__(self, size_bytes: int, *, pinned: bool, pool: Any, address: int | None = None) -> None:
        if address is None:
            self._whole = np.empty(size_bytes + ALIGN_BYTES, dtype=np.uint8)
            start = -self._whole.ctypes.data % ALIGN_BYTES
            self.bytes = self._whole[start : start + size_bytes]
            self.bytes.fill(POISON)
        else:  # memory of the host that was registered
            self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
        self.address, self.size_bytes = self.bytes.ctypes.data, size_bytes
        self.pinned, self.pool = pinned, pool
        self.stream = order.current_stream()
        self.created: str = order.place()
        self.freed: str | None = None
        self.recorded: set[Any] = set()
        self.shadow = shadows.Shadow(size_bytes)


def extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last one."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((n - 1) * stride for n, stride in strides) + 1) * tensor.element_size()


class Allocator:
    """All blocks, and statistics as `torch.cuda.memory_stats` names them.

    `problems` are faults found where an exception would be lost: while a block was freed, in calls of
    compiled code. `registered` is memory of the host that was registered, by address; it is pinned.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.registered: dict[int, Block] = {}
        self.total_bytes = 80 << 30
        self._addresses: list[int] = []
        self.problems: list[str] = []
        self.pool: Any = None
        #: Of graphs' pools: live graphs, and freed blocks, which keep what was written while one lives.
        self._graphs: Counter[Any] = Counter()
        self._kept: dict[Any, list[Block]] = {}
        self._freed: deque[Block] = deque()
        self._freed_bytes = 0
        self.allocated_bytes = self.peak_bytes = self.allocations = 0

    def allocate(self, size_bytes: int, *, pinned: bool = False) -> torch.Tensor:
        """A new block, `[size_bytes]` uint8; it is freed with the last tensor that shares its storage."""
        if not pinned and self.allocated_bytes + size_bytes > self.total_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size_bytes} bytes.")
        block = Block(size_bytes, pinned=pinned, pool=None if pinned else self.pool)
        self.blocks[block.address] = block
        bisect.insort(self._addresses, block.address)
        # torch keeps a reference to this array, and not to the block, as long as the storage lives.
        array = block.bytes[:]
        weakref.finalize(array, self._free, block).atexit = False
        if not pinned:
            self.allocations += 1
            self.allocated_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return torch.from_numpy(array)

    def _free(self, block: Block) -> None:
        if not block.pinned:
            self.allocated_bytes -= block.size_bytes
        if block.pool is not None:
            if self._graphs[block.pool]:
                self._kept.setdefault(block.pool, []).append(block)
            else:
                self._quarantine(block)
            return
        owner = None if block.pinned else block.stream  # pinned memory is reused by the host
        late = shadows.not_ordered_before_reuse(block.shadow, owner, block.recorded)
        if late is not None:
            why = "its stream was not recorded (record_stream)"
            if block.pinned:
                why = "torch's allocator knows of torch's own copies alone"
            self.problems.append(
                f"the block allocated at {block.created} was freed at {order.place()}, and {late} may still "
                f"use it: {why}"
            )
        self._quarantine(block)

    def _quarantine(self, block: Block) -> None:
        block.freed = order.place()
        block.bytes.fill(POISON)
        block.shadow = shadows.Shadow(block.size_bytes)  # the old one may have 8 bytes for each of the block
        self._freed.append(block)
        self._freed_bytes += block.size_bytes
        while self._freed_bytes > QUARANTINE_BYTES:
            old = self._freed.popleft()
            self._freed_bytes -= old.size_bytes
            if self.blocks.pop(old.address, None) is not None:
                self._addresses.remove(old.address)

    def of(self, tensor: torch.Tensor) -> Block | None:
        """Block of a CPU tensor's storage."""
        return self.blocks.get(tensor.untyped_storage().data_ptr())

    def at(self, address: int, size_bytes: int) -> tuple[Block, int] | None:
        """The block that contains a range of bytes, and the range's offset in it; None if no block does."""
        for block in self.registered.values():
            if block.address <= address and address + size_bytes <= block.address + block.size_bytes:
                return block, address - block.address
        place = bisect.bisect_right(self._addresses, address) - 1
        block = self.blocks[self._addresses[place]] if place >= 0 else None
        if block is None or address + size_bytes > block.address + block.size_bytes:
            return None
        return block, address - block.address

    def of_host(self, tensor: torch.Tensor) -> list[tuple[Block, int, int]]:
        """Registered blocks that a tensor of the host lies in, with first byte and number of bytes."""
        if not self.registered or not tensor.numel():
            return []
        begin = tensor.data_ptr()
        end = begin + extent_bytes(tensor)
        parts = []
        for block in self.registered.values():
            low, high = max(begin, block.address), min(end, block.address + block.size_bytes)
            if low < high:
                parts.append((block, low - block.address, high - low))
        return parts

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        block = self.of(tensor)
        return block.pinned if block is not None else bool(self.of_host(tensor))

    def live(self) -> list[tuple[int, int]]:
        """Address and bytes of all memory that a kernel may access."""
        return [
            (block.address, block.size_bytes)
            for block in [*self.blocks.values(), *self.registered.values()]
            if block.freed is None
        ]

    def use_pool(self, graph: Any, pool: Any) -> None:
        """A graph was captured into a pool, whose memory goes after the last of its graphs."""
        self._graphs[pool] += 1
        weakref.finalize(graph, self._leave_pool, pool).atexit = False

    def _leave_pool(self, pool: Any) -> None:
        self._graphs[pool] -= 1
        if not self._graphs[pool]:
            for block in self._kept.pop(pool, ()):
                self._quarantine(block)

    @property
    def held_bytes(self) -> int:
        """What is allocated, and what graphs keep."""
        return self.allocated_bytes + sum(block.size_bytes for kept in self._kept.values() for block in kept)

    def release_pool(self, pool: Any) -> None:
        """A graph was reset: its memory may be given to others, and must not be used any more."""
        for block in self.blocks.values():
            if block.pool is pool:
                block.freed = order.place()
                block.bytes.fill(POISON)

    def stats(self) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.allocated_bytes,
            "allocated_bytes.all.peak": self.peak_bytes,
            "allocation.all.allocated": self.allocations,
            "reserved_bytes.all.current": self.allocated_bytes,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def reset_peak(self) -> None:
        self.peak_bytes = self.allocated_bytes

    def taken_problems(self) -> str:
        """The problems so far, once everything has ended, which then no longer fail a test."""
        torch.cuda.synchronize()
        found, self.problems[:] = "\n".join(self.problems), []
        return found


ALLOCATOR = Allocator()
