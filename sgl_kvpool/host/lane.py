"""One direction of transfers: the engine that was fixed at start, one retry by torch, and the metrics."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal

import numpy as np

from sgl_kvpool import metrics
from sgl_kvpool.host.plan import TransferPlan
from sgl_kvpool.host.torch_engine import TorchEngine

logger = logging.getLogger(__name__)

__all__ = ["Lane"]


class Lane:
    """Transfers of one plan in one direction.

    Parameters
    ----------
    plan : TransferPlan
    direction : "to_host" or "to_device"
    engine : type
        Of `cpu_engine.engine_class`.
    """

    def __init__(self, plan: TransferPlan, direction: Literal["to_host", "to_device"], engine: type) -> None:
        self.plan, self.direction = plan, direction
        self.engine: Any = engine(plan)
        self._torch = TorchEngine(plan)

    def run(self, source_pages: np.ndarray, target_pages: np.ndarray, part: int | None = None) -> None:
        """Copy pages of all layers, or of one by its place in the group, and return when they are there.

        A failed engine is followed by torch, once, with the same plan: both write the same bytes to the same
        places, so whatever the first has left behind is overwritten.

        Raises
        ------
        TypeError, ValueError
            As `TransferPlan.check_pages`; nothing was copied.
        Exception
            Torch failed too. What the target pages hold is not known.
        """
        try:
            self._timed(self.engine, source_pages, target_pages, part)
        except Exception as error:  # whatever it is, torch may still do it
            if isinstance(self.engine, TorchEngine):
                raise
            # A bad list is nobody's failure but the caller's.
            self.plan.check_pages(source_pages, target_pages)
            kind = {"to_host": "backup", "to_device": "load"}[self.direction]
            metrics.failed(kind, f"{len(source_pages)} pages, engine {self.engine.name}", error=error)
            try:
                self._timed(self._torch, source_pages, target_pages, part)
            except Exception:  # logged here: on the way out SGLang puts an error of its own on top
                logger.exception(
                    "sgl-kvpool: transfer of %d pages %s failed", len(source_pages), self.direction
                )
                raise

    def _timed(self, engine: Any, source_pages: np.ndarray, target_pages: np.ndarray, part: int | None):
        began = time.perf_counter()
        engine.copy(source_pages, target_pages, part)
        seconds = time.perf_counter() - began
        size_bytes = len(source_pages) * self.plan.bytes_per_page(None if part is None else [part])
        metrics.transferred(self.direction, engine.name, size_bytes, seconds)
