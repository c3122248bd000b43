"""The `cpu` engine: transfers between two places in host memory, with streaming stores and threads.

tvm-ffi, a dependency of SGLang, compiles it with g++ on first use (4 s) and caches the result.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sgl_kvpool import metrics
from sgl_kvpool.compiler import cpu_flags, ninja_on_path
from sgl_kvpool.transfer.plan import CopyRun, TransferPlan
from sgl_kvpool.transfer.torch_engine import TorchEngine

logger = logging.getLogger(__name__)

__all__ = ["CpuEngine", "engine_class"]

_SOURCES = Path(__file__).resolve().parent / "csrc"


@cache
def _module() -> Any:
    from tvm_ffi import cpp

    # A damaged file in the cache ends the process without a message, so this is logged before.
    logger.info("sgl-kvpool: loading engine cpu, which tvm-ffi compiles and keeps in its cache folder")
    with ninja_on_path():
        return cpp.load(
            "sgl_kvpool_cpu_engine",
            sources=[str(_SOURCES / "cpu_engine.cpp")],
            extra_cflags=cpu_flags(torch.backends.cpu.get_cpu_capability()),
            extra_include_paths=[str(_SOURCES)],
        )


def engine_class(*, required: bool = False) -> type[CpuEngine] | type[TorchEngine]:
    """`CpuEngine`, or `TorchEngine` if that cannot be built; the failure is logged and counted.

    Parameters
    ----------
    required : bool
        Whether to raise the error instead.
    """
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

    Parameters
    ----------
    plan : TransferPlan
    threads : int, optional
        Maximum number of threads; torch's by default. Each copies a share of the (copy run, page) pairs.

    Raises
    ------
    Exception
        If the engine cannot be compiled here: an error of tvm-ffi, or of its import.
    """

    name = "cpu"
    is_asynchronous = False
    #: Whether `copy` needs the indices of device pages on the CPU; otherwise it takes slot lists as they are.
    wants_page_indices = True

    def __init__(self, plan: TransferPlan, threads: int | None = None) -> None:
        self.plan = plan
        self.threads = torch.get_num_threads() if threads is None else threads
        self._module = _module()
        self._all_layers = self._prepared(plan.copy_runs)
        self._one_layer = [
            self._prepared(plan.copy_runs_of([part])) for part in range(len(plan.source_group.layers))
        ]
        if plan.conversion is not None:
            self._formats = [
                torch.tensor(numbers, dtype=torch.int64) for numbers in plan.conversion.numbers()
            ]
            self._k_scales = torch.tensor(plan.conversion.k_scales, dtype=torch.float32)

    @staticmethod
    def _prepared(copy_runs: Sequence[CopyRun]) -> torch.Tensor:
        """Copy runs as the compiled side takes them, `[runs, 8]` int64."""
        return torch.tensor([run.row for run in copy_runs], dtype=torch.int64).view(-1, 8)

    def copy(self, source_pages: np.ndarray, target_pages: np.ndarray, part: int | None = None) -> None:
        """Copy pages, and return when they are there.

        Parameters
        ----------
        source_pages, target_pages : ndarray [pages], integers
            Page indices; page `source_pages[i]` is copied to page `target_pages[i]`.
        part : int, optional
            Index of a layer in the group; all layers by default.

        Raises
        ------
        TypeError, ValueError
            Errors of `TransferPlan.check_pages`, before anything is copied.
        """
        self.plan.check_pages(source_pages, target_pages)
        runs = self._all_layers if part is None else self._one_layer[part]
        if not len(runs) or not len(source_pages):
            return
        pages = [
            torch.from_numpy(np.ascontiguousarray(p, dtype=np.int64)) for p in (source_pages, target_pages)
        ]
        if self.plan.conversion is None:
            self._module.copy_pages(runs, *pages, self.threads)
            return
        k_scales = self._k_scales if part is None else self._k_scales[part : part + 1]
        self._module.convert_pages(runs, *pages, *self._formats, k_scales, self.threads)
