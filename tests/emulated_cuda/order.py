"""Streams, events, and the order of accesses to memory.

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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

__all__ = [
    *("HOST", "Event", "OrderFault", "Shadow", "Stream", "access", "access_bytes", "carry_out_before"),
    *("current_stream", "default_stream", "not_ordered_before_reuse", "place", "set_stream", "sleep"),
    *("stream_of", "synchronize", "write_later"),
]

HOST = 0
#: Memory above this size has one clock for 16 bytes, the alignment of rows; below, one for each byte.
FINE_BYTES = 1 << 20
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


def _join(clock: Clock, other: Clock) -> None:
    for agent, tick in other.items():
        if tick > clock.get(agent, 0):
            clock[agent] = tick


class _State(threading.local):
    stream: Any = None
    left: Any = None  # streams of the surrounding blocks, the innermost first


_state = _State()
_host: Clock = {}
#: (agent, tick, place) of each operation; a shadow holds indices of this list, 0: none.
_epochs: list[tuple[int, int, str]] = [(HOST, 0, "")]
_later: list[tuple[int, int, Callable[[], None]]] = []
_sleeps: list[tuple[int, int]] = []
_streams: dict[int, Stream] = {}
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
        _streams[self.cuda_stream] = self

    def __repr__(self) -> str:
        return "the default stream" if self.agent == 1 else f"stream {self.agent}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.agent == self.agent

    def __hash__(self) -> int:
        return self.agent

    def issue(self, what: str) -> int:
        """A new operation; its index in the list of epochs."""
        _join(self.clock, _host)
        tick = self.clock[self.agent] = self.clock.get(self.agent, 0) + 1
        _epochs.append((self.agent, tick, what))
        return len(_epochs) - 1

    def wait_stream(self, other: Stream) -> None:
        if capture is not None:
            capture.wait_stream(self, other)
        _join(self.clock, other.clock)

    def wait_event(self, event: Event) -> None:
        if capture is not None:
            capture.wait_event(self, event)
        _join(self.clock, event.clock)

    def join(self, clock: Clock) -> None:
        """Later operations follow those of a clock."""
        _join(self.clock, clock)

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
    return _streams[handle]


def set_stream(stream: Stream | None) -> None:
    _state.stream = stream


def synchronize(device: Any = None) -> None:
    for stream in list(_streams.values()):
        _host_waits_for(stream.clock)


def sleep(cycles: int) -> None:
    """As `torch.cuda._sleep`: what is behind it has not ended until the host waits for it."""
    stream = current_stream()
    stream.issue(f"sleep at {place()}")
    _sleeps.append((stream.agent, stream.clock[stream.agent]))


def _has_ended(clock: Clock) -> bool:
    """Whether all operations of a clock have ended; if so, the host knows it, as if it had waited."""
    _sleeps[:] = [(agent, tick) for agent, tick in _sleeps if _host.get(agent, 0) < tick]
    if any(clock.get(agent, 0) >= tick for agent, tick in _sleeps):
        return False
    _host_waits_for(clock)
    return True


def _host_waits_for(clock: Clock) -> None:
    from emulated_cuda.graphs import forbid_in_capture

    forbid_in_capture("a wait of the host")
    _join(_host, clock)
    carry_out_before(_host)


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


class Shadow:
    """The last write, and for each agent the last read, of each granule of a block."""

    def __init__(self, size_bytes: int) -> None:
        self.granule_bytes = 1 if size_bytes <= FINE_BYTES else 16
        self.size = -(-size_bytes // self.granule_bytes)
        #: Epochs of the last write and of the last read of any byte, as long as there is one stream.
        self.last_write = self.last_read = 0
        self.agent: int | None = None
        self.written: np.ndarray | None = None
        self.read: dict[int, np.ndarray] = {}

    def split(self) -> None:
        """Go over from one epoch for the whole block to one for each granule."""
        self.written = np.full(self.size, self.last_write, dtype=np.int32)
        if self.last_read and self.agent is not None:
            self.readers(self.agent).fill(self.last_read)

    def readers(self, agent: int) -> np.ndarray:
        if agent not in self.read:
            self.read[agent] = np.zeros(self.size, dtype=np.int32)
        return self.read[agent]


def _granules(
    shadow: Shadow, tensor: torch.Tensor, rows: np.ndarray | None
) -> Callable[[np.ndarray], np.ndarray]:
    """A function that gives the part of a shadow's array that belongs to a tensor, or to some of its rows."""
    size, item = shadow.granule_bytes, tensor.element_size()
    start, run = tensor.storage_offset() * item, item
    dims = [(n, stride * item) for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    if rows is not None:
        first, dims = dims[0], dims[1:]
    outer = []
    for n, stride in sorted((d for d in dims if d[0] > 1 and d[1] > 0), key=lambda d: d[1]):
        if stride == run:
            run *= n
        else:
            outer.append((n, stride))
    if rows is not None:
        starts = start + rows.astype(np.int64) * first[1]
        for n, stride in outer:
            starts = (starts[:, None] + np.arange(n) * stride).reshape(-1)
        within = np.arange(-(-run // size) + (1 if size > 1 and (starts % size).any() else 0))
        index = (starts[:, None] // size + within).reshape(-1)
        index = index[index < shadow.size]
        return lambda array: array[index]
    if start % size == 0 and run % size == 0 and all(stride % size == 0 for _, stride in outer):
        shape = (*(n for n, _ in outer), run // size)
        strides = (*(4 * stride // size for _, stride in outer), 4)

        def view(array: np.ndarray) -> np.ndarray:
            return np.lib.stride_tricks.as_strided(array[start // size :], shape, strides)

        return view
    end = start + run + sum((n - 1) * stride for n, stride in outer)
    part = slice(start // size, -(-end // size))
    return lambda array: array[part]


def access(
    shadow: Shadow, tensor: torch.Tensor, stream: Stream | None, epoch: int, *, write: bool, rows: Any = None
) -> None:
    """An operation reads or writes a tensor of a block, or some of its rows.

    Raises
    ------
    OrderFault
    """
    if tensor.numel():
        _access(shadow, lambda: _granules(shadow, tensor, rows), stream, epoch, write)


def access_bytes(
    shadow: Shadow,
    start: int,
    size_bytes: int,
    stream: Stream | None,
    epoch: int,
    *,
    write: bool,
    early: bool = False,
) -> None:
    """A kernel or a copy reads or writes bytes of a block; as `access`.

    Parameters
    ----------
    early : bool
        The access may come before earlier operations of the stream: it is ordered after the host only.
    """
    part = slice(start // shadow.granule_bytes, -(-(start + size_bytes) // shadow.granule_bytes))
    _access(shadow, lambda: lambda array: array[part], stream, epoch, write, early)


def _access(
    shadow: Shadow,
    find: Callable[[], Callable[[np.ndarray], np.ndarray]],
    stream: Stream | None,
    epoch: int,
    write: bool,
    early: bool = False,
) -> None:
    agent = HOST if stream is None else stream.agent
    clock = _host if stream is None or early else stream.clock
    if shadow.written is None:
        if len(_streams) == 1 and shadow.agent in (None, agent) and not early:
            shadow.agent = agent
            if write:
                shadow.last_write = epoch
            else:
                shadow.last_read = epoch
            return
        shadow.split()
    part = find()
    who = "the host" if stream is None else repr(stream)
    _check(part(shadow.written), clock, f"{'writes' if write else 'reads'} on {who} what", "wrote")
    if write:
        for reader, epochs in shadow.read.items():
            if reader != agent:
                _check(part(epochs), clock, f"writes on {who} what", "read")
    _set(shadow.written if write else shadow.readers(agent), part, epoch)


def _set(array: np.ndarray, part: Callable[[np.ndarray], np.ndarray], epoch: int) -> None:
    found = part(array)
    if np.shares_memory(found, array):
        found[...] = epoch
    else:
        index = part(np.arange(len(array)))
        array[index] = epoch


def _check(epochs: np.ndarray, clock: Clock, doing: str, did: str) -> None:
    if not epochs.size:
        return
    lowest, highest = int(epochs.min()), int(epochs.max())
    for epoch in (lowest,) if lowest == highest else _different(epochs):
        agent, tick, where = _epochs[epoch]
        if epoch and clock.get(agent, 0) < tick:
            other = (
                "the host" if agent == HOST else repr(next(s for s in _streams.values() if s.agent == agent))
            )
            raise OrderFault(f"{place()} {doing} {where} {did} on {other}; nothing orders the two on a GPU")


def _different(epochs: np.ndarray) -> list[int]:
    # np.unique imports a module, which the end of a block, at any moment, must not do.
    return np.flatnonzero(np.bincount(epochs.reshape(-1))).tolist()


def not_ordered_before_reuse(
    shadow: Shadow, owner: Stream | None, recorded: Iterable[Stream] = ()
) -> str | None:
    """A stream whose last access the next one of the owner (None: the host) would not wait for."""
    clock = {} if owner is None else dict(owner.clock)
    for ordered in (_host, *(stream.clock for stream in recorded)):  # torch waits for recorded streams
        _join(clock, ordered)
    safe = {HOST if owner is None else owner.agent, HOST, *(stream.agent for stream in recorded)}
    arrays = [shadow.written, *shadow.read.values()] if shadow.written is not None else []
    epochs = (
        {epoch for array in arrays for epoch in _different(array)}
        if arrays
        else {shadow.last_write, shadow.last_read}
    )
    for epoch in epochs:
        agent, tick, where = _epochs[epoch]
        if epoch and agent not in safe and clock.get(agent, 0) < tick:
            return where
    return None
