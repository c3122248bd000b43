"""What operators and kernels read and write of tensors: checked, noted, and compared with their schemas."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from emulated_cuda import graphs, libraries, order, shadows
from emulated_cuda.memory import ALLOCATOR, MemoryFault, extent_bytes
from emulated_cuda.tensors import unwrap

#: Operators that read or write what an index names of their first argument -> indices, by dimension.
_INDICES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("index", "index_put_", "_index_put_impl_", "index_put"), lambda args: args[1]),
    **dict.fromkeys(
        ("index_select", "index_copy_", "index_add_", "index_fill_"),
        lambda args: [None] * (args[1] % args[0].dim()) + [args[2]],
    ),
}


def touch(
    tensor: torch.Tensor, stream: Any, epoch: int, *, write: bool, rows: Any = None, checked: bool = True
) -> None:
    """Check and note an access to a CPU tensor of a block; other tensors have no clocks."""
    block = ALLOCATOR.of(tensor)
    if block is None:
        _touch_registered(tensor, stream, epoch, write=write)
        return
    if block.pinned and stream is not None:
        order.carry_out_before(stream.clock)
    if block.freed is not None:
        raise MemoryFault(f"{order.place()} uses memory of {block.created} that was freed at {block.freed}")
    if graphs.capturing() is not None:  # nothing is accessed before the replay
        if write:
            graphs.capturing().keep(block)
        return
    if checked:
        shadows.access(block.shadow, tensor, stream, epoch, write=write, rows=rows)


def _touch_registered(tensor: torch.Tensor, stream: Any, epoch: int, *, write: bool) -> None:
    parts = ALLOCATOR.of_host(tensor)
    if parts and stream is not None:
        order.carry_out_before(stream.clock)
    for block, start, size in parts:
        if size == extent_bytes(tensor) and not block.address % tensor.element_size():
            whole = block.bytes[: block.size_bytes // tensor.element_size() * tensor.element_size()]
            at = start // tensor.element_size()
            inside = torch.from_numpy(whole).view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), at)
            shadows.access(block.shadow, inside, stream, epoch, write=write)
        else:
            shadows.access_bytes(block.shadow, start, size, stream, epoch, write=write)


def indexed(name: str, args: Any) -> tuple[torch.Tensor, Any]:
    """An operator's first argument, and row numbers, numpy, if it touches only these.

    Rows are along the indexed dimension, which comes first: slots of states are behind layers.
    """
    find = _INDICES.get(name)
    given = [(dim, i) for dim, i in enumerate(find(args)) if i is not None] if find else []
    if len(given) != 1:
        return args[0], None
    dim, index = given[0][0], unwrap(given[0][1])
    if index.dtype in (torch.bool, torch.uint8):
        return args[0], None
    rows = index.reshape(-1).numpy()
    return args[0].movedim(dim, 0), rows + (rows < 0) * args[0].shape[dim]


def written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Arguments that an operator writes."""
    found = []
    unmarked = libraries.WRITES.get(func._schema.name, ())
    for number, argument in enumerate(func._schema.arguments):
        marked = argument.alias_info is not None and argument.alias_info.is_write
        if marked or argument.name in unmarked:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += tree_flatten(value)[0]
    return [x for x in found if isinstance(x, torch.Tensor)]


class UnmarkedWrite(RuntimeError):
    """A replaced operator writes what its schema or its table does not say.

    The write would be neither ordered nor part of a graph.
    """


@contextlib.contextmanager
def writes_only(name: str, values: Sequence[Any], writes: Collection[int] | None) -> Iterator[None]:
    """Check that the block changes only `values[i]` for `i` in `writes`; None: it is not checked."""
    kept = {
        number: _bytes_of(x).copy()
        for number, x in enumerate(values)
        if writes is not None and number not in writes and isinstance(x, torch.Tensor)
    }
    yield
    for number, before in kept.items():
        if not np.array_equal(before, _bytes_of(values[number])):
            where = f"{name} writes its argument {number}"
            raise UnmarkedWrite(f"{where}, which its schema or its table does not say")


def _bytes_of(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().flatten().view(torch.uint8).numpy()
