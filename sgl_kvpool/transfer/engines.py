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

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from sgl_kvpool.memory.canonical import CanonicalGroup, CanonicalKVCaches
from sgl_kvpool.transfer.gpu_engine import CopyJob, EngineTools, GpuEngine, KernelJob, counted_from
from sgl_kvpool.transfer.plan import TransferPlan
from sgl_kvpool.transfer.slots import Transfer, contiguous, packed_view

#: Bytes of a page that a load copies at once: enough that the copy takes the link longer (5 us) than its
#: submission takes the CPU (0.6 us), few enough that the first layers arrive early.
_GROUP_BYTES = 256 << 10


@dataclass(frozen=True)
class _TwoSteps:
    """Kernel and copies for some parts of a page, and how many pages of these parts a buffer slot holds."""

    kernel: KernelJob
    copy: CopyJob
    slot_pages: int


class StagedEngine(GpuEngine):
    """Moves pages through the page buffer; see the module's docstring.

    Loads move parts in groups; stores move all parts at once, or in groups if one slot does not hold all
    parts. Parts may have different sizes.
    """

    name = "staged"
    wants_page_indices = False

    def __init__(self, plan: TransferPlan, tools: EngineTools, to_host: bool) -> None:
        super().__init__(plan, tools, to_host)
        if tools.buffer is None:
            raise ValueError("engine staged needs a page buffer")
        self._buffer = tools.buffer
        host = plan.target_group if to_host else plan.source_group
        parts = range(len(host.layers))
        # A pipeline stage may have no layer.
        wanted = self._buffer.slot_bytes if to_host else _GROUP_BYTES
        self._groups: list[range] = _groups(host, wanted, self._buffer.slot_bytes) if parts else []
        self._steps = [self._make_steps(group) for group in self._groups]
        self._group_of = {part: i for i, group in enumerate(self._groups) for part in group}

    def _make_steps(self, parts: Sequence[int]) -> _TwoSteps:
        """Kernel between device pages and a slot, and copies between the slot and host pages, for `parts`."""
        plan = self.plan
        source, target = (
            CanonicalKVCaches(caches.tensors, (replace(group, layers=tuple(group.layers[i] for i in parts)),))
            for caches, group in ((plan.source, plan.source_group), (plan.target, plan.target_group))
        )
        host = target if self.to_host else source
        (group,) = host.groups
        pages = self._buffer.pages(group.bytes_per_page)
        slot = packed_view(pages, group)
        conversion = plan.conversion
        if conversion is not None:
            conversion = replace(conversion, k_scales=tuple(conversion.k_scales[i] for i in parts))
        name, base, places = group.name, self._buffer.memory.data_ptr(), range(len(parts))
        if self.to_host:
            moved = counted_from(TransferPlan(source, slot, name, conversion).copy_runs, target_base=base)
            copied = counted_from(TransferPlan(slot, target, name).copy_runs, source_base=base)
        else:
            copied = counted_from(TransferPlan(source, slot, name).copy_runs, target_base=base)
            moved = counted_from(TransferPlan(slot, target, name, conversion).copy_runs, source_base=base)
        kernel = KernelJob(moved, self.tools.device, conversion, places)
        return _TwoSteps(kernel, CopyJob(copied, self.tools.chunks), len(pages))

    def copy(self, transfer: Transfer, part: int | None = None) -> None:
        """Enqueue the steps that move pages: all parts, or in a load the group of parts that contains `part`.

        The first part of a group loads the whole group. A store ignores `part`: SGLang stores all parts at
        once.
        """
        stream = self.tools.current_stream()
        if self.to_host:
            lists = self._begun(transfer, stream)
            for steps in self._steps:
                self.tools.calls.staged_store(
                    self._buffer.handle,
                    steps.kernel.address,
                    steps.copy.address,
                    lists.slots.data_ptr(),
                    lists.stride,
                    lists.host_pages.ctypes.data,
                    len(lists.host_pages),
                    steps.slot_pages,
                    stream,
                )
            return
        # If the following fails, the next part begins anew.
        load = transfer.state.pop(self, None) or self._begun(transfer, stream)
        for group in range(len(self._groups)) if part is None else [self._group_of[part]]:
            if group not in load.groups:
                self._load_group(load, group, stream)
                load.groups.add(group)
        transfer.state[self] = load

    def _begun(self, transfer: Transfer, stream: int) -> _Lists:
        self._check(transfer)
        lists = _Lists(*self._on_device(transfer.device_pages), contiguous(transfer.host_pages))
        self.tools.calls.begin(self._buffer.handle, stream)
        return lists

    def _load_group(self, load: _Lists, group: int, stream: int) -> None:
        steps = self._steps[group]
        self.tools.calls.staged_load(
            self._buffer.handle,
            steps.copy.address,
            steps.kernel.address,
            load.host_pages.ctypes.data,
            load.slots.data_ptr(),
            load.stride,
            len(load.host_pages),
            steps.slot_pages,
            stream,
        )


@dataclass
class _Lists:
    """Lists of a transfer as compiled code takes them, and the groups of a load that were enqueued so far."""

    slots: torch.Tensor
    stride: int
    host_pages: np.ndarray
    groups: set[int] = field(default_factory=set)


def _groups(host: CanonicalGroup, wanted_bytes: int, most_bytes: int) -> list[range]:
    """Consecutive parts, grouped until they reach `wanted_bytes` without exceeding `most_bytes`."""
    groups: list[range] = []
    first, size_bytes = 0, 0
    for part, layer in enumerate(host.layers):
        if first < part and size_bytes + layer.runs.size_bytes > most_bytes:
            groups.append(range(first, part))
            first, size_bytes = part, 0
        size_bytes += layer.runs.size_bytes
        if size_bytes >= wanted_bytes or part == len(host.layers) - 1:
            groups.append(range(first, part + 1))
            first, size_bytes = part + 1, 0
    return groups


class CopyEngine(GpuEngine):
    """Moves pages with the copy engine alone; for plans without a conversion; see the module's docstring."""

    name = "copy_engine"
    wants_page_indices = True

    def __init__(self, plan: TransferPlan, tools: EngineTools, to_host: bool) -> None:
        super().__init__(plan, tools, to_host)
        if plan.conversion is not None:
            raise ValueError("the copy engine cannot encode or decode rows; use engine staged or kernel")
        self._jobs = plan.by_part(lambda runs, parts: CopyJob(runs, tools.chunks))

    def copy(self, transfer: Transfer, part: int | None = None) -> None:
        """Enqueue copies of pages, all parts or one. Waits for the GPU if a page list is on it."""
        source, target = map(contiguous, transfer.page_indices())
        self.plan.check_pages(source, target)
        self.tools.calls.copy_pages(
            self._jobs[part].address,
            source.ctypes.data,
            target.ctypes.data,
            len(source),
            int(not self.to_host),
            self.tools.current_stream(),
        )


class KernelEngine(GpuEngine):
    """Moves pages with a kernel that accesses pinned host memory; see the module's docstring."""

    name = "kernel"
    wants_page_indices = False

    def __init__(self, plan: TransferPlan, tools: EngineTools, to_host: bool) -> None:
        super().__init__(plan, tools, to_host)
        self._jobs = plan.by_part(lambda runs, parts: KernelJob(runs, tools.device, plan.conversion, parts))

    def copy(self, transfer: Transfer, part: int | None = None) -> None:
        lists = transfer.state.get(self)
        if lists is None:
            self._check(transfer)
            ends = transfer.device_pages, transfer.host_pages
            lists = [self._on_device(pages) for pages in (ends if self.to_host else ends[::-1])]
            transfer.state[self] = lists
        (source, source_stride), (target, target_stride) = lists
        self.tools.calls.kernel_pages(
            self._jobs[part].address,
            source.data_ptr(),
            source_stride,
            target.data_ptr(),
            target_stride,
            len(transfer),
            self.tools.current_stream(),
        )


#: GPU engines by name.
GPU_ENGINES: dict[str, type] = {engine.name: engine for engine in (StagedEngine, CopyEngine, KernelEngine)}
