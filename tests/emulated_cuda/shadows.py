"""The accesses that each block of memory remembers, and whether an order is known for the next one."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from emulated_cuda.order import EPOCHS, HOST, HOST_CLOCK, STREAMS, OrderFault, Stream, join, place

#: Memory above this size has one clock for 16 bytes, the alignment of rows; below, one for each byte.
FINE_BYTES = 1 << 20


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


Part = Callable[[np.ndarray], np.ndarray]  # of a shadow's array


def _granules(shadow: Shadow, tensor: torch.Tensor, rows: np.ndarray | None) -> Part:
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
    """An operation reads or writes a tensor of a block, or some of its rows; may raise `OrderFault`."""
    if tensor.numel():
        _access(shadow, lambda: _granules(shadow, tensor, rows), stream, epoch, write, early=False)


def access_bytes(
    shadow: Shadow, start: int, size_bytes: int, stream: Stream | None, epoch: int, *,
    write: bool, early: bool = False,
) -> None:  # fmt: skip
    """A kernel or a copy reads or writes bytes of a block; as `access`.

    An `early` one may come before earlier operations of the stream: it is ordered after the host only.
    """
    part = slice(start // shadow.granule_bytes, -(-(start + size_bytes) // shadow.granule_bytes))
    _access(shadow, lambda: lambda array: array[part], stream, epoch, write, early)


def _access(
    shadow: Shadow, find: Callable[[], Part], stream: Stream | None, epoch: int, write: bool, early: bool
) -> None:
    agent = HOST if stream is None else stream.agent
    clock = HOST_CLOCK if stream is None or early else stream.clock
    if shadow.written is None:
        if len(STREAMS) == 1 and shadow.agent in (None, agent) and not early:
            shadow.agent = agent
            setattr(shadow, "last_write" if write else "last_read", epoch)
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


def _set(array: np.ndarray, part: Part, epoch: int) -> None:
    found = part(array)
    if np.shares_memory(found, array):
        found[...] = epoch
    else:
        index = part(np.arange(len(array)))
        array[index] = epoch


def _check(epochs: np.ndarray, clock: dict[int, int], doing: str, did: str) -> None:
    if not epochs.size:
        return
    lowest, highest = int(epochs.min()), int(epochs.max())
    for epoch in (lowest,) if lowest == highest else _different(epochs):
        agent, tick, where = EPOCHS[epoch]
        if epoch and clock.get(agent, 0) < tick:
            other = next((repr(s) for s in STREAMS.values() if s.agent == agent), "the host")
            raise OrderFault(f"{place()} {doing} {where} {did} on {other}; nothing orders the two on a GPU")


def _different(epochs: np.ndarray) -> list[int]:
    # Most are the first. np.unique imports a module, which the end of a block, at any moment, must not do.
    epochs = epochs.reshape(-1)
    others = epochs[epochs != epochs[:1]]
    return sorted({*epochs[:1].tolist(), *np.flatnonzero(np.bincount(others)).tolist()})


def not_ordered_before_reuse(
    shadow: Shadow, owner: Stream | None, recorded: Iterable[Stream] = ()
) -> str | None:
    """A stream whose last access the next one of the owner (None: the host) would not wait for."""
    clock = {} if owner is None else dict(owner.clock)
    for ordered in (HOST_CLOCK, *(stream.clock for stream in recorded)):  # torch waits for recorded streams
        join(clock, ordered)
    safe = {HOST if owner is None else owner.agent, HOST, *(stream.agent for stream in recorded)}
    arrays = [shadow.written, *shadow.read.values()] if shadow.written is not None else []
    epochs = {epoch for array in arrays for epoch in _different(array)}
    for epoch in epochs if arrays else {shadow.last_write, shadow.last_read}:
        agent, tick, where = EPOCHS[epoch]
        if epoch and agent not in safe and clock.get(agent, 0) < tick:
            return where
    return None
