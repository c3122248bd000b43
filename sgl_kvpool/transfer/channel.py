"""One direction of transfers: the engine chosen at start, one retry with torch, and the metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from sgl_kvpool import metrics
from sgl_kvpool.transfer.plan import TransferPlan
from sgl_kvpool.transfer.slots import DevicePages, page_indices
from sgl_kvpool.transfer.torch_engine import TorchEngine

logger = logging.getLogger(__name__)

__all__ = ["TransferChannel"]

Pages = np.ndarray | DevicePages


class TransferChannel:
    """Transfers of one plan in one direction.

    Parameters
    ----------
    plan : TransferPlan
    direction : "to_host" or "to_device"
    engine : callable
        Factory that makes the engine of a plan.

    Attributes
    ----------
    engine
        Engine of the plan. With `is_asynchronous` set, it enqueues its steps on the current CUDA stream.
    """

    def __init__(
        self,
        plan: TransferPlan,
        direction: Literal["to_host", "to_device"],
        engine: Callable[[TransferPlan], Any],
    ) -> None:
        self.plan, self.direction = plan, direction
        self.engine: Any = engine(plan)
        self._torch = TorchEngine(plan)
        self._under_way: list[_OnStream] = []

    def run(self, source_pages: Pages, target_pages: Pages, part: int | None = None) -> None:
        """Move pages of all layers, or of the layer at index `part` of the group.

        Returns when the pages are there or, on a GPU, when everything is enqueued on the current stream. If
        the engine fails, torch repeats the transfer once with the same plan: both write the same bytes to the
        same addresses, so whatever the engine left behind is overwritten.

        Raises
        ------
        TypeError, ValueError
            Errors of `TransferPlan.check_pages`; nothing was moved.
        Exception
            If torch fails too. The contents of the target pages are undefined then.
        """
        self._count_finished()
        try:
            self._timed(self.engine, source_pages, target_pages, part)
        except Exception as error:  # torch may succeed, whatever the error
            if isinstance(self.engine, TorchEngine):
                raise
            source, target = page_indices(source_pages), page_indices(target_pages)
            # An invalid list is the caller's error: raise it instead of counting a failure of the engine.
            self.plan.check_pages(source, target)
            kind = {"to_host": "backup", "to_device": "load"}[self.direction]
            metrics.failed(kind, f"{len(source)} pages, engine {self.engine.name}", error=error)
            try:
                self._timed(self._torch, source, target, part)
            except Exception:  # logged here, because SGLang replaces it by an error of its own
                logger.exception("sgl-kvpool: transfer of %d pages %s failed", len(source), self.direction)
                raise

    def _timed(self, engine: Any, source_pages: Pages, target_pages: Pages, part: int | None) -> None:
        size_bytes = len(source_pages) * self.plan.bytes_per_page(None if part is None else [part])
        if engine.is_asynchronous:
            self._on_stream(engine, source_pages, target_pages, part, size_bytes)
            return
        began = time.perf_counter()
        engine.copy(source_pages, target_pages, part)
        metrics.transferred(self.direction, engine.name, size_bytes, time.perf_counter() - began)

    def _on_stream(
        self, engine: Any, source_pages: Pages, target_pages: Pages, part: int | None, size_bytes: int
    ) -> None:
        """Enqueue the next step of the current transfer, or the first step of a new one."""
        last = self._under_way[-1] if self._under_way else None
        if last is None or not last.goes_on(source_pages, target_pages, part):
            last = _OnStream(engine.name, source_pages, target_pages, engine.tools.make_event)
        engine.copy(source_pages, target_pages, part)
        last.end(size_bytes, part)
        # Append only after `end`, because an event that was never recorded counts as reached and has no time.
        if not self._under_way or self._under_way[-1] is not last:
            self._under_way.append(last)

    def _count_finished(self) -> None:
        """Count finished transfers, except the latest, in the metrics, without waiting for any."""
        while len(self._under_way) > 1:
            seconds = self._under_way[0].seconds()
            if seconds is None:
                return
            over = self._under_way.pop(0)
            metrics.transferred(self.direction, over.engine, over.size_bytes, seconds)


class _OnStream:
    """A transfer whose steps are on a stream, between two events; a load has one call per part."""

    def __init__(self, engine: str, source_pages: Pages, target_pages: Pages, make_event: Callable) -> None:
        self.engine, self.size_bytes = engine, 0
        self._lists, self._parts = (source_pages, target_pages), set[int | None]()
        self._began, self._ended = make_event(), make_event()
        self._began.record()

    def goes_on(self, source_pages: Pages, target_pages: Pages, part: int | None) -> bool:
        """Whether a call continues this transfer with another part."""
        same = source_pages is self._lists[0] and target_pages is self._lists[1]
        return same and part is not None and part not in self._parts

    def end(self, size_bytes: int, part: int | None) -> None:
        """Mark everything that was enqueued so far as part of this transfer."""
        self.size_bytes += size_bytes
        self._parts.add(part)
        self._ended.record()

    def seconds(self) -> float | None:
        """Duration of the transfer; None while it is under way."""
        if not self._ended.query():
            return None
        return self._began.elapsed_time(self._ended) / 1e3
