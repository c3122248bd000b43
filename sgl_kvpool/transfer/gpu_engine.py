"""Common parts of the engines for GPU pools; `engines.py` describes the engines.

Compiled code gets a plan as the structs of csrc/staging.h, which are lists of integers. They are made once,
when both sides of a transfer are known, and keep the memory alive that they point to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from sgl_kvpool.transfer.conversion import RowConversion
from sgl_kvpool.transfer.page_buffer import PageBuffer
from sgl_kvpool.transfer.plan import CopyRun, TransferPlan
from sgl_kvpool.transfer.slots import DevicePages, page_indices

__all__ = [
    "KERNEL_BLOCKS",
    "CopyJob",
    "EngineTools",
    "GpuEngine",
    "KernelJob",
    "RegisteredChunks",
    "contiguous",
    "counted_from",
]

#: Blocks of a kernel, which therefore occupies at most 16 SMs and leaves the others to the model.
KERNEL_BLOCKS = 16
#: Word sizes of the copy kernels, the widest first.
_WORD_BYTES = (16, 8, 4)


@dataclass(frozen=True)
class RegisteredChunks:
    """Host memory that was registered with CUDA chunk by chunk.

    Attributes
    ----------
    begin : int
        Address of the first byte.
    chunk_bytes : int
        Bytes of a chunk; 0 if no copy can cross a chunk boundary.
    """

    begin: int = 0
    chunk_bytes: int = 0


@dataclass(frozen=True)
class EngineTools:
    """Objects that the engines of one direction share.

    Attributes
    ----------
    calls : module
        Module that `gpu_calls` returns.
    device : torch.device
        Device of the pool.
    buffer : PageBuffer or None
        Page buffer; only `staged` needs one.
    chunks : RegisteredChunks
        Chunks of the host tier's memory.
    current_stream : callable
        Returns the handle of the stream on which steps are enqueued.
    make_event : callable
        Makes an event with `record`, `query` and `elapsed_time`, for the metrics.
    """

    calls: Any
    device: torch.device
    buffer: PageBuffer | None = None
    chunks: RegisteredChunks = field(default_factory=RegisteredChunks)
    current_stream: Callable[[], int] = lambda: torch.cuda.current_stream().cuda_stream
    make_event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True)


def contiguous(pages: np.ndarray) -> np.ndarray:
    """Page indices as a contiguous int64 array, as compiled code takes them."""
    return np.ascontiguousarray(pages, dtype=np.int64)


class GpuEngine:
    """Base of the GPU engines: checks page lists and prepares them for compiled code."""

    #: Steps are enqueued, not done, when `copy` returns.
    is_asynchronous = True

    def __init__(self, plan: TransferPlan, tools: EngineTools, to_host: bool) -> None:
        self.plan, self.tools, self.to_host = plan, tools, to_host

    def _sides(self, source: Any, target: Any) -> tuple[Any, Any]:
        """Both arguments, the device's first."""
        return (source, target) if self.to_host else (target, source)

    def _check(self, source: np.ndarray | DevicePages, target: np.ndarray | DevicePages) -> None:
        """Check what does not need the GPU: the lengths of both lists, and the host pages."""
        if len(source) != len(target):
            raise ValueError(f"{len(source)} source pages for {len(target)} target pages")
        _, host_pages = self._sides(source, target)
        _, group = self._sides(self.plan.source_group, self.plan.target_group)
        indices = page_indices(host_pages)
        if len(indices) and not (indices.min() >= 0 and indices.max() < group.num_pages):
            raise ValueError(
                f"host pages {indices.min()} to {indices.max()} requested; there are {group.num_pages}"
            )

    def _on_device(self, pages: np.ndarray | DevicePages) -> tuple[torch.Tensor, int]:
        """Slots or page indices in device memory, and the number of list entries per page."""
        if isinstance(pages, DevicePages) and pages.slots.device == self.tools.device:
            return pages.slots.to(torch.int64).contiguous(), pages.page_size
        pages = page_indices(pages)
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


def _table(runs: Sequence[CopyRun], device: torch.device | str) -> torch.Tensor:
    return torch.tensor([run.row for run in runs], dtype=torch.int64, device=device).view(-1, 8)


class KernelJob:
    """The struct `KernelJob` of csrc/staging.h in host memory.

    Parameters
    ----------
    runs : sequence of CopyRun
    device : torch.device
        Device that runs the kernel.
    conversion : RowConversion, optional
        Conversion of the rows; a run is one row.
    parts : sequence of int
        Indices of the runs' layers in the group, which select their k_scales; only with a conversion.

    Attributes
    ----------
    address : int
    """

    def __init__(
        self,
        runs: Sequence[CopyRun],
        device: torch.device,
        conversion: RowConversion | None = None,
        parts: Sequence[int] = (),
    ) -> None:
        table = _table(runs, device)
        kept = [table]
        pointers = [0, 0, 0]
        if conversion is not None:
            scales = torch.tensor([conversion.k_scales[i] for i in parts], dtype=torch.float32, device=device)
            formats = [torch.tensor(numbers, dtype=torch.int64) for numbers in conversion.numbers()]
            kept += [*formats, scales]
            pointers = [formats[0].data_ptr(), formats[1].data_ptr(), scales.data_ptr()]
        word_bytes = next(
            (w for w in _WORD_BYTES if not any(n % w for run in runs for n in _bytes_of(run))), 1
        )
        numbers = [table.data_ptr(), len(runs), word_bytes, KERNEL_BLOCKS, *pointers]
        self._numbers = torch.tensor(numbers, dtype=torch.int64)
        self._kept = kept
        self.address = self._numbers.data_ptr()


def _bytes_of(run: CopyRun) -> tuple[int, ...]:
    """Fields of a run that are addresses, strides or sizes in bytes."""
    return astuple(replace(run, run_count=0))


class CopyJob:
    """The struct `CopyJob` of csrc/staging.h in host memory.

    Parameters
    ----------
    runs : sequence of CopyRun
    chunks : RegisteredChunks
        Chunks of the host's memory.

    Attributes
    ----------
    address : int
    """

    def __init__(self, runs: Sequence[CopyRun], chunks: RegisteredChunks) -> None:
        table = _table(runs, "cpu")
        numbers = [table.data_ptr(), len(runs), chunks.begin, chunks.chunk_bytes]
        self._numbers = torch.tensor(numbers, dtype=torch.int64)
        self._kept = table
        self.address = self._numbers.data_ptr()
