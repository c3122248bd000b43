"""Kernels on tensors of the device: Triton's are compiled and run by ptxrun, in the order of their stream."""

import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from emulated_cuda import accesses, errors, graphs, operators, order, shadows
from emulated_cuda.memory import ALLOCATOR
from emulated_cuda.tensors import CudaTensor, unwrap


class _Current(threading.local):
    """The current device of a thread. There is memory on device 0 only."""

    device = 0


current = _Current()


def launch(
    name: str, run: Callable[..., Any], args: list[Any], *, writes: Collection[int] | None = None
) -> None:
    """Launch a kernel on the current stream, which is that of device 0, and takes no tensor of the host.

    `run` is called with the arguments, tensors on the CPU. `writes` are the arguments that it writes; without
    it, the Result of ptxrun that `run` returns tells which bytes were read and written.
    """
    if current.device != 0:
        raise RuntimeError(f"kernel {name} is launched on cuda:{current.device} with arguments on cuda:0")
    for number, value in enumerate(args):
        if isinstance(value, torch.Tensor) and not isinstance(value, CudaTensor):
            raise RuntimeError(f"argument {number} of kernel {name} is a tensor of the host")
    operators.COUNTS["launches"] += 1
    graphs.check_stream()
    errors.raise_kept()
    where = order.place()

    def step(values: list[Any]) -> None:
        stream = order.current_stream()
        epoch = stream.issue(f"{name} at {where}")
        order.carry_out_before(stream.clock)
        for number, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                # Without `writes` this only looks whether the memory is alive; the Result has the accesses.
                accesses.touch(
                    value, stream, epoch, write=writes is None or number in writes, checked=writes is not None
                )
        with _pointed_to(name, values), _unwritten(name), accesses.writes_only(name, values, writes):
            result = run(*values)
        if writes is None and graphs.capturing() is None:
            ahead = ALLOCATOR.of(values[_READ_AHEAD[name]]) if name in _READ_AHEAD else None
            for base, start, size, write in result.touched:
                block = ALLOCATOR.registered.get(base) or ALLOCATOR.blocks[base]
                if block is ahead and not write:
                    continue
                shadows.access_bytes(block.shadow, start, size, stream, epoch, write=write)

    step([unwrap(x) for x in args])
    if graphs.capturing() is not None:
        kept = [graphs.unowned(unwrap(x)) for x in args]
        graphs.record(name, lambda: step(kept))


#: Kernels of SGLang's -> their argument `req_to_token`, of which they read whole blocks, beyond a request's
#: tokens, while the scheduler's stream writes the next step's slots there. What they read there is not used.
_READ_AHEAD = {
    "create_flashinfer_kv_indices_triton": 0,
    "_fused_dsa_decode_metadata_kernel": 2,
    "_fused_dsa_target_verify_metadata_kernel": 2,
}

#: Kernels whose first argument has addresses among other numbers.
_TABLES = {"_copy_mla_rows_into_pack_kernel", "_fused_slot_clear_kernel", "_fused_slot_copy_kernel"}
#: Kernels of SGLang's that convert pairs of values to e4m3, of which one is not written, and not used after.
_HALF_PAIRS = {"_quantize_k_cache_fast_kernel"}


def _unwritten(name: str) -> AbstractContextManager[Any]:
    """Whether a kernel may read registers that it has not written."""
    import ptxrun_triton

    return ptxrun_triton.install().using(uninit_regs=0) if name in _HALF_PAIRS else nullcontext()


def _pointed_to(name: str, values: list[Any]) -> AbstractContextManager[Any]:
    """Blocks whose addresses are elements of an argument, memory that the kernel may access too."""
    import ptxrun_triton

    tables = [x for x in values if isinstance(x, torch.Tensor) and x.dtype == torch.uint64]
    tables += values[:1] if name in _TABLES else []
    if not tables:
        return nullcontext()
    own = {ALLOCATOR.of(x) for x in values if isinstance(x, torch.Tensor)}
    found = [ALLOCATOR.at(address, 1) for table in tables for address in table.tolist()]
    blocks = {block: None for block, _ in filter(None, found) if block not in own}
    return ptxrun_triton.install().using(regions=[(block.address, block.size_bytes) for block in blocks])


def install() -> Any:
    """Give launches of Triton's kernels to ptxrun; returns its record of them."""
    import ptxrun_triton
    from triton.runtime import driver

    runs = ptxrun_triton.install()
    runs.carry_out = launch
    runs.options["touched"] = 1
    # SGLang stores padding tokens of a batch in slot 0, all at once.
    runs.options["global_races"] = 0
    driver.active.get_active_torch_device = lambda: torch.device("cuda", 0)
    driver.active.get_device_interface = lambda: torch.cuda
    # The autotuner takes the first configuration.
    driver.active.get_benchmarker = lambda: (
        lambda call, quantiles=None, **options: [1.0] * len(quantiles or [1])
    )
    driver.active.get_empty_cache_for_benchmark = lambda: torch.empty(1)
    driver.active.clear_cache = lambda cache: None
    return runs
