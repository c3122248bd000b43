"""The GPU part of `bench transfer`: our engines beside SGLang's backends and a pinned copy.

Rates of engines and backends are ratios to torch's copy of as many bytes between pinned memory and the device
in the same run, which is the limit of the link. With another layout on the host, the copy has as
many bytes as cross the link.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch

from sgl_kvpool import KVArrangement, MLAKVCacheLayout
from sgl_kvpool.layout import Encoding
from sgl_kvpool.transfer.conversion import RowConversion
from sgl_kvpool.transfer.engines import GPU_ENGINES, EngineTools
from sgl_kvpool.transfer.gpu_engine import PageBuffer, gpu_calls
from sgl_kvpool.transfer.plan import TransferPlan
from sgl_kvpool.transfer.slots import DevicePages, Pages, Transfer, host_view

__all__ = ["PAGES", "Gpu", "measure_peers", "measure_shape"]

PAGES = (16, 64, 256, 1024)
ROUNDS = 7
#: Shortest runs with which the copy engine is measured: a call for 1024 pages of token-major rows would
#: submit four million copies of 0.5 us each.
SHORTEST_RUN_BYTES = 4096
#: Calls in sequence without a wait, for the back-to-back rate.
IN_A_ROW = 4


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

    @property
    def calls(self) -> Any:
        return gpu_calls()

    def tools(self, page_bytes: int) -> EngineTools:
        """Tools of an engine for one direction."""
        return EngineTools(self.calls, self.device, PageBuffer(page_bytes, self.device, self.calls))

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


def median(gpu: Gpu, *calls: Callable[[], object]) -> Timed:
    """Medians of `Gpu.timed` over `ROUNDS` rounds, after a round of warm-up."""
    rounds = [gpu.timed(*calls) for _ in range(ROUNDS + 1)][1:]
    return Timed(
        statistics.median(r.submit for r in rounds),
        statistics.median(r.until_done for r in rounds),
        [statistics.median(times) for times in zip(*(r.own for r in rounds), strict=True)],
    )


def lists_of(pages: int, available: int, scattered: bool, page_size: int, device: torch.device):
    """Device pages (as slots) and host pages of one transfer."""
    order = np.random.default_rng(0).permutation(available) if scattered else np.arange(available)
    slots = torch.from_numpy(order[:pages].astype(np.int64))[:, None] * page_size + torch.arange(page_size)
    return DevicePages(slots.view(-1).to(device), page_size), order[::-1][:pages].copy()


def loads(engine: Any, layers: int) -> Callable[[Any, Any], None]:
    """A whole load, layer by layer, as SGLang requests it."""

    def load(host: np.ndarray, device: Pages) -> None:
        transfer = Transfer(host, device, to_host=False)
        for part in range(layers):
            engine.copy(transfer, part)

    return load


def measure_shape(
    gpu: Gpu,
    make_caches: Callable[..., Any],
    layout: MLAKVCacheLayout,
    host_layout: MLAKVCacheLayout,
    arrangement: KVArrangement,
    *,
    layers: int,
    page_size: int,
    page_counts: Sequence[int] = PAGES,
    engines: Sequence[str] = tuple(GPU_ENGINES),
) -> list[dict]:
    """Results of one pair of layouts and one arrangement, for all engines, page counts and both orders."""
    own, other = (name.row_format(512, 64) for name in (layout, host_layout))
    available = max(page_counts)
    device = make_caches(arrangement, available, page_size * own.row_bytes, gpu.device)
    (group,) = device.groups
    page_bytes = layers * page_size * other.row_bytes
    memory = gpu.pinned(available, page_bytes)
    conversion = None
    if own != other:
        conversion = RowConversion(source=own, target=other, k_scales=(1.0,) * layers)
    content = None if conversion is None else other.tag
    host = host_view(memory, group, range(layers), page_size, other, content)
    plans = (
        TransferPlan(device, host, "kv", conversion),
        TransferPlan(host, device, "kv", conversion and conversion.reversed()),
    )
    flat = torch.zeros(page_bytes * available, dtype=torch.uint8, device=gpu.device)
    run_bytes = min(run.run_bytes for run in plans[0].copy_runs)
    results = []
    for name in engines:
        if name == "copy_engine" and (conversion is not None or run_bytes < SHORTEST_RUN_BYTES):
            continue
        engine: Any = GPU_ENGINES[name]
        store = engine(plans[0], gpu.tools(page_bytes), True)
        load = loads(engine(plans[1], gpu.tools(page_bytes), False), layers)
        for pages in page_counts:
            # The peer copies as many contiguous bytes as cross the link.
            there, here = memory.view(-1)[: pages * page_bytes], flat[: pages * page_bytes]
            peers = {
                "to_host": lambda t=there, h=here: t.copy_(h, non_blocking=True),
                "to_device": lambda t=there, h=here: h.copy_(t, non_blocking=True),
            }
            for scattered in (True, False):
                on_device, on_host = lists_of(pages, available, scattered, page_size, gpu.device)
                if engine.wants_page_indices:  # as the host tier does, outside of SGLang's transfer stream
                    on_device = on_device.page_indices()
                calls = {
                    "to_host": lambda d=on_device, h=on_host, s=store: s.copy(Transfer(h, d, to_host=True)),
                    "to_device": lambda d=on_device, h=on_host, f=load: f(h, d),
                }
                row: dict[str, Any] = {
                    "layout": layout.value,
                    "host_layout": host_layout.value,
                    "arrangement": str(arrangement),
                    "engine": name,
                    "pages": pages,
                    "scattered": scattered,
                    "run_bytes": run_bytes,
                    "moved_bytes": pages * page_bytes,
                }
                for direction, call in calls.items():
                    row |= _against(gpu, direction, call, peers[direction], pages * page_bytes)
                both = median(gpu, *calls.values()).until_done
                peers_both = median(gpu, *peers.values()).until_done
                row["both_of_pinned_copies"] = round(peers_both / both, 3)
                row["device_bytes_per_moved"] = round(own.row_bytes / other.row_bytes, 3)
                results.append(row)
    return results


def _against(gpu: Gpu, direction: str, call: Callable, peer: Callable, moved_bytes: int) -> dict:
    """Submit time of a call, its solo and back-to-back rates as ratios to a peer, and its cost to a step."""
    submit, solo, _ = median(gpu, call)
    peer_solo = median(gpu, peer).until_done
    in_a_row = median(gpu, lambda: [call() for _ in range(IN_A_ROW)]).until_done
    peer_in_a_row = median(gpu, lambda: [peer() for _ in range(IN_A_ROW)]).until_done
    step = gpu.model_step()
    (alone,) = median(gpu, step).own
    # The step is submitted behind the transfers, which last longer (except for the fewest pages), so it runs
    # beside them. Only the step's own time counts; the end of the transfers says nothing about it.
    _, beside = median(gpu, lambda: [call() for _ in range(IN_A_ROW)], step).own
    return {
        f"{direction}_submit_us": round(submit * 1e6, 1),
        f"{direction}_solo_of_pinned_copy": round(peer_solo / solo, 3),
        f"{direction}_of_pinned_copy": round(peer_in_a_row / in_a_row, 3),
        f"{direction}_link_gb_per_s": round(moved_bytes * IN_A_ROW / peer_in_a_row / 1e9, 2),
        f"{direction}_model_step_ratio": round(beside / alone, 3),
    }


#: Failures of SGLang's host pool that do not end the benchmark: code that does not compile or load, memory
#: that is missing or not pinned, rejected sizes, arguments of another version. Earlier results are kept.
#: Other exceptions, such as KeyboardInterrupt and SystemExit, end the benchmark.
_PEER_FAILURES = (
    *(ImportError, RuntimeError, OSError, MemoryError, ValueError, AssertionError),
    *(TypeError, AttributeError),
)


def measure_peers(gpu: Gpu, *, layers: int, page_size: int, page_counts: Sequence[int] = PAGES) -> list[dict]:
    """Results of SGLang's own host pool (kernel and direct backends, `bf16` rows); empty without SGLang.

    A backend that fails gives one row, with the reason as "failed" instead of numbers.
    """
    if find_spec("sglang") is None:
        return []
    results = []
    for io_backend, label in (("kernel", "page_first"), ("direct", "page_first_direct")):
        try:
            results += _measure_backend(gpu, io_backend, label, layers, page_size, page_counts)
        except _PEER_FAILURES as error:
            reason = f"{type(error).__name__}: {error}"
            results.append({"peer": f"sglang {io_backend}", "failed": reason[:500]})
    return results


def _measure_backend(
    gpu: Gpu, io_backend: str, label: str, layers: int, page_size: int, page_counts: Sequence[int]
) -> list[dict]:
    """Results of a pool and a host pool of SGLang with one backend."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    pages = max(page_counts) + 1
    pool = MLATokenToKVPool(
        size=(pages - 1) * page_size, page_size=page_size, dtype=torch.bfloat16, kv_lora_rank=512,
        qk_rope_head_dim=64, layer_num=layers, device=str(gpu.device), enable_memory_saver=False,
    )  # fmt: skip
    host = MLATokenToKVPoolHost(
        pool.get_device_pool_infos()[0].buffer_info, 1.0, 0, page_size, label,
        device_capacity_tokens=pool.size, start_layer=0, end_layer=layers, target_layer_num=layers,
    )  # fmt: skip
    try:
        return [_measure_peer(gpu, pool, host, io_backend, count, pages - 1, layers) for count in page_counts]
    finally:
        host.destroy()


def _measure_peer(
    gpu: Gpu, pool: Any, host: Any, io_backend: str, count: int, available: int, layers: int
) -> dict:
    """Result of SGLang's host pool with one backend and one page count, in both directions."""
    page_size = host.page_size
    lists, numbers = lists_of(count, available, True, page_size, gpu.device)
    slots = torch.from_numpy(numbers)[:, None] * page_size + torch.arange(page_size)
    on_host = slots.view(-1)
    # Indices as cache_controller.move_indices and _move_write_operation pass them.
    direct = io_backend == "direct"
    device = lists.slots.cpu() if direct else lists.slots
    load_host = on_host if direct else on_host.to(gpu.device)
    store_host = on_host if direct or host.can_use_write_back_jit else load_host
    moved = count * layers * page_size * MLAKVCacheLayout.BF16.row_format(512, 64).row_bytes
    pinned = host.kv_buffer.view(-1).view(torch.uint8)[:moved]
    flat = torch.zeros(moved, dtype=torch.uint8, device=gpu.device)

    def load() -> None:
        for layer in range(layers):
            host.load_to_device_per_layer(pool, load_host, device, layer, io_backend)

    def store() -> None:
        host.backup_from_device_all_layer(pool, store_host, device, io_backend)

    row = {"peer": f"sglang {io_backend}", "pages": count, "moved_bytes": moved}
    row |= _against(gpu, "to_host", store, lambda: pinned.copy_(flat, non_blocking=True), moved)
    row |= _against(gpu, "to_device", load, lambda: flat.copy_(pinned, non_blocking=True), moved)
    return row


#: Targets: share of a pinned copy, multiple of a pinned copy in bytes of BF16, CPU time per transfer and per
#: run.
_OF_COPY, _TRANSCODED, _SUBMIT_US, _SUBMIT_US_PER_RUN = 0.95, 2.2, 200.0, 0.7
_LONG_RUN_BYTES, _MANY_PAGES = 64 << 10, 256


def missed(rows: Sequence[dict], peers: Sequence[dict]) -> list[str]:
    """Names of the missed targets.

    From 256 pages on: without conversion, 95 % of a pinned copy for `staged`, and for `copy_engine` with long
    runs; for `staged` from BF16 to FP4, 2.2 times a pinned copy, in bytes of BF16. For layouts of
    SGLang's own pools, `staged` without conversion must not be slower than SGLang's best backend; if a
    backend was not measured, this target is missed too. The CPU time to submit has a limit too.
    """
    found = [] if peers else ["staged beside SGLang's backends: not measured, SGLang is not installed"]
    found += [f"staged beside {p['peer']}: not measured, {p['failed']}" for p in peers if "failed" in p]
    peers = [p for p in peers if "failed" not in p]
    for row in rows:
        layouts = f"{row['layout']}/{row['host_layout']}"
        name = f"{row['engine']} {layouts} {row['arrangement']} {row['pages']} pages"
        for direction in ("to_host", "to_device"):
            best = [p[f"{direction}_of_pinned_copy"] for p in peers if p["pages"] == row["pages"]]
            found += [f"{name} {direction}: {what}" for what in _missed_by(row, direction, best)]
    return found


def _missed_by(row: dict, direction: str, sglang: list[float]) -> list[str]:
    """Targets that a row misses in a direction; `sglang`: rates of SGLang's backends for as many pages."""
    rate, submit = row[f"{direction}_of_pinned_copy"], row[f"{direction}_submit_us"]
    converts, many = row["layout"] != row["host_layout"], row["pages"] >= _MANY_PAGES
    staged, batch = row["engine"] == "staged", row["engine"] == "copy_engine"
    found = []
    gated = staged or (batch and row["run_bytes"] >= _LONG_RUN_BYTES)
    if gated and many and not converts and rate < _OF_COPY:
        found.append(f"{rate} of a pinned copy")
    device, host = (MLAKVCacheLayout(row[name]) for name in ("layout", "host_layout"))
    if staged and not converts and device.is_sglang_native and rate < max(sglang, default=0.0):
        found.append(f"{rate} of a pinned copy, SGLang's best {max(sglang)}")
    in_bf16 = rate * row["device_bytes_per_moved"]
    to_fp4 = not device.is_narrow and host.latent.values is Encoding.E2M1
    if staged and many and to_fp4 and in_bf16 < _TRANSCODED:
        found.append(f"{in_bf16:.2f} of a pinned copy in bytes of bf16")
    if not batch and row["pages"] == max(PAGES) and submit > _SUBMIT_US:
        found.append(f"{submit} us to submit")
    runs = row["moved_bytes"] / row["run_bytes"]
    if batch and row["scattered"] and submit / runs > _SUBMIT_US_PER_RUN:
        found.append(f"{submit / runs:.2f} us per run")
    return found
