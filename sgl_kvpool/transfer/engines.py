"""Engines between a GPU pool and the host tier: `staged`, `copy_engine` and `kernel`.

Each engine carries out one plan in one direction on torch's current stream and returns when its steps are
enqueued. SGLang lets that stream wait for earlier work before the call, and records an event after the call
(for loads, after each layer) as the end of the transfer. `staged` has one more stream;
csrc/staging.h explains the order of its steps.

======================  =========================================  ====================================
engine                  device to host                             host to device
======================  =========================================  ====================================
``staged``              a kernel gathers (and encodes) pages into  the copy engine fills the page buffer
                        the page buffer, the copy engine takes     with groups of layers, a kernel
                        whole pages from there                     scatters (and decodes)
``copy_engine``         batches of up to 4096 copies, neighbours joined; page indices on the CPU
``kernel``              a kernel reads and writes pinned host memory itself
======================  =========================================  ====================================
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sgl_kvpool.transfer.gpu_engine import CopyJob, EngineTools, GpuEngine, KernelJob, contiguous
from sgl_kvpool.transfer.plan import TransferPlan
from sgl_kvpool.transfer.slots import DevicePages, page_indices
from sgl_kvpool.transfer.staged_engine import StagedEngine

__all__ = ["GPU_ENGINES", "CopyEngine", "EngineTools", "KernelEngine", "StagedEngine"]


class CopyEngine(GpuEngine):
    """Moves pages with the copy engine alone; see the module's docstring.

    Parameters
    ----------
    plan : TransferPlan
        Plan without a conversion.
    tools : EngineTools
    to_host : bool
        Whether the direction is device to host.
    """

    name = "copy_engine"
    wants_page_indices = True

    def __init__(self, plan: TransferPlan, tools: EngineTools, to_host: bool) -> None:
        super().__init__(plan, tools, to_host)
        if plan.conversion is not None:
            raise ValueError("the copy engine cannot encode or decode rows; use engine staged or kernel")
        self._all = CopyJob(plan.copy_runs, tools.chunks)
        self._one = [
            CopyJob(plan.copy_runs_of([part]), tools.chunks) for part in range(len(plan.source_group.layers))
        ]

    def copy(
        self,
        source_pages: np.ndarray | DevicePages,
        target_pages: np.ndarray | DevicePages,
        part: int | None = None,
    ) -> None:
        """Enqueue copies of pages, all parts or one. Waits for the GPU if a page list is on it."""
        source, target = (contiguous(page_indices(pages)) for pages in (source_pages, target_pages))
        self.plan.check_pages(source, target)
        job = self._all if part is None else self._one[part]
        self.tools.calls.copy_pages(
            job.address,
            source.ctypes.data,
            target.ctypes.data,
            len(source),
            int(not self.to_host),
            self.tools.current_stream(),
        )


class KernelEngine(GpuEngine):
    """Moves pages with a kernel that accesses pinned host memory; see the module's docstring.

    Parameters
    ----------
    plan : TransferPlan
        Plan with or without a conversion.
    tools : EngineTools
    to_host : bool
        Whether the direction is device to host.
    """

    name = "kernel"
    wants_page_indices = False

    def __init__(self, plan: TransferPlan, tools: EngineTools, to_host: bool) -> None:
        super().__init__(plan, tools, to_host)
        parts = range(len(plan.source_group.layers))
        self._all = KernelJob(plan.copy_runs, tools.device, plan.conversion, parts)
        self._one = [
            KernelJob(plan.copy_runs_of([part]), tools.device, plan.conversion, [part]) for part in parts
        ]
        self._uploaded: tuple[Any, Any, tuple] | None = None

    def copy(
        self,
        source_pages: np.ndarray | DevicePages,
        target_pages: np.ndarray | DevicePages,
        part: int | None = None,
    ) -> None:
        """Enqueue a kernel that moves pages, all parts or one."""
        kept = self._uploaded
        if part is None or kept is None or kept[0] is not source_pages or kept[1] is not target_pages:
            self._check(source_pages, target_pages)
            lists = (self._on_device(source_pages), self._on_device(target_pages))
            # The parts of a load have the same lists; the next load has others.
            self._uploaded = kept = (source_pages, target_pages, lists)
        (source, source_stride), (target, target_stride) = kept[2]
        job = self._all if part is None else self._one[part]
        self.tools.calls.kernel_pages(
            job.address,
            source.data_ptr(),
            source_stride,
            target.data_ptr(),
            target_stride,
            len(source_pages),
            self.tools.current_stream(),
        )


#: GPU engines by name.
GPU_ENGINES: dict[str, type] = {engine.name: engine for engine in (StagedEngine, CopyEngine, KernelEngine)}
