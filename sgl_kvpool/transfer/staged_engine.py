"""The `staged` engine: pages are moved through a buffer on the GPU; see `engines.py` and csrc/staging.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sgl_kvpool.memory.canonical import CanonicalGroup, CanonicalKVCaches
from sgl_kvpool.transfer.gpu_engine import (
    CopyJob,
    EngineTools,
    GpuEngine,
    KernelJob,
    contiguous,
    counted_from,
)
from sgl_kvpool.transfer.page_view import packed_view
from sgl_kvpool.transfer.plan import TransferPlan
from sgl_kvpool.transfer.slots import DevicePages, page_indices

__all__ = ["StagedEngine"]

#: Bytes of a page that a load copies at once: enough that the copy takes the link longer (5 us) than its
#: submission takes the CPU (0.6 us), few enough that the first layers arrive early.
_GROUP_BYTES = 256 << 10


@dataclass(frozen=True)
class _Hops:
    """Kernel and copies for some parts of a page, and how many pages of these parts a buffer slot holds."""

    kernel: KernelJob
    copy: CopyJob
    slot_pages: int


class StagedEngine(GpuEngine):
    """Moves pages through the page buffer; see the module's docstring.

    Parameters
    ----------
    plan : TransferPlan
        Plan with or without a conversion. Parts may have different sizes.
    tools : EngineTools
        Tools with a page buffer. Loads move parts in groups; stores move all parts at once, or in groups if
        one slot does not hold all parts.
    to_host : bool
        Whether the direction is device to host.
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
        self._hops = [self._make_hops(group) for group in self._groups]
        self._group_of = {part: i for i, group in enumerate(self._groups) for part in group}
        self._load: _Load | None = None

    def _make_hops(self, parts: Sequence[int]) -> _Hops:
        """Kernel between device pages and a slot, and copies between the slot and host pages, for `parts`."""
        plan = self.plan
        source, target = (
            CanonicalKVCaches(caches.tensors, (_some(group, parts),))
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
            hop = TransferPlan(source, slot, name, conversion).copy_runs
            gathered = counted_from(hop, target_base=base)
            copied = counted_from(TransferPlan(slot, target, name).copy_runs, source_base=base)
            kernel = KernelJob(gathered, self.tools.device, conversion, places)
        else:
            copied = counted_from(TransferPlan(source, slot, name).copy_runs, target_base=base)
            hop = TransferPlan(slot, target, name, conversion).copy_runs
            kernel = KernelJob(counted_from(hop, source_base=base), self.tools.device, conversion, places)
        return _Hops(kernel, CopyJob(copied, self.tools.chunks), len(pages))

    def copy(
        self,
        source_pages: np.ndarray | DevicePages,
        target_pages: np.ndarray | DevicePages,
        part: int | None = None,
    ) -> None:
        """Enqueue the steps that move pages: all parts, or in a load the group of parts that contains `part`.

        SGLang loads one part after the other, with the same lists. The first part of a group loads the whole
        group. A store ignores `part`: SGLang stores all parts at once.
        """
        device_pages, host_pages = self._sides(source_pages, target_pages)
        stream = self.tools.current_stream()
        if self.to_host:
            self._check(source_pages, target_pages)
            self._store(device_pages, page_indices(host_pages), stream)
            return
        load = self._load
        if part is None or load is None or not load.goes_on(device_pages, host_pages, part):
            self._load = None
            self._check(source_pages, target_pages)
            slots, stride = self._on_device(device_pages)
            load = _Load(device_pages, host_pages, slots, stride, contiguous(page_indices(host_pages)))
            self.tools.calls.begin(self._buffer.handle, stream)
        self._load = None  # if the following fails, the next request starts a new load
        for group in range(len(self._groups)) if part is None else [self._group_of[part]]:
            if group not in load.groups:
                self._load_group(load, group, stream)
                load.groups.add(group)
        load.parts.update(self._group_of if part is None else [part])
        self._load = load

    def _store(self, device_pages: np.ndarray | DevicePages, host_pages: np.ndarray, stream: int) -> None:
        slots, stride = self._on_device(device_pages)
        host_pages = contiguous(host_pages)
        self.tools.calls.begin(self._buffer.handle, stream)
        for hops in self._hops:
            self.tools.calls.staged_store(
                self._buffer.handle,
                hops.kernel.address,
                hops.copy.address,
                slots.data_ptr(),
                stride,
                host_pages.ctypes.data,
                len(host_pages),
                hops.slot_pages,
                stream,
            )

    def _load_group(self, load: _Load, group: int, stream: int) -> None:
        hops = self._hops[group]
        self.tools.calls.staged_load(
            self._buffer.handle,
            hops.copy.address,
            hops.kernel.address,
            load.host_page_indices.ctypes.data,
            load.slots.data_ptr(),
            load.stride,
            len(load.host_page_indices),
            hops.slot_pages,
            stream,
        )


class _Load:
    """A load that is under way: its lists, their copies for compiled code, and the parts requested so far."""

    def __init__(
        self,
        device_pages: Any,
        host_pages: Any,
        slots: torch.Tensor,
        stride: int,
        host_page_indices: np.ndarray,
    ):
        self._lists = (device_pages, host_pages)
        self.slots, self.stride, self.host_page_indices = slots, stride, host_page_indices
        self.groups: set[int] = set()
        self.parts: set[int] = set()

    def goes_on(self, device_pages: Any, host_pages: Any, part: int) -> bool:
        """Whether a request continues this load: the same lists, and a part not requested yet."""
        same = device_pages is self._lists[0] and host_pages is self._lists[1]
        return same and part not in self.parts


def _some(group: CanonicalGroup, parts: Sequence[int]) -> CanonicalGroup:
    return replace(group, layers=tuple(group.layers[i] for i in parts))


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
