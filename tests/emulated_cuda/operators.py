"""Carries out torch's operators on tensors of the device: what CUDA forbids, and what the host waits for."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from emulated_cuda import errors, graphs, libraries, order
from emulated_cuda.accesses import indexed, touch, writes_only, written
from emulated_cuda.memory import ALLOCATOR
from emulated_cuda.tensors import CudaTensor, unwrap


class HostWait(RuntimeError):
    """The host waits for the device where `torch.cuda.set_sync_debug_mode("error")` forbids it."""


#: Operators, launches of kernels, and waits of the host since the start.
COUNTS = {"operators": 0, "launches": 0, "waits": 0, "libraries": 0}

#: Operators that take tensors of the host beside those of the device.
_MIXED = {"copy_", "_to_copy", "index", "index_put_", "_index_put_impl_", "index_put"}
#: Operators whose result, or its shape, the host has to know.
_READS = {
    *("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique_dim", "_unique2"),
    *("allclose", "unique_consecutive", "bincount", "repeat_interleave"),
}
_MODES = {0: "default", 1: "warn", 2: "error"}
_sync_mode = "default"


def set_sync_debug_mode(mode: int | str) -> None:
    global _sync_mode
    _sync_mode = _MODES.get(mode, mode)  # type: ignore[arg-type]


def host_waits(what: str, *, always: bool = True) -> None:
    """The host waits for the current stream; forbidden in a capture and in sync debug mode "error".

    Without `always` it may wait, on which no order depends.
    """
    COUNTS["waits"] += 1
    if _sync_mode == "error" and graphs.capturing() is None:
        raise HostWait(f"{what} at {order.place()}: the host waits for the device")
    graphs.forbid_in_capture(what)
    if always:
        order.current_stream().synchronize()


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def to(tensor: CudaTensor, *args: Any, **options: Any) -> torch.Tensor:
    """`CudaTensor.to`."""
    if args and isinstance(args[0], torch.Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    copy = options.pop("copy", False)
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **options)
    if device is not None and device.type == "cpu":
        return torch.ops.aten._to_copy.default(tensor, dtype=dtype, device=device, non_blocking=non_blocking)
    if dtype is None or dtype == tensor.dtype:
        return tensor.clone() if copy else tensor
    return torch.ops.aten._to_copy.default(tensor, dtype=dtype)


def device_tensor(out: torch.Tensor, *, copied: bool = True) -> torch.Tensor:
    """A tensor of the device in a block of its own, with the values of a new CPU tensor."""
    storage = out.untyped_storage()
    if storage.nbytes() == 0:
        return CudaTensor(out)
    flat = ALLOCATOR.allocate(storage.nbytes())
    if copied:
        flat.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
    return CudaTensor(flat.view(out.dtype).as_strided(out.size(), out.stride(), out.storage_offset()))


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Carry out an operator of the dispatcher."""
    name = func._schema.name.partition("::")[2]
    tensors: list[torch.Tensor] = []
    tree_map(lambda x: tensors.append(x) if isinstance(x, torch.Tensor) else None, (args, kwargs))
    on_device = [x for x in tensors if isinstance(x, CudaTensor)]
    device = kwargs.get("device")
    if name == "_to_copy" and on_device and kwargs.get("layout") is not None:
        # `type_as` in torch's C++ code, for which both are CPU tensors; `CudaTensor.to` gives no layout.
        device, kwargs = None, {key: kwargs[key] for key in kwargs.keys() - {"layout", "device"}}
    if not on_device and not _is_cuda(device):
        return _on_host(func, name, args, kwargs, tensors)
    COUNTS["operators"] += 1
    if _is_view(func):
        cpu_args, cpu_kwargs = tree_map(unwrap, (args, kwargs))
        return _wrapped(func(*cpu_args, **cpu_kwargs), on_device)
    result_on_device = _is_cuda(device) if device is not None else True
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    _check_devices(func, name, args, kwargs, tensors, on_device, result_on_device)
    if name == "_to_copy" and not result_on_device:
        return _to_host(args[0], kwargs)
    if name == "copy_" and not isinstance(args[0], CudaTensor):
        return _copy_to_host(func, *args, **kwargs)

    graphs.check_stream()
    errors.raise_kept()
    where = order.place()
    call = libraries.OPERATORS.get(func._schema.name, func)
    COUNTS["libraries"] += call is not func
    cpu_args, cpu_kwargs = tree_map(unwrap, (args, kwargs))
    with libraries.stream_of(func, cpu_args):
        out, epoch = _carry_out(func, call, name, cpu_args, cpu_kwargs, where)
    if name in _READS:
        order.current_stream().synchronize()  # the host has its result
    changed = [x for x in written(func, args, kwargs) if isinstance(x, CudaTensor)]
    if any(x.shape != x.on_cpu.shape or x.stride() != x.on_cpu.stride() for x in changed):
        raise NotImplementedError(f"{func} changes the shape of a tensor in place")
    if not result_on_device or name == "_local_scalar_dense":
        return out
    only_allocates = name.startswith(("empty", "new_empty"))
    found = _wrapped(out, on_device, fresh=not only_allocates)
    results = [x for x in tree_flatten(found)[0] if isinstance(x, CudaTensor)]
    known = {ALLOCATOR.of(unwrap(x)) for x in tensors}
    # Of the results, those that are not arguments, as FlashMLA's schedules are.
    places = [n for n, x in enumerate(results) if ALLOCATOR.of(x.on_cpu) not in known]
    new = [results[n].on_cpu for n in places]
    if not only_allocates:
        for x in new:
            touch(x, order.current_stream(), epoch, write=True)
    if graphs.capturing() is not None and (changed or new) and not only_allocates:
        again_args, again_kwargs = tree_map(graphs.unowned, (cpu_args, cpu_kwargs))
        targets = [graphs.unowned(x) for x in new]

        def again() -> None:
            out, epoch = _carry_out(func, call, name, again_args, again_kwargs, where)
            values = [x for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor)]
            for place, target in zip(places, targets, strict=True):
                touch(target, order.current_stream(), epoch, write=True)
                target.copy_(values[place])

        graphs.record(str(func), again)
    return found


def _carry_out(func: Any, call: Any, name: str, args: Any, kwargs: Any, where: str) -> tuple[Any, int]:
    """Check the order of an operator's accesses, and carry it out; its result, and its epoch."""
    stream = order.current_stream()
    epoch = stream.issue(f"{name} at {where}")
    changed = {id(x) for x in written(func, args, kwargs)}
    reads = not name.startswith(("new_", "empty")) and not name.endswith("_like")  # shapes alone
    for x in tree_flatten((args, kwargs))[0]:
        if isinstance(x, torch.Tensor) and (reads or id(x) in changed):
            part, rows = indexed(name, args) if x is args[0] else (x, None)
            touch(part, stream, epoch, write=id(x) in changed, rows=rows)
    if call is func:
        return call(*args, **kwargs), epoch
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    with writes_only(str(func), tensors, [n for n, x in enumerate(tensors) if id(x) in changed]):
        return call(*args, **kwargs), epoch


def _is_view(func: Any) -> bool:
    schema = func._schema
    return not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)


def _wrapped(out: Any, known: list[Any], *, fresh: bool = True) -> Any:
    """Results on the device: arguments themselves, views of their blocks, or new blocks."""
    tensors = {id(x.on_cpu): x for x in known}

    def wrap(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or isinstance(x, CudaTensor):
            return x
        if id(x) in tensors:
            return tensors[id(x)]
        return CudaTensor(x) if ALLOCATOR.of(x) is not None else device_tensor(x, copied=fresh)

    return tree_map(wrap, out)


def _check_devices(
    func: Any, name: str, args: Any, kwargs: Any, tensors: list[Any], on_device: list[Any], to_device: bool
) -> None:
    """What CUDA refuses, and where the host waits."""
    if on_device and name not in _MIXED and any(not isinstance(x, CudaTensor) and x.dim() for x in tensors):
        raise RuntimeError(f"Expected all tensors to be on the same device: cuda:0 and cpu! ({func})")
    if on_device and name in _READS:
        host_waits(name)
    if name in ("index", "index_put_", "index_put", "_index_put_impl_") and on_device:
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                host_waits(f"{name} by a mask")
            if index is not None and not isinstance(index, CudaTensor) and index.dim():
                host_waits(f"{name} by an index on the host")
    if name == "copy_":
        target, source = args[:2]
        on_host = isinstance(source, torch.Tensor) and not isinstance(source, CudaTensor)  # not a number
        if isinstance(target, CudaTensor) and on_host and source.dim():
            _host_to_device("copy_", source, bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2])))
    if name == "_to_copy" and to_device and not isinstance(args[0], CudaTensor):
        _host_to_device("to(cuda)", args[0], bool(kwargs.get("non_blocking")))


def _host_to_device(what: str, source: torch.Tensor, non_blocking: bool) -> None:
    if not ALLOCATOR.is_pinned(source):
        # The driver has read the memory when the call returns, for which it waits if the copy is long.
        if source.numel():
            text = f"{what} from pageable memory, {tuple(source.shape)} {source.dtype}"
            host_waits(text, always=not non_blocking)
    elif not non_blocking:
        host_waits(f"{what} without non_blocking")
    else:
        _recorded_by_torch(source)


def _recorded_by_torch(pinned: torch.Tensor) -> None:
    """torch's allocator of pinned memory knows of torch's own copies, until which it keeps the memory."""
    if (block := ALLOCATOR.of(pinned)) is not None:
        block.recorded.add(order.current_stream())


def _to_host(source: CudaTensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """A copy in new memory of the host, which torch pins if the copy is asynchronous."""
    options = {"dtype": kwargs.get("dtype") or source.dtype}
    target = torch.empty(0, **options)
    if kwargs.get("non_blocking") and source.numel():
        graphs.forbid_in_capture("a copy to new memory of the host")
        raw = ALLOCATOR.allocate(source.numel() * target.element_size(), pinned=True)
        target = raw.view(options["dtype"]).view(source.shape)
        return _copy_to_host(torch.ops.aten.copy_.default, target, source, True)
    host_waits("a copy to the host")
    epoch = order.current_stream().issue(f"copy to the host at {order.place()}")
    touch(source.on_cpu, order.current_stream(), epoch, write=False)
    order.current_stream().synchronize()
    return source.on_cpu.to(options["dtype"], copy=True)


def _copy_to_host(func: Any, target: torch.Tensor, source: Any, non_blocking: bool = False) -> torch.Tensor:
    """`copy_` from the device; into pinned memory it is carried out when the host waits for it."""
    stream = order.current_stream()
    if not (non_blocking and ALLOCATOR.is_pinned(target)):
        host_waits("copy_ to the host")
        non_blocking = False
    else:
        _recorded_by_torch(target)
    where = order.place()

    def step(target: torch.Tensor, values: torch.Tensor) -> None:
        now = order.current_stream()
        epoch = now.issue(f"copy to the host at {where}")
        touch(values, now, epoch, write=False)
        touch(target, now, epoch, write=True)
        values = values.clone()
        if non_blocking:
            order.write_later(now, lambda: target.copy_(values))
        else:
            target.copy_(values)

    if graphs.capturing() is None:
        step(target, source.on_cpu)
    else:
        later = graphs.unowned(target), graphs.unowned(source.on_cpu)
        graphs.record("copy to the host", lambda: step(*later))
    if not non_blocking:
        stream.synchronize()
    return target


def _on_host(func: Any, name: str, args: Any, kwargs: dict[str, Any], tensors: list[Any]) -> Any:
    """An operator on tensors of the host, some of which may be pinned."""
    if name == "_pin_memory" or kwargs.get("pin_memory"):
        graphs.forbid_in_capture("pinning memory")
    if name == "is_pinned":
        return ALLOCATOR.is_pinned(args[0])
    if name == "_pin_memory":
        return _pinned(args[0])
    if kwargs.get("pin_memory"):
        return _pinned(func(*args, **{**kwargs, "pin_memory": False}))
    pinned = [x for x in tensors if ALLOCATOR.is_pinned(x)]
    if pinned and not _is_view(func):
        changed = {id(x) for x in written(func, args, kwargs)}
        for x in pinned:
            touch(x, None, 0, write=id(x) in changed)
    return libraries.OPERATORS.get(func._schema.name, func)(*args, **kwargs)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 0:
        return tensor
    flat = ALLOCATOR.allocate(tensor.numel() * tensor.element_size(), pinned=True)
    return flat.view(tensor.dtype).view(tensor.shape).copy_(tensor)


class Mode(TorchDispatchMode):
    """Hands the operators that make or copy tensors to `run`; active in every thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})
