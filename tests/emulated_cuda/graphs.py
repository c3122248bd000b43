"""CUDA graphs: what is captured, what is forbidden meanwhile, and the replay.

Operations run while they are captured, since torch needs their shapes; afterwards memory is as it was
before, and the memory of the graph's pool is poisoned, because a capture executes nothing on a GPU. A replay
repeats operations and launches at the addresses of the capture, without keeping their tensors alive, each on
the stream of the replay or on a branch of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from emulated_cuda import order
from emulated_cuda.memory import ALLOCATOR, POISON, Block


class CaptureFault(RuntimeError):
    """An operation that CUDA does not permit while a stream is capturing."""


@dataclass(frozen=True)
class Step:
    """An operation, a launch, a wait or an event of a graph, and the stream on which it was captured."""

    name: str
    stream: order.Stream
    run: Callable[[], None] | Callable[[Replay], None]
    #: Whether it orders streams, and so is called with the replay.
    orders: bool = False


class Replay:
    """Streams and events of a replay, in place of those of the capture."""

    def __init__(self, origin: order.Stream, branches: dict[order.Stream, order.Stream]) -> None:
        self._origin, self._here, self._branches = origin, order.current_stream(), branches
        #: Number of an event of the capture -> its clock.
        self.events: dict[int, order.Clock] = {}

    def stream(self, captured: order.Stream) -> order.Stream:
        if captured == self._origin:
            return self._here
        return self._branches.setdefault(captured, order.Stream())


class Capture:
    """A capture that is under way."""

    def __init__(self, pool: Any, stream: order.Stream) -> None:
        #: The capturing stream, and those that wait for a stream of the capture: its branches.
        self.pool, self.origin, self.streams = pool, stream, {stream}
        self.steps: list[Step] = []
        self._before: dict[Block, np.ndarray] = {}
        self._events = 0

    def wait_stream(self, stream: order.Stream, other: order.Stream) -> None:
        """A stream waits for another one, and becomes a branch if that is one."""
        if self._joins(stream, other in self.streams):
            step = lambda replay: replay.stream(stream).wait_stream(replay.stream(other))  # noqa: E731
            self.steps.append(Step("wait_stream", stream, step, orders=True))

    def record_event(self, event: order.Event, stream: order.Stream) -> None:
        if stream not in self.streams:
            return
        self._events += 1
        number = self._events
        event.captured = self, number

        def step(replay: Replay) -> None:
            replay.events[number] = dict(replay.stream(stream).clock)

        self.steps.append(Step("record_event", stream, step, orders=True))

    def wait_event(self, stream: order.Stream, event: order.Event) -> None:
        capture, number = event.captured or (None, 0)
        if self._joins(stream, capture is self, is_needed=event.recorded):
            step = lambda replay: replay.stream(stream).join(replay.events[number])  # noqa: E731
            self.steps.append(Step("wait_event", stream, step, orders=True))

    def _joins(self, stream: order.Stream, is_captured: bool, is_needed: bool = True) -> bool:
        """Whether a stream waits for what is captured, which makes it a branch."""
        if is_captured:
            self.streams.add(stream)
        elif stream in self.streams and is_needed:  # `cudaErrorStreamCaptureIsolation`
            raise CaptureFault(f"{order.place()}: {stream} of a capture waits for work that is not captured")
        return is_captured

    def unjoined(self) -> list[order.Stream]:
        """Branches with work for which the capturing stream does not wait."""
        joined = self.origin.clock
        return [s for s in self.streams if s.clock.get(s.agent, 0) > joined.get(s.agent, 0)]

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


def capturing() -> Capture | None:
    return order.capture


def forbid_in_capture(what: str) -> None:
    if capturing() is not None:
        raise CaptureFault(f"{what} at {order.place()}: operation not permitted when stream is capturing")


def check_stream() -> None:
    """While a stream is capturing, operations are issued on it or on streams that wait for it."""
    stream, capture = order.current_stream(), capturing()
    if capture is not None and stream not in capture.streams:
        raise CaptureFault(f"{order.place()} uses {stream}, which does not belong to the capture")


def record(name: str, step: Callable[[], None]) -> None:
    """Add a step to the capture that is under way, if there is one."""
    capture = capturing()
    if capture is not None:
        capture.steps.append(Step(name, order.current_stream(), step))


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
        self.steps: list[Step] | None = None
        self._pool: Any = None
        self._origin: order.Stream | None = None
        #: Branch of the capture -> the stream that replays it.
        self._branches: dict[order.Stream, order.Stream] = {}

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **options: Any) -> None:
        forbid_in_capture("a second capture")
        if order.current_stream() == order.default_stream():
            raise CaptureFault("CUDA graphs must be captured on a non-default stream.")
        self._pool = pool if pool is not None else graph_pool_handle()
        ALLOCATOR.use_pool(self, self._pool)
        self._origin = order.current_stream()
        order.capture = Capture(self._pool, self._origin)
        ALLOCATOR.pool = self._pool

    def capture_end(self) -> None:
        capture, order.capture, ALLOCATOR.pool = order.capture, None, None
        assert capture is not None
        capture.undo()
        if unjoined := capture.unjoined():
            raise CaptureFault(f"the capture ends, and does not wait for the work of {unjoined}")
        self.steps = capture.steps

    def replay(self) -> None:
        if self.steps is None or self._origin is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        replay = Replay(self._origin, self._branches)
        for step in self.steps:
            with replay.stream(step.stream):
                step.run(replay) if step.orders else step.run()  # type: ignore[call-arg]

    def pool(self) -> Any:
        return self._pool

    def reset(self) -> None:
        if self.steps is not None:
            ALLOCATOR.release_pool(self._pool)
        self.steps = None

    def instantiate(self) -> None:
        pass


_pools = itertools.count(1)


def graph_pool_handle() -> tuple[int, int]:
    return (0, next(_pools))
