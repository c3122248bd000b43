"""Transfer channels of a host tier: plans and engines of both directions, for target and drafts."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sgl_kvpool import metrics
from sgl_kvpool.layout import RowFormat
from sgl_kvpool.memory.canonical import CanonicalKVCaches
from sgl_kvpool.transfer import engine_choice
from sgl_kvpool.transfer.channel import TransferChannel
from sgl_kvpool.transfer.conversion import RowConversion
from sgl_kvpool.transfer.cpu_engine import engine_class
from sgl_kvpool.transfer.engines import GPU_ENGINES, EngineTools, StagedEngine
from sgl_kvpool.transfer.gpu_engine import RegisteredChunks
from sgl_kvpool.transfer.host_options import CPU_ENGINE
from sgl_kvpool.transfer.page_buffer import PageBuffer
from sgl_kvpool.transfer.page_view import host_view
from sgl_kvpool.transfer.plan import TransferPlan
from sgl_kvpool.transfer.torch_engine import TorchEngine

logger = logging.getLogger(__name__)

__all__ = ["EngineRequest", "TransferChannels", "build_channels", "channels_of"]

Engine = Callable[[TransferPlan], Any]


@dataclass(frozen=True)
class EngineRequest:
    """Inputs to the choice of the engine that moves the pages of a host tier.

    Attributes
    ----------
    engine : str
        Value of --kv-host-engine.
    io_backend : str
        Value of --hicache-io-backend.
    chunks : RegisteredChunks or None
        Chunks of the host pages; None if they are not pinned.
    gpu_calls : callable
        Loader of the compiled side of the GPU engines, csrc/engine_calls.h; called for GPU pools only.
    """

    engine: str
    io_backend: str
    chunks: RegisteredChunks | None
    gpu_calls: Callable[[], Any]


@dataclass(frozen=True)
class TransferChannels:
    """Transfer channels of a host tier: the target's pool first, then the packed drafts' pools.

    Attributes
    ----------
    to_host, to_device : list of TransferChannel
    """

    to_host: list[TransferChannel]
    to_device: list[TransferChannel]

    @functools.cached_property
    def needs_page_indices(self) -> bool:
        """Whether an engine needs the indices of device pages on the CPU."""
        return any(channel.engine.wants_page_indices for channel in (*self.to_host, *self.to_device))

    @property
    def engines(self) -> str:
        """Engine names for a log line."""
        return " and ".join(
            dict.fromkeys(channel.engine.name for channel in (*self.to_host, *self.to_device))
        )

    @property
    def run_bytes(self) -> list[int]:
        """Sizes of the copy runs of a page, in the plan of the first pool to the host."""
        return sorted({run.run_bytes for run in self.to_host[0].plan.copy_runs})


def build_channels(
    pages: torch.Tensor,
    views: Sequence[CanonicalKVCaches],
    places: Sequence[Sequence[int]],
    page_size: int,
    device_rows: RowFormat,
    host_rows: RowFormat,
    k_scales: Sequence[Sequence[float]],
    request: EngineRequest,
) -> TransferChannels:
    """Transfer channels between device pools and host pages.

    Parameters
    ----------
    pages : Tensor [pages, bytes], uint8, contiguous
        Host pages, page-major: the rows of all layers, then whatever the tier keeps behind them.
    views : sequence of CanonicalKVCaches
        Byte views of the pools, with one group each.
    places : sequence of sequences of int
        For each pool, the positions of its layers among the layers of a host page.
    page_size : int
        Tokens of a page.
    device_rows, host_rows : RowFormat
    k_scales : sequence of sequences of float
        For each pool, the k_scales of its layers.
    request : EngineRequest

    Raises
    ------
    Exception
        If the engine that was requested by name cannot be built.
    """
    conversions = [
        None
        if device_rows == host_rows
        else RowConversion(source=device_rows, target=host_rows, k_scales=tuple(scales))
        for scales in k_scales
    ]
    plans = []
    for view, layers, conversion in zip(views, places, conversions, strict=True):
        (group,) = view.groups
        content = None if conversion is None else host_rows.tag
        host = host_view(pages, group, layers, page_size, host_rows, content)
        there = TransferPlan(view, host, group.name, conversion)
        back = TransferPlan(host, view, group.name, None if conversion is None else conversion.reversed())
        plans.append((there, back))
    # Padding between pages stays on the host.
    page_bytes = sum(map(len, places)) * page_size * host_rows.row_bytes
    return channels_of(plans, pages, page_bytes, request)


def channels_of(
    plans: Sequence[tuple[TransferPlan, TransferPlan]],
    pages: torch.Tensor,
    staged_bytes: int,
    request: EngineRequest,
) -> TransferChannels:
    """Transfer channels of plans; the first plan decides which engines they use.

    Parameters
    ----------
    plans : sequence of (TransferPlan, TransferPlan)
        For each pool, the plans to the host and back.
    pages : Tensor [pages, bytes], uint8, contiguous
        Host memory, still unused.
    staged_bytes : int
        Minimum bytes of a buffer slot: a page of rows, or `staged_state_bytes` for states.
    request : EngineRequest
    """
    tensors = plans[0][0].source.tensors
    device = tensors[0].device if tensors else torch.device("cpu")
    if device.type == "cpu":
        to_host: Engine = engine_class(required=request.engine == CPU_ENGINE)
        to_device: Engine = to_host
    else:
        to_host, to_device = _gpu_engines(plans[0][0], pages, staged_bytes, device, request)
    return TransferChannels(
        [TransferChannel(there, "to_host", to_host) for there, _ in plans],
        [TransferChannel(back, "to_device", to_device) for _, back in plans],
    )


def _gpu_engines(
    plan: TransferPlan,
    pages: torch.Tensor,
    staged_bytes: int,
    device: torch.device,
    request: EngineRequest,
) -> tuple[Engine, Engine]:
    """Engine factories of both directions; torch's for "auto" if a GPU engine cannot be built."""
    try:
        return _built_engines(plan, pages, staged_bytes, device, request)
    except Exception as error:  # no CUDA compiler, no memory for a buffer, a failed measurement
        if request.engine != "auto":
            raise
        metrics.failed("engine_build", "the GPU engines", error=error)
        return TorchEngine, TorchEngine


def _built_engines(
    plan: TransferPlan,
    pages: torch.Tensor,
    staged_bytes: int,
    device: torch.device,
    request: EngineRequest,
) -> tuple[Engine, Engine]:
    """As `_gpu_engines`, but raises the error of an engine that cannot be built."""
    chunks = request.chunks
    run_bytes = min((run.run_bytes for run in plan.copy_runs), default=0)
    converts, is_pinned = plan.conversion is not None, chunks is not None
    calls = request.gpu_calls() if is_pinned else None  # torch copies unpinned memory; the build takes 10 s
    wants_rates = request.engine == "auto" and request.io_backend == "direct" and not converts
    rates = engine_choice.measure(calls, pages, chunks, device) if wants_rates and chunks is not None else {}
    made = []
    for direction in ("to_host", "to_device"):
        name, reason = engine_choice.choose(
            request.engine,
            run_bytes=run_bytes,
            converts=converts,
            io_backend=request.io_backend,
            is_pinned=is_pinned,
            rates=rates.get(direction),
        )
        link = f", link {rates[direction].link_gb_per_s:.1f} GB/s" if rates else ""
        logger.info("sgl-kvpool: engine %s %s: %s%s", name, direction.replace("_", " "), reason, link)
        made.append(_maker(name, calls, staged_bytes, device, chunks, direction == "to_host"))
    return made[0], made[1]


def _maker(
    name: str,
    calls: Any,
    staged_bytes: int,
    device: torch.device,
    chunks: RegisteredChunks | None,
    to_host: bool,
) -> Engine:
    """Factory of one direction's engines, which can share a page buffer because channels use one stream."""
    if name == TorchEngine.name or chunks is None:
        return TorchEngine
    engine = GPU_ENGINES[name]
    buffer = PageBuffer(staged_bytes, device, calls) if engine is StagedEngine else None
    return functools.partial(engine, tools=EngineTools(calls, device, buffer, chunks), to_host=to_host)
