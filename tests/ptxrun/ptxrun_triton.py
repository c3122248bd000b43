"""Triton kernels launched on CPU tensors as on an H100: compiled by Triton, executed by ptxrun.

    runs = install()                              # before a kernel is launched; TRITON_INTERPRET must be 0
    kernel[(grid,)](tensors and numbers, num_warps=8)
    runs.last.lines

ptxrun executes PTX: Triton does not assemble it to machine code here.
"""

import functools
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import ptxrun

#: Shared memory that a program may have on sm_90.
_SHARED_BYTES = 232448


class Runs:
    """Launches of this process."""

    def __init__(self) -> None:
        #: Options of `Module.launch`, for every launch.
        self.options: dict[str, Any] = {}
        #: Name of the kernel and what was found, the latest at the end.
        self.launched: list[tuple[str, ptxrun.Result]] = []
        self._changes: list[Callable[[str], str]] = []
        #: Carries out a launch, given the kernel's name, what runs it, and the kernel's arguments.
        self.carry_out: Callable[[str, Callable[..., ptxrun.Result], list[Any]], Any] = (
            lambda name, run, values: run(*values)
        )

    @property
    def last(self) -> ptxrun.Result:
        return self.launched[-1][1]

    @contextmanager
    def using(self, change: Callable[[str], str] | None = None, **options: Any):
        """Within the block, launch with these options, and with PTX texts that `change` returns."""
        kept, self.options = self.options, {**self.options, **options}
        self._changes += [change] if change else []
        try:
            yield self
        finally:
            self.options = kept
            if change:
                self._changes.remove(change)

    def module(self, ptx: str) -> ptxrun.Module:
        for change in self._changes:
            ptx = change(ptx)
        return _module(ptx)


@functools.cache
def _module(ptx: str) -> ptxrun.Module:
    return ptxrun.Module(ptx)


class _Launcher:
    """What Triton calls with a kernel's arguments."""

    def __init__(self, runs: Runs, kernel: Any) -> None:
        self.runs, self.metadata, self.ptx = runs, kernel.metadata, kernel.asm["ptx"]
        self.kinds = list(kernel.src.signature.values())

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *args):
        if self.metadata.global_scratch_size or self.metadata.profile_scratch_size:
            raise NotImplementedError("kernels with scratch memory")
        if x * y * z:
            run = functools.partial(self._run, (x, y, z))
            self.runs.carry_out(self.metadata.name, run, _flat(self.kinds, args))

    def _run(self, grid, *values) -> ptxrun.Result:
        name, result = self.metadata.name, None
        try:
            result = self.runs.module(self.ptx).launch(
                name, grid, 32 * self.metadata.num_warps, values, self.metadata.shared, **self.runs.options
            )
        except ptxrun.PtxError as error:
            result = error.result
            raise
        finally:
            if result is not None:
                self.runs.launched.append((name, result))
        return result


def _flat(kinds: Any, values: Any) -> list[Any]:
    """The arguments that are parameters of the compiled kernel: no constants, and tuples flattened."""
    flat: list[Any] = []
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple | list):
            flat += _flat(kind, value)
        elif kind != "constexpr":
            flat.append(value)
    return flat


@functools.cache
def install() -> Runs:
    """Make ptxrun the active driver of Triton in this process."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.compiler import compiler
    from triton.runtime import driver

    runs = Runs()
    target = GPUTarget("cuda", 90, 32)
    properties = {"max_shared_mem": _SHARED_BYTES, "multiprocessor_count": 132}
    active = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        set_current_device=lambda device: None,
        get_current_stream=lambda device: 0,
        get_device_capability=lambda device=0: (9, 0),
        get_active_torch_device=lambda: torch.device("cpu"),
        get_device_interface=lambda: torch.cpu,
        is_active=lambda: True,
        utils=SimpleNamespace(get_device_properties=lambda device: properties),
        launcher_cls=None,
    )

    def init_handles(self):
        if self.module is None:
            if self.metadata.shared > _SHARED_BYTES:
                raise compiler.OutOfResources(self.metadata.shared, _SHARED_BYTES, "shared memory")
            self.module = self._run = _Launcher(runs, self)
            self.function = self.n_regs = self.n_spills = 0
            self.n_max_threads = 1024

    compiler.CompiledKernel._init_handles = init_handles
    compiler.CompiledKernel.__del__ = lambda self: None
    CUDABackend.make_cubin = lambda self, source, *_: b""
    driver.set_active(active)
    return runs
