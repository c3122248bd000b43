"""CUDA graphs: what is captured, what is forbidden meanwhile, and the replay.

Operations run while they are captured, since torch needs their shapes; afterwards memory is as it was
before, and the memory of the graph's pool is poisoned, because a capture executes nothing on a GPU. A replay
repeats operations and launches at the addresses of the capture, without keeping their tensors alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from emulated_cuda import order
from emulated_cuda.memory import ALLOCATOR, POISON, Block

__all__ = ["CUDAGraph", "CaptureFault", "capturing", "check_stream", "forbid_in_capture", "record", "unowned"]


class CaptureFault(RuntimeError):
    """An operation that CUDA does not permit while a stream is capturing."""


class Capture:
    """A capture that is under way."""

    def __init__(self, pool: Any, stream: order.Stream) -> None:
        self.pool, self.streams = pool, {stream}
        self.steps: list[tuple[str, Callable[[], None]]] = []
        self._before: dict[Block, np.ndarray] = {}

    def keep(self, block: Block) -> None:
        """An operation is about to write to this block."""
        if block not in self._before and block.pool is not self.pool:
            self._before[block] = block.bytes.copy()

    def undo(self) -> None:
        for block, values in self._before.items():
            block.bytes[:] = values
        for block in ALLOCATOR.blocks.values():
            if block.pool is self.pool:
                block.bytes.fill(POISON)


_capture: Capture | None = None


def capturing() -> Capture | None:
    return _capture


def forbid_in_capture(what: str) -> None:
    """
    Raises
    ------
    CaptureFault
        A stream is capturing.
    """
    if _capture is not None:
        raise CaptureFault(f"{what} at {order.place()}: operation not permitted when stream is capturing")


def check_stream() -> None:
    """While a stream is capturing, operations are issued on it or on streams that wait for it."""
    if _capture is None:
        return
    stream = order.current_stream()
    if stream not in _capture.streams:
        raise CaptureFault(f"{order.place()} uses {stream}, which does not belong to the capture")


def record(name: str, step: Callable[[], None]) -> None:
    """Add a step to the capture that is under way, if there is one."""
    if _capture is not None:
        _capture.steps.append((name, step))


def unowned(value: Any) -> Any:
    """A tensor of a block at the same address, which does not keep the block from being freed."""
    if not isinstance(value, torch.Tensor) or (block := ALLOCATOR.of(value)) is None:
        return value
    whole = block.bytes[: block.size_bytes // value.element_size() * value.element_size()]
    flat = torch.from_numpy(whole).view(value.dtype)
    return flat.as_strided(value.size(), value.stride(), value.storage_offset())


class CUDAGraph:
    """As `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.steps: list[tuple[str, Callable[[], None]]] | None = None
        self._pool: Any = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **options: Any) -> None:
        global _capture
        forbid_in_capture("a second capture")
        if order.current_stream() == order.default_stream():
            raise CaptureFault("CUDA graphs must be captured on a non-default stream.")
        self._pool = pool if pool is not None else graph_pool_handle()
        _capture = Capture(self._pool, order.current_stream())
        ALLOCATOR.pool = self._pool

    def capture_end(self) -> None:
        global _capture
        capture, _capture, ALLOCATOR.pool = _capture, None, None
        assert capture is not None
        capture.undo()
        self.steps = capture.steps

    def replay(self) -> None:
        if self.steps is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        for _, step in self.steps:
            step()

    def pool(self) -> Any:
        return self._pool

    def reset(self) -> None:
        if self.steps is not None:
            ALLOCATOR.release_pool(self._pool)
        self.steps = None

    def instantiate(self) -> None:
        pass

    def enable_debug_mode(self) -> None:
        pass


_pools = 0


def graph_pool_handle() -> tuple[int, int]:
    global _pools
    _pools += 1
    return (0, _pools)
