"""Common parts of the engines for GPU pools; `engines.py` describes the engines.

Compiled code gets a plan as the structs of csrc/staging.h, which are lists of integers. They are made once,
when both sides of a transfer are known, and keep the memory alive that they point to.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sgl_kvpool.compiler import Module
from sgl_kvpool.transfer.conversion import RowConversion
from sgl_kvpool.transfer.plan import CopyRun, TransferPlan, require_pages, run_table
from sgl_kvpool.transfer.slots import DevicePages, Pages, Transfer, contiguous

#: Slots of a buffer: while the copy engine empties or fills one, kernels work on the next.
_SLOTS = 4
#: Maximum bytes of a slot, unless a page is longer. The link needs 300 us for them: a wait between two slots
#: costs less than 1 % of that. A larger slot would lengthen a store's first gather, which overlaps with no
#: copy.
_SLOT_BYTES = 16 << 20
#: Alignment of slots; kernels choose their word size by addresses relative to a slot.
_ALIGNMENT_BYTES = 256
#: Maximum number of whole pages in a slot. Loads move groups of layers, of which a slot holds more pages.
_SLOT_PAGES = 16
_SOURCES = Path(__file__).resolve().parent / "csrc"
#: Maximum blocks of a kernel, which occupies as many SMs and leaves the others to the model. A copy has fewer
#: if their 16 warps each, with up to 128 words of a run, have in flight what a link has in 2 us.
KERNEL_BLOCKS, _IN_FLIGHT_BYTES = 16, 128 << 10
#: Word sizes of the copy kernels, the widest first.
_WORD_BYTES = (16, 8, 4)


def _slot_bytes(page_bytes: int) -> int:
    wanted = max(page_bytes, min(_SLOT_BYTES, _SLOT_PAGES * page_bytes))
    return -(-wanted // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def buffer_bytes(page_bytes: int) -> int:
    """Bytes of the buffers of both directions, for host pages or `staged_state_bytes` of states.

    At most 128 MiB, or 8 pages if a page is longer than 16 MiB.
    """
    return 2 * _SLOTS * _slot_bytes(page_bytes)


def staged_state_bytes(state_bytes: int, largest_part_bytes: int) -> int:
    """Minimum bytes of a buffer slot for states, whose parts are moved in groups, and each part whole.

    The states of all layers in a host slot have tens of megabytes. Buffers with several slots of this size
    would take a large part of a GPU's memory.
    """
    return min(state_bytes, max(largest_part_bytes, _SLOT_BYTES))


class PageBuffer:
    """Device memory for the pages of one direction, with the stream and the events that order its use.

    `handle` is the address of the `Staging` object of csrc/staging.h; `page_bytes` as for `buffer_bytes`.
    """

    def __init__(self, page_bytes: int, device: torch.device, calls: Any) -> None:
        self.slot_bytes = _slot_bytes(page_bytes)
        self.memory = torch.empty(_SLOTS, self.slot_bytes, dtype=torch.uint8, device=device)
        self.handle: int = calls.make_staging(self.memory.data_ptr(), self.slot_bytes, _SLOTS)
        weakref.finalize(self, calls.free_staging, self.handle)

    def pages(self, page_bytes: int) -> torch.Tensor:
        """The first slot as pages, `[pages, page_bytes]` uint8."""
        count = self.slot_bytes // page_bytes
        return self.memory[0, : count * page_bytes].view(count, page_bytes)


@dataclass(frozen=True)
class RegisteredChunks:
    """Host memory registered with CUDA in chunks of `chunk_bytes`; 0 if no copy can cross a boundary."""

    begin: int = 0
    chunk_bytes: int = 0


@dataclass(frozen=True)
class EngineTools:
    """Objects that the engines of one direction share; only `staged` needs a buffer.

    `current_stream` returns the handle of the stream on which steps are enqueued, and `make_event` an event
    with `record`, `query` and `elapsed_time`, for the metrics.
    """

    calls: Any
    device: torch.device
    buffer: PageBuffer | None = None
    chunks: RegisteredChunks = field(default_factory=RegisteredChunks)
    current_stream: Callable[[], int] = lambda: torch.cuda.current_stream().cuda_stream
    make_event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True)


class GpuEngine:
    """Base of the GPU engines: checks page lists and prepares them for compiled code."""

    #: Steps are enqueued, not done, when `copy` returns.
    is_asynchronous = True

    def __init__(self, plan: TransferPlan, tools: EngineTools, to_host: bool) -> None:
        self.plan, self.tools, self.to_host = plan, tools, to_host

    def _check(self, transfer: Transfer) -> None:
        """Check what does not need the GPU: the lengths of both lists, and the host pages."""
        host, device = transfer.host_pages, transfer.device_pages
        if len(host) != len(device):
            raise ValueError(f"{len(device)} device pages for {len(host)} host pages")
        require_pages("host pages", host, self.plan.target_group if self.to_host else self.plan.source_group)

    def _on_device(self, pages: Pages) -> tuple[torch.Tensor, int]:
        """Slots or page indices in device memory, and the number of list entries per page."""
        if isinstance(pages, DevicePages):
            return pages.slots.to(self.tools.device, torch.int64).contiguous(), pages.page_size
        # CUDA copies short lists out of pageable memory before this returns; longer ones wait for the stream.
        return torch.from_numpy(contiguous(pages)).to(self.tools.device, non_blocking=True), 1


def counted_from(
    runs: Sequence[CopyRun], *, source_base: int = 0, target_base: int = 0
) -> tuple[CopyRun, ...]:
    """Copy runs with addresses relative to a base on either side."""
    return tuple(
        replace(
            run,
            source_address=run.source_address - source_base,
            target_address=run.target_address - target_base,
        )
        for run in runs
    )


class KernelJob:
    """The struct `KernelJob` of csrc/staging.h in host memory; with a conversion, each run is one row.

    Then `parts`, the indices of the runs' layers in the group, select their k_scales.
    """

    def __init__(
        self,
        runs: Sequence[CopyRun],
        device: torch.device,
        conversion: RowConversion | None,
        parts: Sequence[int],
    ) -> None:
        table = run_table(runs, device)
        kept = [table]
        pointers = [0, 0, 0]
        if conversion is not None:
            scales = torch.tensor([conversion.k_scales[i] for i in parts], dtype=torch.float32, device=device)
            formats = conversion.row_layouts()
            kept += [*formats, scales]
            pointers = [formats[0].data_ptr(), formats[1].data_ptr(), scales.data_ptr()]
        word_bytes = next(
            (w for w in _WORD_BYTES if not any(n % w for run in runs for n in run.bytes_fields)), 1
        )
        block_bytes = 16 * min([128 * word_bytes, *(run.run_bytes for run in runs)])
        blocks = KERNEL_BLOCKS if conversion else min(KERNEL_BLOCKS, -(-_IN_FLIGHT_BYTES // block_bytes))
        numbers = [table.data_ptr(), len(runs), word_bytes, blocks, *pointers]
        self._numbers = torch.tensor(numbers, dtype=torch.int64)
        self._kept = kept
        self.address = self._numbers.data_ptr()


class CopyJob:
    """The struct `CopyJob` of csrc/staging.h in host memory."""

    def __init__(self, runs: Sequence[CopyRun], chunks: RegisteredChunks) -> None:
        table = run_table(runs)
        numbers = [table.data_ptr(), len(runs), chunks.begin, chunks.chunk_bytes]
        self._numbers = torch.tensor(numbers, dtype=torch.int64)
        self._kept = table
        self.address = self._numbers.data_ptr()


def calls_module(capability: tuple[int, int]) -> Module:
    """The compiled side of the engines, csrc/engine_calls.h, for GPUs of a compute capability (10 s)."""
    major, minor = capability
    # Kernels for 9.0 and newer are compiled for one architecture, as SGLang compiles its own.
    arch = f"{major}.{minor}{'a' if major >= 9 else ''}"
    flags = ("-std=c++20", "-O3")
    return Module("sgl_kvpool_gpu_engines", _SOURCES / "bind_tvm_ffi.cu", flags, cuda_arch=arch)


@cache
def gpu_calls() -> Any:
    """Functions of csrc/engine_calls.h, whose arguments are all int; addresses are not checked.

    Errors as `Module.load`; for example, if there is no CUDA compiler.
    """
    return calls_module(torch.cuda.get_device_capability()).load()
