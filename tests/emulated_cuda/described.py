"""What torch.cuda answers: an H100, whose memory is that of the allocator."""

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._device import DeviceContext as DefaultDevice

from emulated_cuda import accesses, graphs, launches, operators, order, runtime
from emulated_cuda.memory import ALLOCATOR
from emulated_cuda.tensors import CudaTensor

TOTAL_BYTES = ALLOCATOR.total_bytes
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, warp_size=32,
    total_memory=TOTAL_BYTES, shared_memory_per_multiprocessor=233472, shared_memory_per_block_optin=232448,
    shared_memory_per_block=49152, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    regs_per_multiprocessor=65536, L2_cache_size=50 << 20, gcnArchName="", is_integrated=0,
    is_multi_gpu_board=0, uuid="0",
)  # fmt: skip


def _stream_context(stream: order.Stream | None) -> contextlib.AbstractContextManager[Any]:
    """As `torch.cuda.StreamContext`; None changes nothing."""
    return contextlib.nullcontext() if stream is None else stream


def _set_device(device: Any) -> None:
    number = device if isinstance(device, int) else torch.device(device).index
    if number is not None and number >= 0:
        launches.current.device = number


class DeviceContext(contextlib.AbstractContextManager):
    """As `torch.cuda.device`."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def __enter__(self) -> None:
        self._before = launches.current.device
        if self.device is not None:
            _set_device(self.device)

    def __exit__(self, *args: object) -> None:
        launches.current.device = self._before


def _memory_info(device: Any = None) -> tuple[int, int]:
    return TOTAL_BYTES - (1 << 30) - ALLOCATOR.allocated_bytes, TOTAL_BYTES


_OF_ORDER = ("Stream", "Event", "current_stream", "default_stream", "set_stream")


def _nothing() -> Any:
    """A function that does nothing, a new one each time: torch._dynamo has a table of torch's functions."""
    return lambda *args, **options: None


def install() -> None:
    """Replace the functions of torch.cuda, and those of torch that make tensors outside of the dispatcher."""
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": _nothing(),
        "_lazy_init": _nothing(),
        "device_count": lambda: 1,
        "current_device": lambda: launches.current.device,
        "set_device": _set_device,
        "device": DeviceContext,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_properties": lambda device=None: PROPERTIES,
        **{name: getattr(order, name) for name in _OF_ORDER},
        "stream": _stream_context,
        "StreamContext": _stream_context,
        "synchronize": lambda device=None: order.synchronize(),
        "_sleep": order.sleep,
        "cudart": runtime.TorchCudart,
        "set_sync_debug_mode": operators.set_sync_debug_mode,
        "is_current_stream_capturing": lambda: graphs.capturing() is not None,
        "CUDAGraph": graphs.CUDAGraph,
        "graph_pool_handle": graphs.graph_pool_handle,
        "mem_get_info": _memory_info,
        "empty_cache": _nothing(),
        "memory_allocated": lambda device=None: ALLOCATOR.allocated_bytes,
        "memory_reserved": lambda device=None: ALLOCATOR.allocated_bytes,
        "max_memory_allocated": lambda device=None: ALLOCATOR.peak_bytes,
        "memory_stats": lambda device=None: ALLOCATOR.stats(),
        "reset_peak_memory_stats": lambda device=None: ALLOCATOR.reset_peak(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch._C._host_emptyCache = _nothing()
    _install_tensors()


def _install_tensors() -> None:
    real_tensor, real_as_tensor, real_to = torch.tensor, torch.as_tensor, torch.Tensor.to
    real_tolist = torch.Tensor.tolist

    def placed(out: torch.Tensor, device: Any) -> torch.Tensor:
        """On a device, by default that of the innermost `with torch.device(...)`."""
        if device is None:  # `torch.get_default_device` makes a tensor to find it
            modes = reversed(torch.overrides._get_current_function_mode_stack())
            device = next((mode.device for mode in modes if isinstance(mode, DefaultDevice)), None)
        return out.to(device) if device is not None else out

    def tensor(data: Any, *args: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> Any:
        out = real_tensor(data.cpu() if isinstance(data, CudaTensor) else data, *args, **options)
        out = out.pin_memory() if pin_memory else out
        return placed(out, device)

    def as_tensor(data: Any, *args: Any, device: Any = None, **options: Any) -> torch.Tensor:
        out = data if isinstance(data, CudaTensor) else real_as_tensor(data, *args, **options)
        return placed(out, device)

    def to(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        other = args[0] if args and isinstance(args[0], torch.Tensor) else options.get("other")
        if isinstance(other, CudaTensor):
            options.pop("other", None)
            args = (torch.device("cuda", 0), other.dtype, *args[1:])
        kinds = (str, torch.device, int)  # and not bool
        device = next((x for x in (*args[:1], options.get("device")) if type(x) in kinds), None)
        if device is None or torch.device(device).type != "cuda":
            return real_to(self, *args, **options)
        options.pop("copy", None)
        _, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **options)
        options = {"dtype": dtype or self.dtype, "device": torch.device("cuda", 0)}
        return torch.ops.aten._to_copy.default(self, **options, non_blocking=non_blocking)

    def tolist(self: torch.Tensor) -> Any:
        if ALLOCATOR.is_pinned(self):  # torch reads memory of the host without an operator
            accesses.touch(self, None, 0, write=False)
        return real_tolist(self)

    torch.tensor, torch.as_tensor, torch.Tensor.to = tensor, as_tensor, to
    torch.Tensor.tolist = tolist
    torch.Tensor.cuda = lambda self, *args, **options: self.to("cuda", **options)
    torch.Tensor.pin_memory = lambda self, *args: torch.ops.aten._pin_memory.default(self)
    torch.Tensor.is_pinned = lambda self, *args: ALLOCATOR.is_pinned(self)
