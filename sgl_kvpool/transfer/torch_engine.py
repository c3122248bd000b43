"""The `torch` engine: torch's own copies, for host memory that is not pinned and where other engines fail."""

from __future__ import annotations

import numpy as np
import torch

from sgl_kvpool.memory.page_copy import copy_checked_pages
from sgl_kvpool.transfer.plan import TransferPlan

__all__ = ["TorchEngine"]


class TorchEngine:
    """Carries out transfers of one plan with torch: per layer a gather, a copy between devices, a scatter.

    Parameters
    ----------
    plan : TransferPlan
    """

    name = "torch"
    is_asynchronous = False
    #: Whether `copy` needs the indices of device pages on the CPU; otherwise it takes slot lists as they are.
    wants_page_indices = True

    def __init__(self, plan: TransferPlan) -> None:
        self.plan = plan

    def copy(self, source_pages: np.ndarray, target_pages: np.ndarray, part: int | None = None) -> None:
        """As `CpuEngine.copy`."""
        self.plan.check_pages(source_pages, target_pages)
        group = self.plan.source_group
        parts = range(len(group.layers)) if part is None else (part,)
        from_pages, to_pages = (
            torch.from_numpy(np.array(p, dtype=np.int64)) for p in (source_pages, target_pages)
        )
        copy_checked_pages(
            self.plan.source, self.plan.target, group.name, from_pages, to_pages, parts, self._converted
        )

    def _converted(self, moved: torch.Tensor, part: int) -> torch.Tensor:
        """Bytes of some pages of a layer in the target's format, int8; converted: `[tokens, row_bytes]`."""
        conversion = self.plan.conversion
        if conversion is None:
            return moved
        rows = moved.view(torch.uint8).reshape(-1, conversion.source.row_bytes)
        return conversion.convert(rows, part).view(torch.int8)
