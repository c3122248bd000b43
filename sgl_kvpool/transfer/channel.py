"""One direction of transfers: the engine chosen at start, one retry with torch, and the metrics."""

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sgl_kvpool import metrics
from sgl_kvpool.layout import RowFormat
from sgl_kvpool.memory.canonical import CanonicalKVCaches
from sgl_kvpool.transfer.conversion import RowConversion
from sgl_kvpool.transfer.cpu_engine import TorchEngine, engine_class
from sgl_kvpool.transfer.engines import GPU_ENGINES, EngineTools, StagedEngine
from sgl_kvpool.transfer.gpu_engine import PageBuffer, RegisteredChunks
from sgl_kvpool.transfer.host_options import CPU_ENGINE
from sgl_kvpool.transfer.plan import TransferPlan
from sgl_kvpool.transfer.slots import Transfer, host_view, packed_view

logger = logging.getLogger(__name__)
Engine = Callable[[TransferPlan], Any]


class TransferChannel:
    """Transfers of one plan in one direction, by the engine that the factory `engine` makes for it."""

    def __init__(
        self, plan: TransferPlan, direction: Literal["to_host", "to_device"], engine: Engine
    ) -> None:
        self.plan, self.direction = plan, direction
        self.engine: Any = engine(plan)
        self._torch = TorchEngine(plan)
        self._under_way: list[_OnStream] = []

    def run(self, transfer: Transfer, part: int | None = None) -> None:
        """Move pages of all layers, or of the layer at index `part` of the group.

        Returns when the pages are there or, on a GPU, when everything is enqueued on the current stream. If
        the engine fails, torch repeats the transfer once with the same plan: both write the same bytes to the
        same addresses, so whatever the engine left behind is overwritten.

        Errors of `TransferPlan.check_pages` before anything is moved; any other if torch fails too, after
        which the contents of the target pages are undefined.
        """
        self._count_finished()
        try:
            self._timed(self.engine, transfer, part)
        except Exception as error:  # torch may succeed, whatever the error
            if isinstance(self.engine, TorchEngine):
                raise
            source, target = transfer.page_indices()
            # An invalid list is the caller's error: raise it instead of counting a failure of the engine.
            self.plan.check_pages(source, target)
            kind = {"to_host": "backup", "to_device": "load"}[self.direction]
            metrics.failed(kind, f"{len(source)} pages, engine {self.engine.name}", error=error)
            try:
                self._timed(self._torch, transfer, part)
            except Exception:  # logged here, because SGLang replaces it by an error of its own
                logger.exception("sgl-kvpool: transfer of %d pages %s failed", len(source), self.direction)
                raise

    def _timed(self, engine: Any, transfer: Transfer, part: int | None) -> None:
        size_bytes = len(transfer) * self.plan.bytes_per_page(part)
        if engine.is_asynchronous:
            self._on_stream(engine, transfer, part, size_bytes)
            return
        began = time.perf_counter()
        engine.copy(transfer, part)
        metrics.transferred(self.direction, engine.name, size_bytes, time.perf_counter() - began)

    def _on_stream(self, engine: Any, transfer: Transfer, part: int | None, size_bytes: int) -> None:
        """Enqueue a transfer or its next part between two events."""
        # One for all channels of a load, whose parts alternate.
        on_stream = transfer.state.get(_OnStream) or _OnStream(engine.name, engine.tools.make_event)
        engine.copy(transfer, part)
        on_stream.end(size_bytes)
        # Append only after `end`, because an event that was never recorded counts as reached and has no time.
        if _OnStream not in transfer.state:
            transfer.state[_OnStream] = on_stream
            self._under_way.append(on_stream)

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

    def __init__(self, engine: str, make_event: Callable) -> None:
        self.engine, self.size_bytes = engine, 0
        self._began, self._ended = make_event(), make_event()
        self._began.record()

    def end(self, size_bytes: int) -> None:
        """Mark everything that was enqueued so far as part of this transfer."""
        self.size_bytes += size_bytes
        self._ended.record()

    def seconds(self) -> float | None:
        """Duration of the transfer; None while it is under way."""
        if not self._ended.query():
            return None
        return self._began.elapsed_time(self._ended) / 1e3


@dataclass(frozen=True)
class EngineRequest:
    """The engine that moves the pages of a host tier; "auto" is `staged` on a GPU.

    `chunks` are those of the host pages, None if they are not pinned. `gpu_calls` loads the compiled side of
    the GPU engines, csrc/engine_calls.h; it is called for GPU pools only.
    """

    engine: str
    chunks: RegisteredChunks | None
    gpu_calls: Callable[[], Any]


@dataclass(frozen=True)
class TransferChannels:
    """Transfer channels of a host tier: the target's rows, those of packed drafts, index keys likewise."""

    to_host: list[TransferChannel]
    to_device: list[TransferChannel]

    @functools.cached_property
    def needs_page_indices(self) -> bool:
        """Whether an engine needs the indices of device pages on the CPU."""
        return any(channel.engine.wants_page_indices for channel in (*self.to_host, *self.to_device))

    @property
    def engines(self) -> str:
        return " and ".join(dict.fromkeys(one.engine.name for one in (*self.to_host, *self.to_device)))

    @property
    def run_bytes(self) -> list[int]:
        """Sizes of the copy runs of a page to the host."""
        return sorted({run.run_bytes for channel in self.to_host for run in channel.plan.copy_runs})


def build_channels(
    pages: torch.Tensor,
    views: Sequence[CanonicalKVCaches],
    device_rows: RowFormat,
    host_rows: RowFormat,
    k_scales: Sequence[Sequence[float]],
    beside: Sequence[CanonicalKVCaches],
    request: EngineRequest,
) -> TransferChannels:
    """Transfer channels between device pools and host pages; an error if a requested engine cannot be built.

    `pages` `[pages, bytes]` uint8, contiguous, are host pages, page-major: the rows of all layers, then the
    unconverted groups of `beside`. For each pool there is a byte view with one group, whose layers follow
    those of the pools before, and the k_scales of its layers. The channels of `beside` follow those of the
    rows.
    """
    plans, offset_bytes = [], 0
    for view, scales in zip(views, k_scales, strict=True):
        (group,) = view.groups
        there = back = content = None
        if device_rows != host_rows:
            there = RowConversion(source=device_rows, target=host_rows, k_scales=tuple(scales))
            back, content = there.reversed(), host_rows.tag
        host = host_view(pages, group, offset_bytes, host_rows, content)
        offset_bytes += host.groups[0].bytes_per_page
        name = group.name
        plans.append((TransferPlan(view, host, name, there), TransferPlan(host, view, name, back)))
    # Padding between pages stays on the host.
    page_bytes = offset_bytes
    for view in beside:
        (group,) = view.groups
        host = packed_view(pages, group, offset_bytes)
        plans.append((TransferPlan(view, host, group.name), TransferPlan(host, view, group.name)))
        offset_bytes += group.bytes_per_page
    return channels_of(plans, page_bytes, request)


def channels_of(
    plans: Sequence[tuple[TransferPlan, TransferPlan]], staged_bytes: int, request: EngineRequest
) -> TransferChannels:
    """Transfer channels of plans to the host and back for each pool, all with the same engines.

    `staged_bytes` is the minimum of a buffer slot: a page of rows, or `staged_state_bytes` for states.
    """
    tensors = plans[0][0].source.tensors
    device = tensors[0].device if tensors else torch.device("cpu")
    if device.type == "cpu":
        to_host: Engine = engine_class(required=request.engine == CPU_ENGINE)
        to_device: Engine = to_host
    else:
        to_host, to_device = _gpu_engines(staged_bytes, device, request)
    return TransferChannels(
        [TransferChannel(there, "to_host", to_host) for there, _ in plans],
        [TransferChannel(back, "to_device", to_device) for _, back in plans],
    )


def _gpu_engines(staged_bytes: int, device: torch.device, request: EngineRequest) -> tuple[Engine, Engine]:
    """Engine factories of both directions: torch's for unpinned memory, or if "auto" cannot be built."""
    if request.chunks is None:  # before the build, which takes 10 s
        return TorchEngine, TorchEngine
    engine = StagedEngine if request.engine == "auto" else GPU_ENGINES[request.engine]
    made: list[Engine] = []
    try:
        calls = request.gpu_calls()
        for to_host in (True, False):
            # The engines of one direction can share a page buffer, because channels use one stream.
            buffer = PageBuffer(staged_bytes, device, calls) if engine is StagedEngine else None
            tools = EngineTools(calls, device, buffer, request.chunks)
            made.append(functools.partial(engine, tools=tools, to_host=to_host))
    except Exception as error:  # no CUDA compiler, no memory for a buffer
        if request.engine != "auto":
            raise
        metrics.failed("engine_build", "the GPU engines", error=error)
        return TorchEngine, TorchEngine
    return made[0], made[1]
