"""Streams, events, and the order of accesses to memory, which `shadows` keeps.

Operations run at once, in the order in which the host issues them. What a GPU would not order is found by
clocks: an operation on a stream is ordered after what the stream did before, what the host had waited for,
and what events and waits order before it. An access that is not ordered after the last write of the same
bytes (a write: also after their last reads) is an `OrderFault` that names both places. Only writes of the
device to pinned memory are carried out later, when the host waits for them. An event or a stream has ended
when the host asks, unless it is behind a `sleep`.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

HOST = 0
#: Folders whose lines are not named: of ptxrun, and of packages that call operators and kernels.
_DEVICE = str(Path(__file__).parent)
_SKIPPED = (
    str(Path(__file__).parent.parent / "ptxrun"),
    str(Path(torch.__file__).parent),
    str(Path(triton.__file__).parent),
    weakref.__file__,  # which calls the allocator when a tensor goes
)


class OrderFault(BaseException):
    """Two accesses to the same bytes, one of them a write, have no order on a GPU.

    A GPU raises nothing, so `except Exception` of a fallback must not catch it.
    """


def place() -> str:
    """The innermost line of code that is not of torch, Triton or the device."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        folder, _, file = name.rpartition("/")
        if not (name.startswith(_SKIPPED) or (folder == _DEVICE and not file.startswith("test_"))):
            return f"{folder.rpartition('/')[2]}/{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "the interpreter"


Clock = dict[int, int]  # agent -> how many of its operations are ordered before


def join(clock: Clock, other: Clock) -> None:
    for agent, tick in other.items():
        if tick > clock.get(agent, 0):
            clock[agent] = tick


class _State(threading.local):
    stream: Any = None
    left: Any = None  # streams of the surrounding blocks, the innermost first


_state = _State()
HOST_CLOCK: Clock = {}
#: (agent, tick, place) of each operation; a shadow holds indices of this list, 0: none.
EPOCHS: list[tuple[int, int, str]] = [(HOST, 0, "")]
_later: list[tuple[int, int, Callable[[], None]]] = []
_sleeps: list[tuple[int, int]] = []
STREAMS: dict[int, Stream] = {}
#: The capture that is under way, `graphs.Capture`: it notes what orders its streams.
capture: Any = None


class Stream:
    """As `torch.cuda.Stream`; all of a process are on device 0."""

    _last = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        Stream._last += 1
        self.agent = Stream._last
        self.device, self.device_index, self.device_type = torch.device("cuda", 0), 0, 1
        self.stream_id = self.agent
        self.priority = priority
        #: The default stream's handle is 0, as CUDA's.
        self.cuda_stream = self.agent - 1
        self.clock: Clock = {}
        STREAMS[self.cuda_stream] = self

    def __repr__(self) -> str:
        return "the default stream" if self.agent == 1 else f"stream {self.agent}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.agent == self.agent

    def __hash__(self) -> int:
        return self.agent

    def issue(self, what: str) -> int:
        """A new operation; its index in the list of epochs."""
        join(self.clock, HOST_CLOCK)
        tick = self.clock[self.agent] = self.clock.get(self.agent, 0) + 1
        EPOCHS.append((self.agent, tick, sys.intern(what)))
        return len(EPOCHS) - 1

    def wait_stream(self, other: Stream) -> None:
        if capture is not None:
            capture.wait_stream(self, other)
        join(self.clock, other.clock)

    def wait_event(self, event: Event) -> None:
        if capture is not None:
            capture.wait_event(self, event)
        join(self.clock, event.clock)

    def join(self, clock: Clock) -> None:
        """Later operations follow those of a clock."""
        join(self.clock, clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _host_waits_for(self.clock)

    def query(self) -> bool:
        return _has_ended(self.clock)

    def __enter__(self) -> Stream:
        _state.left = (_state.stream, _state.left)
        _state.stream = self
        return self

    def __exit__(self, *args: object) -> None:
        _state.stream, _state.left = _state.left


class Event:
    """As `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, **kwargs: Any) -> None:
        self.enable_timing = enable_timing
        self.clock: Clock = {}
        self.recorded = False
        #: The capture in which it was recorded last, and its number there.
        self.captured: tuple[Any, int] | None = None
        self.cuda_event = id(self)

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        stream.issue(place())
        self.captured = None
        if capture is not None:
            capture.record_event(self, stream)
        self.clock, self.recorded = dict(stream.clock), True

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        _host_waits_for(self.clock)

    def query(self) -> bool:
        return _has_ended(self.clock)

    def elapsed_time(self, end: Event) -> float:
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return 1.0


_default = Stream()


def default_stream(device: Any = None) -> Stream:
    return _default


def current_stream(device: Any = None) -> Stream:
    return _state.stream or _default


def stream_of(handle: int) -> Stream:
    """Stream of a CUDA handle."""
    return STREAMS[handle]


def set_stream(stream: Stream | None) -> None:
    _state.stream = stream


def synchronize(device: Any = None) -> None:
    for stream in list(STREAMS.values()):
        _host_waits_for(stream.clock)


def sleep(cycles: int) -> None:
    """As `torch.cuda._sleep`: what is behind it has not ended until the host waits for it."""
    stream = current_stream()
    stream.issue(f"sleep at {place()}")
    _sleeps.append((stream.agent, stream.clock[stream.agent]))


def _has_ended(clock: Clock) -> bool:
    """Whether all operations of a clock have ended; if so, the host knows it, as if it had waited."""
    _sleeps[:] = [(agent, tick) for agent, tick in _sleeps if HOST_CLOCK.get(agent, 0) < tick]
    if any(clock.get(agent, 0) >= tick for agent, tick in _sleeps):
        return False
    _host_waits_for(clock)
    return True


def _host_waits_for(clock: Clock) -> None:
    from emulated_cuda.graphs import forbid_in_capture

    forbid_in_capture("a wait of the host")
    join(HOST_CLOCK, clock)
    carry_out_before(HOST_CLOCK)


def carry_out_before(clock: Clock) -> None:
    """Carry out the writes to pinned memory that are ordered before a clock."""
    if _later:
        ready = [entry for entry in _later if clock.get(entry[0], 0) >= entry[1]]
        _later[:] = [entry for entry in _later if clock.get(entry[0], 0) < entry[1]]
        for *_, write in ready:
            write()


def write_later(stream: Stream, write: Callable[[], None]) -> None:
    """Carry out a write to pinned memory when the host has waited for what the stream has done so far."""
    _later.append((stream.agent, stream.clock.get(stream.agent, 0), write))
