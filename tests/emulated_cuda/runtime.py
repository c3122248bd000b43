"""What the CUDA runtime does on the device: `libcudart` calls it for compiled code, `TorchCudart` for Python.

A GPU reports no mistake of order. Such faults are kept in `ALLOCATOR.problems`, and the call is carried out.

| function | accessed late, as in `libraries` |
|---|---|
| `cudaMemcpyAsync` | both ends, of which one may be pinned: torch's allocator is not told |
| `cudaMemcpyBatchAsync` | both ends; with order "any" sources at once or later; not the lists |
| `cudaLaunchKernelExC` | pinned memory to which arguments point; not the arguments |
| `cudaEvent*`, `cudaStream*`, `cudaGet*`, `cuda*GetVersion`, `cudaDeviceGetAttribute` | nothing |
| `cudaHostRegister`, `cudaHostUnregister`, `__cuda*` | nothing |
"""

import ctypes
import functools
import itertools
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ptxrun
import ptxrun_builds
import torch

from emulated_cuda import errors, graphs, launches, order, shadows
from emulated_cuda.errors import CudaError, Refused
from emulated_cuda.memory import ALLOCATOR, Block, MemoryFault

VERSION = 13000
_CSRC = Path(__file__).resolve().parents[2] / "sgl_kvpool" / "transfer" / "csrc"
_PAGE = mmap.PAGESIZE
_CAN_USE_HOST_POINTERS = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
_NON_BLOCKING, _DISABLE_TIMING = 1, 2
#: Kind of a copy -> whether target and source are memory of the host, which has to be pinned here.
_PINNED_ENDS = {1: (False, True), 2: (True, False), 3: (False, False)}
_STREAM_ORDER, _ANY_ORDER = 1, 3  # of cudaMemcpySrcAccessOrder


class _LaunchConfig(ctypes.Structure):
    """As `cudaLaunchConfig_t`."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class Runtime:
    """The functions of the library, without the underscores with which some of their names begin."""

    def __init__(self) -> None:
        #: Names of the functions that were called.
        self.calls: list[str] = []
        #: Names of kernels in PTX, by the address of their function on the host.
        self.kernels: dict[int, str] = {}
        self._events: dict[int, order.Event] = {}
        self._destroyed: set[int] = set()
        self._instead: dict[str, Callable[..., Any]] = {}

    def call(self, name: str, *args: Any) -> int:
        """A call of the library: its status, or the address that it returns."""
        self.calls.append(name)
        try:
            function = self._instead.get(name) or getattr(self, name.lstrip("_"))
            return int(function(*args) or CudaError.SUCCESS)
        except Refused as refused:
            return errors.keep(refused.error)
        except (Exception, order.OrderFault, MemoryFault) as error:
            # C cannot raise. A GPU would report memory that does not exist at some later call.
            ALLOCATOR.problems.append(f"{name}: {type(error).__name__}: {error}")
            return errors.keep(CudaError.LAUNCH_FAILURE)

    @contextmanager
    def replacing(self, name: str, function: Callable[..., Any]) -> Iterator[None]:
        """Within the block, call `function` instead of a function of the library."""
        self._instead[name] = function
        try:
            yield
        finally:
            del self._instead[name]

    def failing(self, name: str, error: CudaError, *, after: int = 0, count: int = 1 << 30) -> Any:
        """Within the block, `count` calls of a function fail, after some that are carried out."""
        called = itertools.count()

        def fail(*args: Any) -> Any:
            if after <= next(called) < after + count:
                raise Refused(error, "on demand")
            return getattr(self, name)(*args)

        return self.replacing(name, fail)

    # ----------------------------------------------------------------------------- kernels and launches

    def cudaRegisterFatBinary(self, binary: int) -> int:
        return binary

    def cudaRegisterFatBinaryEnd(self, handle: int) -> None:
        pass

    cudaUnregisterFatBinary = cudaRegisterFatBinaryEnd

    def cudaInitModule(self, handle: int) -> int:
        return 1

    def cudaRegisterFunction(self, handle: int, function: int, device: int, name: int, *more: Any) -> None:
        self.kernels[function] = ctypes.string_at(name).decode()

    def cudaLaunchKernelExC(self, config_at: int, function: int, arguments: int) -> None:
        config = _LaunchConfig.from_address(config_at)
        stream = self._stream(config.stream)
        name = self.kernels.get(function)
        if name is None:
            raise Refused(CudaError.INVALID_DEVICE_FUNCTION)
        if config.attribute_count:
            raise NotImplementedError("attributes of launches")
        grid, (threads, *more) = tuple(config.grid), config.block
        if not all(grid) or not threads or more != [1, 1]:
            raise Refused(CudaError.INVALID_VALUE, f"grid {grid}, block {[threads, *more]}")
        module = _module()
        parameters = module.kernels[name]["params"]
        pointers = (ctypes.c_void_p * len(parameters)).from_address(arguments)
        values = [ctypes.string_at(at, p["size"]) for at, p in zip(pointers, parameters, strict=True)]

        def run() -> ptxrun.Result:
            options = {"regions": ALLOCATOR.live(), "touched": 1}
            return module.launch(name, grid, threads, values, config.shared_bytes, **options)

        try:
            with stream:
                launches.launch(name, run, [])
        except order.OrderFault as fault:
            ALLOCATOR.problems.append(str(fault))

    # ------------------------------------------------------------------------------------------ copies

    def cudaMemcpyAsync(self, target: int, source: int, size_bytes: int, kind: int, stream: int) -> None:
        on = self._stream(stream)
        if size_bytes:
            copy = _Copy(target or 0, source or 0, size_bytes)
            if (copy.target.pinned, copy.source.pinned) != _PINNED_ENDS.get(kind):
                raise Refused(CudaError.INVALID_VALUE, f"kind {kind}")
            _carry_out([copy], on, early=False)

    def cudaMemcpyBatchAsync(
        self, targets: int, sources: int, sizes: int, count: int, attributes: int, places: int,
        attribute_count: int, stream: int,
    ) -> None:  # fmt: skip
        on = self._stream(stream)
        if not stream:
            raise Refused(CudaError.INVALID_VALUE, "batches do not run on the legacy stream")
        if attribute_count != 1 or ctypes.c_size_t.from_address(places).value != 0 or not count:
            raise Refused(CudaError.INVALID_VALUE, "one attribute for all copies is known here")
        access_order = ctypes.c_int.from_address(attributes).value
        if access_order not in (_STREAM_ORDER, _ANY_ORDER):
            raise Refused(CudaError.INVALID_VALUE, f"access order {access_order}")
        lists = [(ctypes.c_size_t * count).from_address(at) for at in (targets, sources, sizes)]
        copies = list(itertools.starmap(_Copy, zip(*lists, strict=True)))
        ends = sorted((at, at + size) for at, _, size in zip(*lists, strict=True))
        if any(end > begin for (_, end), (begin, _) in itertools.pairwise(ends)):
            ALLOCATOR.problems.append(f"{order.place()}: targets of a batch of copies overlap")
        _carry_out(copies, on, early=access_order == _ANY_ORDER)

    # ------------------------------------------------------------------------------- streams and events

    def cudaStreamCreateWithFlags(self, out: int, flags: int) -> None:
        if flags != _NON_BLOCKING:
            raise NotImplementedError("streams that wait for the legacy stream")
        _store(out, order.Stream().cuda_stream)

    def cudaStreamDestroy(self, stream: int) -> None:
        self._stream(stream)
        self._destroyed.add(stream)

    def cudaStreamSynchronize(self, stream: int) -> None:
        self._stream(stream).synchronize()

    def cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        self._stream(stream).wait_event(self._event(event))

    def cudaEventCreateWithFlags(self, out: int, flags: int) -> None:
        event = order.Event(enable_timing=flags != _DISABLE_TIMING)
        self._events[event.cuda_event] = event
        _store(out, event.cuda_event)

    def cudaEventDestroy(self, event: int) -> None:
        self._event(event)
        del self._events[event]

    def cudaEventRecord(self, event: int, stream: int) -> None:
        self._event(event).record(self._stream(stream))

    def _stream(self, handle: int | None) -> order.Stream:
        if graphs.capturing() is not None:
            raise Refused(CudaError.STREAM_CAPTURE_UNSUPPORTED)
        try:
            if handle in self._destroyed:
                raise KeyError
            return order.stream_of(handle or 0)
        except KeyError:
            raise Refused(CudaError.INVALID_RESOURCE_HANDLE, f"stream {handle}") from None

    def _event(self, handle: int) -> order.Event:
        if handle not in self._events:
            raise Refused(CudaError.INVALID_RESOURCE_HANDLE, f"event {handle}")
        return self._events[handle]

    # -------------------------------------------------------------------------------- device and errors

    def cudaDriverGetVersion(self, out: int) -> None:
        ctypes.c_int.from_address(out).value = VERSION

    cudaRuntimeGetVersion = cudaDriverGetVersion

    def cudaGetDevice(self, out: int) -> None:
        ctypes.c_int.from_address(out).value = 0

    def cudaDeviceGetAttribute(self, out: int, attribute: int, device: int) -> None:
        if attribute != _CAN_USE_HOST_POINTERS or device:
            raise NotImplementedError(f"attribute {attribute} of device {device}")
        ctypes.c_int.from_address(out).value = 1

    def cudaGetLastError(self) -> CudaError:
        return errors.taken()

    def cudaGetErrorString(self, error: int) -> int:
        return ctypes.addressof(_text(CudaError(error).name))

    # ------------------------------------------------------------------------------ registered memory

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> None:
        if not address or size_bytes <= 0 or flags:
            raise Refused(CudaError.INVALID_VALUE)
        first, last = address // _PAGE, (address + size_bytes - 1) // _PAGE
        for block in ALLOCATOR.registered.values():
            if first <= (block.address + block.size_bytes - 1) // _PAGE and block.address // _PAGE <= last:
                raise Refused(CudaError.HOST_MEMORY_ALREADY_REGISTERED)
        block = Block(size_bytes, pinned=True, pool=None, address=address)
        ALLOCATOR.registered[address] = block

    def cudaHostUnregister(self, address: int) -> None:
        block = ALLOCATOR.registered.pop(address, None)
        if block is None:
            raise Refused(CudaError.HOST_MEMORY_NOT_REGISTERED)
        late = shadows.not_ordered_before_reuse(block.shadow, None)
        if late is not None:
            where = f"memory was unregistered at {order.place()}"
            ALLOCATOR.problems.append(f"{where}, and {late} may still use it")


RUNTIME = Runtime()


class _Copy:
    """Two ends of a copy, each in one block."""

    def __init__(self, target: int, source: int, size_bytes: int) -> None:
        found = [ALLOCATOR.at(at, size_bytes) if at else None for at in (target, source)]
        if None in found or not size_bytes:
            raise Refused(CudaError.INVALID_VALUE, f"copy of {size_bytes} bytes")
        (self.target, self.target_start), (self.source, self.source_start) = found  # type: ignore[misc]
        self.size_bytes = size_bytes
        for block in (self.target, self.source):
            if block.freed is not None:
                raise MemoryFault(f"{order.place()} copies memory of {block.created}, freed at {block.freed}")


def _carry_out(copies: list[_Copy], stream: order.Stream, *, early: bool) -> None:
    """Copy, and check the order; what may be read early is ordered after the host only."""
    epoch = stream.issue(f"a copy at {order.place()}")
    order.carry_out_before(stream.clock)
    later: list[tuple[np.ndarray, np.ndarray]] = []
    for copy in copies:
        target = copy.target.bytes[copy.target_start : copy.target_start + copy.size_bytes]
        source = copy.source.bytes[copy.source_start : copy.source_start + copy.size_bytes]
        if copy.target.pinned:
            later.append((target, source.copy()))
        else:
            target[:] = source
    if later:
        order.write_later(stream, lambda: [target.__setitem__(slice(None), new) for target, new in later])
    try:
        for copy in copies:
            for block, start, write in (
                (copy.source, copy.source_start, False),
                (copy.target, copy.target_start, True),
            ):
                shadows.access_bytes(
                    block.shadow, start, copy.size_bytes, stream, epoch,
                    write=write, early=early and not write and block.pinned,
                )  # fmt: skip
    except order.OrderFault as fault:  # a GPU would copy
        ALLOCATOR.problems.append(str(fault))


def _store(at: int, handle: int) -> None:
    ctypes.c_size_t.from_address(at).value = handle


@functools.cache
def _text(text: str) -> Any:
    return ctypes.create_string_buffer(text.encode())


def transfer_ptx() -> str:
    """PTX of the file that SGLang's loader is given."""
    import tvm_ffi

    flags = ("-O3", "-I", str(Path(tvm_ffi.__file__).parent / "include"))
    return ptxrun_builds.nvcc_ptx('#include "bind_tvm_ffi.cu"\n', flags, _CSRC)


@functools.cache
def _module() -> ptxrun.Module:
    return ptxrun.Module(transfer_ptx())


class TorchCudart:
    """As `torch.cuda.cudart()`."""

    cudaError = torch._C._cudart.cudaError
    cudaGetErrorString = staticmethod(torch._C._cudart.cudaGetErrorString)

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> Any:
        return self.cudaError(RUNTIME.call("cudaHostRegister", address, size_bytes, flags))

    def cudaHostUnregister(self, address: int) -> Any:
        return self.cudaError(RUNTIME.call("cudaHostUnregister", address))

    def cudaMemGetInfo(self, device: int = 0) -> Any:
        return torch.cuda.mem_get_info(device)
