"""What the engines of GPU pools have in common; `engines.py` says what they do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sgl_kvpool.transfer.jobs import RegisteredPieces
from sgl_kvpool.transfer.page_buffer import PageBuffer
from sgl_kvpool.transfer.plan import TransferPlan
from sgl_kvpool.transfer.slots import DevicePages, page_numbers

__all__ = ["EngineTools", "GpuEngine", "contiguous"]


@dataclass(frozen=True)
class EngineTools:
    """What engines of one direction share.

    Attributes
    ----------
    calls : module
        Of `gpu_calls`.
    device : torch.device
        Of the pool.
    buffer : PageBuffer or None
        Only `staged` needs it.
    pieces : RegisteredPieces
        Of the host tier.
    current_stream : callable
        Number of the stream that steps are to be enqueued on.
    make_event : callable
        An event with `record`, `query` and `elapsed_time`, for the metrics.
    """

    calls: Any
    device: torch.device
    buffer: PageBuffer | None = None
    pieces: RegisteredPieces = field(default_factory=RegisteredPieces)
    current_stream: Callable[[], int] = lambda: torch.cuda.current_stream().cuda_stream
    make_event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True)


def contiguous(pages: np.ndarray) -> np.ndarray:
    """Page numbers as compiled code takes them."""
    return np.ascontiguousarray(pages, dtype=np.int64)


class GpuEngine:
    """Which side is the device, and lists as compiled code takes them."""

    #: Steps are enqueued, not done, when `copy` returns.
    is_asynchronous = True

    def __init__(self, plan: TransferPlan, tools: EngineTools, to_host: bool) -> None:
        self.plan, self.tools, self.to_host = plan, tools, to_host

    def _sides(self, source: Any, target: Any) -> tuple[Any, Any]:
        """Device first."""
        return (source, target) if self.to_host else (target, source)

    def _check(self, source: np.ndarray | DevicePages, target: np.ndarray | DevicePages) -> None:
        """What can be checked without waiting for the GPU: lengths, and the host's pages."""
        if len(source) != len(target):
            raise ValueError(f"{len(source)} source pages for {len(target)} target pages")
        _, host_pages = self._sides(source, target)
        _, group = self._sides(self.plan.source_group, self.plan.target_group)
        numbers = page_numbers(host_pages)
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < group.num_pages):
            raise ValueError(
                f"host pages {numbers.min()} to {numbers.max()} asked for; there are {group.num_pages}"
            )

    def _on_device(self, pages: np.ndarray | DevicePages) -> tuple[torch.Tensor, int]:
        """Slots, or page numbers, in device memory, and slots per page."""
        if isinstance(pages, DevicePages) and pages.slots.device == self.tools.device:
            return pages.slots.to(torch.int64).contiguous(), pages.page_size
        pages = page_numbers(pages)
        # Short lists are copied before this returns, from wherever they are; longer ones wait for the stream.
        return torch.from_numpy(contiguous(pages)).to(self.tools.device, non_blocking=True), 1
