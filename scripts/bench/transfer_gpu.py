"""The GPU part of `bench transfer`: our engines beside SGLang's backends and a pinned copy.

Rates of engines and backends are ratios to torch's copy of as many bytes between pinned memory and the device
in the same run, which is the limit of the link. With another layout on the host, the copy has as
many bytes as cross the link.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch

from scripts.bench.attention.cases import Workload
from scripts.bench.attention.inputs import make_problem
from scripts.bench.attention.peers import Kvpool
from scripts.bench.device import CudaDevice
from scripts.bench.measurements import is_ours, what
from scripts.bench.sweep import Skipped, verdict
from sgl_kvpool import KVArrangement, MLAKVCacheLayout
from sgl_kvpool.connectors.allocation import allocate_cross_layer, as_canonical
from sgl_kvpool.connectors.cross_layer import LayerPages
from sgl_kvpool.layout import Encoding
from sgl_kvpool.memory.canonical import CanonicalGroup, CanonicalKVCaches, LayerReference, TensorList
from sgl_kvpool.memory.runs import PageRuns
from sgl_kvpool.transfer.conversion import RowConversion
from sgl_kvpool.transfer.engines import GPU_ENGINES, EngineTools
from sgl_kvpool.transfer.gpu_engine import PageBuffer, gpu_calls
from sgl_kvpool.transfer.plan import TransferPlan
from sgl_kvpool.transfer.slots import DevicePages, Transfer, host_view

LAYERS, PAGE_SIZE = 61, 64
PAGES = (16, 64, 256, 1024)
ROUNDS = 7
#: SGLang's backends, each with its label of a host pool's layout.
_SGLANG = {"kernel": "page_first", "direct": "page_first_direct"}
#: Calls in sequence without a wait, for the back-to-back rate.
IN_A_ROW = 4


def caches(
    arrangement: KVArrangement,
    pages: int,
    page_bytes: int,
    device: torch.device | str = "cpu",
    layer_count: int = LAYERS,
    page_size: int = PAGE_SIZE,
) -> CanonicalKVCaches:
    """Byte view of layers in memory that has been touched."""
    if not arrangement.has_contiguous_layers:
        members = [
            LayerPages(
                name=i, page_bytes=page_bytes, backend="bench", page_size_tokens=page_size, content="bytes"
            )
            for i in range(layer_count)
        ]
        groups = allocate_cross_layer([members], pages=pages, arrangement=arrangement, device=device)
        groups[0].tensor.fill_(1)
        return as_canonical(groups, ["kv"])
    tensors, layers = TensorList(), []
    for layer in range(layer_count):
        index = tensors.add(torch.ones(pages, page_bytes, dtype=torch.int8, device=device))
        runs = PageRuns(tensor_index=index, offset_bytes=0, run_bytes=page_bytes)
        layers.append(LayerReference(layer_id=layer, part="kv", runs=runs, content="bytes"))
    group = CanonicalGroup(name="kv", layers=tuple(layers), num_pages=pages, page_size_tokens=page_size)
    return CanonicalKVCaches(tuple(tensors.tensors), (group,))


class Timed(NamedTuple):
    """Times of calls that ran concurrently, in seconds.

    `submit`: CPU time to submit all calls.
    `until_done`: Time from the start of the first call to the end of the last.
    `own`: Time of each call on its own stream.
    """

    submit: float
    until_done: float
    own: list[float]


class Gpu:
    """Memory, streams and clocks of a CUDA device; tests without a GPU replace this class."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.streams = [torch.cuda.Stream(self.device) for _ in range(2)]

    def tools(self, page_bytes: int) -> EngineTools:
        """Tools of an engine for one direction."""
        calls = gpu_calls()
        return EngineTools(calls, self.device, PageBuffer(page_bytes, self.device, calls))

    def pinned(self, *shape: int) -> torch.Tensor:
        """Pinned host memory that has been touched."""
        return torch.zeros(shape, dtype=torch.uint8, pin_memory=True)

    def timed(self, *calls: Callable[[], object]) -> Timed:
        """Times of concurrent calls, each on its own stream."""
        torch.cuda.synchronize()
        pairs = []
        submit = 0.0
        for call, stream in zip(calls, self.streams, strict=False):
            with torch.cuda.stream(stream):
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record()
                before = time.perf_counter()
                call()
                submit += time.perf_counter() - before
                ended.record()
                pairs.append((began, ended))
        torch.cuda.synchronize()
        first = pairs[0][0]
        until_done = max(first.elapsed_time(ended) for _, ended in pairs) / 1e3
        return Timed(submit, until_done, [began.elapsed_time(ended) / 1e3 for began, ended in pairs])

    def model_step(self) -> Callable[[], object]:
        """A load like a decode step's, bound by device memory: 61 reads of 64 MB."""
        weights = torch.zeros(32 << 20, dtype=torch.bfloat16, device=self.device)
        return lambda: [weights.sum() for _ in range(61)]

    @cached_property
    def decode_step(self) -> Callable[[], object]:
        """The attention of a decode step, `fp4` rows, as a CUDA graph: its programs fill all SMs at once."""
        device, runner = CudaDevice(), Kvpool()
        runner.load(device)
        fmt, work = MLAKVCacheLayout("fp4").row_format(512, 64), decode_workload(device.sm_count)
        self._kept = prepared = runner.prepare(make_problem(work, fmt, device))  # memory of the graph
        prepared.calls[0]()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAYERS):
                prepared.calls[0]()
        return graph.replay


def decode_workload(sm_count: int) -> Workload:
    """Lists of 16 heads of which 4 splits each are two programs per SM."""
    return Workload("dense", 16, sm_count // 2, 8192, 8192)


def median(gpu: Gpu, *calls: Callable[[], object]) -> Timed:
    """Medians of `Gpu.timed` over `ROUNDS` rounds, after a round of warm-up."""
    rounds = [gpu.timed(*calls) for _ in range(ROUNDS + 1)][1:]
    return Timed(
        statistics.median(r.submit for r in rounds),
        statistics.median(r.until_done for r in rounds),
        [statistics.median(times) for times in zip(*(r.own for r in rounds), strict=True)],
    )


def page_counts(quick: bool) -> tuple[int, ...]:
    return PAGES[:2] if quick else PAGES


def cases(shapes: Sequence[dict[str, Any]], *, quick: bool) -> list[dict[str, Any]]:
    """All engines, page counts and both orders for each shape of a pool; then SGLang's backends.

    The copy engine neither converts nor moves single rows: a call for 1024 pages of token-major rows would
    submit four million copies of 0.5 us each.
    """
    found: list[dict[str, Any]] = []
    for shape in shapes:
        shape = {"host_layout": shape["layout"], "arrangement": "layer_major", **shape}
        long_runs = shape["host_layout"] == shape["layout"] and shape["arrangement"] != "token_major"
        found += [
            {**shape, "engine": engine, "pages": pages, "scattered": scattered}
            for engine in GPU_ENGINES
            if engine != "copy_engine" or long_runs
            for pages in page_counts(quick)
            for scattered in (True, False)
        ]
    return found + [
        {"runner": f"sglang {io_backend}", "pages": pages}
        for io_backend in _SGLANG
        for pages in page_counts(quick)
    ]


class _Shape:
    """A pool and a pinned page-major host tier, and an engine's two directions."""

    def __init__(self, gpu: Gpu, case: dict[str, Any], layers: int, page_size: int, available: int) -> None:
        own, other = (MLAKVCacheLayout(case[name]).row_format(512, 64) for name in ("layout", "host_layout"))
        arrangement = KVArrangement(case["arrangement"])
        device = caches(arrangement, available, page_size * own.row_bytes, gpu.device, layers, page_size)
        (group,) = device.groups
        self.page_bytes = layers * page_size * other.row_bytes
        self.memory = gpu.pinned(available, self.page_bytes)
        conversion, content = None, None
        if own != other:
            conversion = RowConversion(source=own, target=other, k_scales=(1.0,) * layers)
            content = other.tag
        host = host_view(self.memory, group, 0, other, content)
        plans = (
            TransferPlan(device, host, "kv", conversion),
            TransferPlan(host, device, "kv", conversion and conversion.reversed()),
        )
        self.flat = torch.zeros(self.page_bytes * available, dtype=torch.uint8, device=gpu.device)
        self.run_bytes = min(run.run_bytes for run in plans[0].copy_runs)
        self.kind: Any = GPU_ENGINES[case["engine"]]
        self.store, self.load = (
            self.kind(plan, gpu.tools(self.page_bytes), to_host)
            for plan, to_host in zip(plans, (True, False), strict=True)
        )


class GpuTransfers:
    """Cases on a GPU.

    `kept`: `Benchmark.kept`, with which consecutive cases share a pool.
    """

    def __init__(
        self, gpu: Gpu, kept: Callable[[Any, Callable[[], Any]], Any], *, quick: bool,
        layers: int = LAYERS, page_size: int = PAGE_SIZE,
    ) -> None:  # fmt: skip
        self.gpu, self.kept, self.layers, self.page_size = gpu, kept, layers, page_size
        self.available = max(page_counts(quick))

    def measure(self, case: dict[str, Any]) -> dict[str, Any]:
        """Rates of an engine, or of SGLang's host pool, in both directions."""
        if "runner" in case:
            io_backend = case["runner"].removeprefix("sglang ")
            if find_spec("sglang") is None:
                raise Skipped("SGLang is not installed")
            pool, host = self.kept(io_backend, partial(self._sglang_pools, io_backend))
            return self._measure_sglang(pool, host, io_backend, case["pages"])
        key = tuple(case[name] for name in ("layout", "host_layout", "arrangement", "engine"))
        make = partial(_Shape, self.gpu, case, self.layers, self.page_size, self.available)
        return self._measure_engine(self.kept(key, make), case)

    def _measure_engine(self, shape: _Shape, case: dict[str, Any]) -> dict[str, Any]:
        moved = case["pages"] * shape.page_bytes
        # The peer copies as many contiguous bytes as cross the link.
        there, here = shape.memory.view(-1)[:moved], shape.flat[:moved]
        on_device: Any
        on_device, on_host = self._lists(case["pages"], case["scattered"])
        if shape.kind.wants_page_indices:  # as the host tier does, outside of SGLang's transfer stream
            on_device = on_device.page_indices()

        def load() -> None:
            """A whole load, layer by layer, as SGLang requests it."""
            transfer = Transfer(on_host, on_device, to_host=False)
            for part in range(self.layers):
                shape.load.copy(transfer, part)

        calls = {
            "to_host": lambda: shape.store.copy(Transfer(on_host, on_device, to_host=True)),
            "to_device": load,
        }
        peers = {
            "to_host": lambda: there.copy_(here, non_blocking=True),
            "to_device": lambda: here.copy_(there, non_blocking=True),
        }
        row: dict[str, Any] = {"run_bytes": shape.run_bytes, "moved_bytes": moved}
        for direction, call in calls.items():
            row |= _against(self.gpu, direction, call, peers[direction], moved)
        return row

    def _lists(self, pages: int, scattered: bool) -> tuple[DevicePages, np.ndarray]:
        """Device pages (as slots) and host pages of one transfer."""
        every = np.arange(self.available)
        order = np.random.default_rng(0).permutation(every) if scattered else every
        first = torch.from_numpy(order[:pages].astype(np.int64))[:, None] * self.page_size
        slots = (first + torch.arange(self.page_size)).view(-1).to(self.gpu.device)
        return DevicePages(slots, self.page_size), order[::-1][:pages].copy()

    def _sglang_pools(self, io_backend: str) -> tuple[Any, Any]:
        """A pool and a host pool of SGLang, `bf16` rows."""
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
        from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

        pool = MLATokenToKVPool(
            size=self.available * self.page_size, page_size=self.page_size, dtype=torch.bfloat16,
            kv_lora_rank=512, qk_rope_head_dim=64, layer_num=self.layers, device=str(self.gpu.device),
            enable_memory_saver=False,
        )  # fmt: skip
        host = MLATokenToKVPoolHost(
            pool.get_device_pool_infos()[0].buffer_info, 1.0, 0, self.page_size, _SGLANG[io_backend],
            device_capacity_tokens=pool.size, start_layer=0, end_layer=self.layers,
            target_layer_num=self.layers,
        )  # fmt: skip
        return pool, host

    def _measure_sglang(self, pool: Any, host: Any, io_backend: str, pages: int) -> dict[str, Any]:
        lists, numbers = self._lists(pages, scattered=True)
        slots = torch.from_numpy(numbers)[:, None] * self.page_size + torch.arange(self.page_size)
        on_host = slots.view(-1)
        # Indices as cache_controller.move_indices and _move_write_operation pass them.
        direct = io_backend == "direct"
        device = lists.slots.cpu() if direct else lists.slots
        load_host = on_host if direct else on_host.to(self.gpu.device)
        store_host = on_host if direct or host.can_use_write_back_jit else load_host
        row_bytes = MLAKVCacheLayout.BF16.row_format(512, 64).row_bytes
        moved = pages * self.layers * self.page_size * row_bytes
        pinned = host.kv_buffer.view(-1).view(torch.uint8)[:moved]
        flat = torch.zeros(moved, dtype=torch.uint8, device=self.gpu.device)

        def load() -> None:
            for layer in range(self.layers):
                host.load_to_device_per_layer(pool, load_host, device, layer, io_backend)

        def store() -> None:
            host.backup_from_device_all_layer(pool, store_host, device, io_backend)

        row: dict[str, Any] = {"moved_bytes": moved}
        row |= _against(self.gpu, "to_host", store, lambda: pinned.copy_(flat, non_blocking=True), moved)
        row |= _against(self.gpu, "to_device", load, lambda: flat.copy_(pinned, non_blocking=True), moved)
        return row


def _against(gpu: Gpu, direction: str, call: Callable, peer: Callable, moved_bytes: int) -> dict:
    """Submit time of a call, its solo and back-to-back rates as ratios to a peer, and its cost to a step."""
    submit, solo, _ = median(gpu, call)
    peer_solo = median(gpu, peer).until_done
    in_a_row = median(gpu, lambda: [call() for _ in range(IN_A_ROW)]).until_done
    peer_in_a_row = median(gpu, lambda: [peer() for _ in range(IN_A_ROW)]).until_done
    ratios = {}
    for name, step in (("model", gpu.model_step()), ("decode", gpu.decode_step)):
        (alone,) = median(gpu, step).own
        # The step is submitted behind the transfers, which last longer (except for the fewest pages), so it
        # runs beside them. Only the step's own time counts; the end of the transfers says nothing about it.
        _, beside = median(gpu, lambda: [call() for _ in range(IN_A_ROW)], step).own
        ratios[f"{direction}_{name}_step_ratio"] = round(beside / alone, 3)
    return {
        **ratios,
        f"{direction}_submit_us": round(submit * 1e6, 1),
        f"{direction}_solo_of_pinned_copy": round(peer_solo / solo, 3),
        f"{direction}_of_pinned_copy": round(peer_in_a_row / in_a_row, 3),
        f"link_{direction}_gb_per_s": round(moved_bytes * IN_A_ROW / peer_in_a_row / 1e9, 2),
    }


#: Targets: share of a pinned copy, and multiple of a pinned copy in bytes of BF16.
_OF_COPY, _TRANSCODED = 0.95, 2.2
_LONG_RUN_BYTES, _MANY_PAGES = 64 << 10, 256


def targets(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Targets of every measured engine, both ways.

    From 256 pages on: without conversion, 95 % of a pinned copy for `staged`, and for `copy_engine` with long
    runs; for `staged` from BF16 to FP4, 2.2 times a pinned copy, in bytes of BF16. For layouts of
    SGLang's own pools, `staged` without conversion must not be slower than SGLang's best backend.
    """
    measured = [row for row in rows if row["status"] == "measured"]
    sglang = [row for row in measured if not is_ours(row["job"])]
    found = []
    for row in (row for row in measured if is_ours(row["job"])):
        for direction in ("to_host", "to_device"):
            peers = [p for p in sglang if p["job"]["pages"] == row["job"]["pages"]]
            best = max((p[f"{direction}_of_pinned_copy"] for p in peers), default=None)
            found += _of_row(row, direction, best)
    return found


def _of_row(row: dict[str, Any], direction: str, sglang: float | None) -> list[dict[str, Any]]:
    """Targets of a row in a direction; `sglang`: rate of SGLang's best backend for as many pages."""
    case, rate = row["job"], row[f"{direction}_of_pinned_copy"]
    device, host = (MLAKVCacheLayout(case[name]).row_format(512, 64) for name in ("layout", "host_layout"))
    converts, many = device != host, case["pages"] >= _MANY_PAGES
    staged, batch = case["engine"] == "staged", case["engine"] == "copy_engine"
    name, found = f"{what(case)} {direction}", []
    if (staged or (batch and row["run_bytes"] >= _LONG_RUN_BYTES)) and many and not converts:
        found.append(verdict(name, f"at least {_OF_COPY} of a pinned copy", rate, rate >= _OF_COPY))
    if staged and not converts and device.layout.is_sglang_native:
        passed = None if sglang is None else rate >= sglang
        found.append(verdict(name, "no slower than SGLang's best backend", rate, passed, f"SGLang {sglang}"))
    if staged and many and not device.layout.is_narrow and host.layout.latent.values is Encoding.E2M1:
        in_bf16 = rate * device.row_bytes / host.row_bytes
        need = f"at least {_TRANSCODED} of a pinned copy in bytes of bf16"
        found.append(verdict(name, need, in_bf16, in_bf16 >= _TRANSCODED))
    return found
