"""The engines without GPU code: `cpu`, between two places in host memory, and `torch`, where others fail."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from sgl_kvpool import metrics
from sgl_kvpool.compiler import Module, cpu_flags
from sgl_kvpool.transfer.plan import TransferPlan, run_table
from sgl_kvpool.transfer.slots import Transfer, contiguous

_SOURCES = Path(__file__).resolve().parent / "csrc"


class TorchEngine:
    """Carries out transfers of one plan with torch: per layer a gather, a copy between devices, a scatter."""

    name = "torch"
    is_asynchronous = False
    #: Whether `copy` needs the indices of device pages on the CPU; otherwise it takes slot lists as they are.
    wants_page_indices = True

    def __init__(self, plan: TransferPlan) -> None:
        self.plan = plan

    def copy(self, transfer: Transfer, part: int | None = None) -> None:
        lists, plan = transfer.page_indices(), self.plan
        plan.check_pages(*lists)
        ours, theirs = plan.source_group, plan.target_group
        source_pages, target_pages = (torch.from_numpy(contiguous(pages)) for pages in lists)
        for number in range(len(ours.layers)) if part is None else (part,):
            from_bytes = plan.source.view(ours, ours.layers[number].runs)
            moved = self._converted(from_bytes[source_pages.to(from_bytes.device)], number)
            into = plan.target.view(theirs, theirs.layers[number].runs)
            moved = moved.reshape(len(target_pages), *into.shape[1:])
            into[target_pages.to(into.device)] = moved.to(into.device)

    def _converted(self, moved: torch.Tensor, part: int) -> torch.Tensor:
        """Bytes of some pages of a layer in the target's format, int8; converted: `[tokens, row_bytes]`."""
        conversion = self.plan.conversion
        if conversion is None:
            return moved
        rows = moved.view(torch.uint8).reshape(-1, conversion.source.row_bytes)
        return conversion.convert(rows, part).view(torch.int8)


@cache
def _module() -> Any:
    flags = cpu_flags(torch.backends.cpu.get_cpu_capability())
    return Module("sgl_kvpool_cpu_engine", _SOURCES / "cpu_engine.cpp", flags).load()


def engine_class(*, required: bool = False) -> type[CpuEngine] | type[TorchEngine]:
    """`CpuEngine`; if it cannot be built, an error if `required`, else `TorchEngine`, logged and counted."""
    try:
        _module()
    except Exception as error:  # no compiler, no tvm-ffi, a cache folder that cannot be written
        if required:
            raise
        metrics.failed("engine_build", f"engine {CpuEngine.name}", error=error)
        return TorchEngine
    return CpuEngine


class CpuEngine:
    """Carries out transfers of one plan between two places in host memory.

    Each of up to `threads` threads, by default torch's number, copies a share of the (copy run, page) pairs.
    """

    name = "cpu"
    is_asynchronous = False
    wants_page_indices = True

    def __init__(self, plan: TransferPlan, threads: int | None = None) -> None:
        self.plan = plan
        self.threads = torch.get_num_threads() if threads is None else threads
        self._module = _module()
        self._runs = plan.by_part(lambda runs, parts: run_table(runs))
        if plan.conversion is not None:
            self._k_scales = torch.tensor(plan.conversion.k_scales, dtype=torch.float32)

    def copy(self, transfer: Transfer, part: int | None = None) -> None:
        """Copy pages of all layers, or of the layer at index `part` of the group; return when they are there.

        Errors of `TransferPlan.check_pages` are raised before anything is copied.
        """
        lists = transfer.page_indices()
        self.plan.check_pages(*lists)
        runs = self._runs[part]
        if not len(runs) or not len(transfer):
            return
        torch.get_num_threads()  # gives this thread torch's number, beyond which our C++ starts its own
        pages, conversion = [torch.from_numpy(contiguous(p)) for p in lists], self.plan.conversion
        if conversion is None:
            self._module.copy_pages(runs, *pages, self.threads)
            return
        k_scales = self._k_scales if part is None else self._k_scales[part : part + 1]
        self._module.convert_pages(runs, *pages, *conversion.row_layouts(), k_scales, self.threads)
