"""Rates of the engines that transfer pages between a pool and a host tier.

    python -m scripts.bench transfer [--device cpu|cuda] [--quick] [--check] [--json PATH]

On a GPU: engines staged, copy_engine and kernel beside SGLang's backends, as ratios to a pinned copy in the
same run; see transfer_gpu.py. The following is about the CPU.

For each layout and arrangement of the pool: the rate of the `cpu` engine to and from a page-major
host tier, as a ratio to two peers in the same run: torch's contiguous copy of as many bytes, which is the
limit, and torch's copies of the same scattered pages. `--check` fails below 70 % of the contiguous copy,
except for `token_major`, whose rows move one by one. Then, for each pair of layouts, the rate of the engine
that encodes and decodes, beside torch's. transfer_report.py prints the results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.bench import transfer_gpu
from scripts.bench import transfer_report as shown
from scripts.kit.outputs import replace_file, require_writable
from scripts.kit.timing import seconds
from sgl_kvpool import KVArrangement, MLAKVCacheLayout
from sgl_kvpool.codec import encode_rows
from sgl_kvpool.commands.machine import machine
from sgl_kvpool.connectors.allocation import allocate_cross_layer, as_canonical
from sgl_kvpool.connectors.cross_layer import LayerPages
from sgl_kvpool.memory.canonical import CanonicalGroup, CanonicalKVCaches, LayerReference, TensorList
from sgl_kvpool.memory.runs import PageRuns
from sgl_kvpool.transfer.conversion import RowConversion, narrower_layouts
from sgl_kvpool.transfer.cpu_engine import CpuEngine, TorchEngine
from sgl_kvpool.transfer.plan import TransferPlan
from sgl_kvpool.transfer.slots import Transfer, host_view

__all__ = ["caches", "main"]

SCHEMA = 4
LAYERS, PAGE_SIZE = 61, 64
#: Pages of two layers that are encoded and decoded; few, because torch, the peer, is slow.
CONVERTED_PAGES = 8
#: Bytes of a pool, and number of rounds.
FULL, QUICK = (1 << 30, 24), (200 << 20, 4)
#: Bytes of a small pool, whose time is extrapolated to estimate that of the measured pool.
PROBE_BYTES = 64 << 20


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


def measure_engine(
    layout: MLAKVCacheLayout, arrangement: KVArrangement, pool_bytes: int, rounds: int
) -> dict:
    """Rates of the `cpu` engine in both directions beside two peers, in alternation.

    Peers: torch's copy of as many contiguous bytes, which is the limit, and torch's copies of the same
    scattered pages (the `torch` engine). Every round uses another quarter of the pages and of the contiguous
    buffers, so that no round finds its bytes in a cache.
    """
    page_bytes = PAGE_SIZE * layout.row_format(512, 64).row_bytes
    moved = max(1, pool_bytes // 4 // (LAYERS * page_bytes))
    pages = 4 * moved
    device, host = (caches(a, pages, page_bytes) for a in (arrangement, KVArrangement.PAGE_MAJOR))
    plans = {"to_host": TransferPlan(device, host, "kv"), "to_device": TransferPlan(host, device, "kv")}
    engines = {name: CpuEngine(plan) for name, plan in plans.items()}
    peers = {name: TorchEngine(plan) for name, plan in plans.items()}
    generator = np.random.default_rng(0)
    lists = [generator.permutation(pages).reshape(4, moved) for _ in range(2)]
    source = torch.ones(4, moved * LAYERS * page_bytes, dtype=torch.int8)
    target = torch.ones_like(source)

    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        mine, other = number % 4, (number + 2) % 4
        on_device, on_host = lists[0][mine], lists[1][other]
        calls: dict[str, Callable[[], object]] = {"copy": partial(target[other].copy_, source[mine])}
        for name in plans:
            transfer = Transfer(on_host, on_device, to_host=name == "to_host")
            calls[name] = partial(engines[name].copy, transfer)
            calls[f"torch_{name}"] = partial(peers[name].copy, transfer)
        for name, call in calls.items():
            took = seconds(call)
            if number:  # the first round is a warm-up and does not count
                times.setdefault(name, []).append(took)

    def ratio(peer: str, name: str) -> float:
        """Median over rounds of the rate divided by the peer's rate."""
        return round(statistics.median(p / t for p, t in zip(times[peer], times[name], strict=True)), 3)

    return {
        "layout": layout.value,
        "arrangement": str(arrangement),
        "run_bytes": min(run.run_bytes for run in plans["to_host"].copy_runs),
        "pages": moved,
        "moved_bytes": source[0].nbytes,
        "copy_gb_per_s": round(source[0].nbytes / statistics.median(times["copy"]) / 1e9, 2),
        **{f"{name}_of_copy": ratio("copy", name) for name in engines},
        **{f"{name}_of_torch": ratio(f"torch_{name}", name) for name in engines},
        "round_s": round(sum(map(statistics.median, times.values())), 4),
    }


def measure_conversion(layout: MLAKVCacheLayout, host_layout: MLAKVCacheLayout, rounds: int) -> dict:
    """Rates of engine `cpu` with another layout on the host, beside torch's, in bytes of the pool's rows."""
    own = layout.row_format(512, 64)
    other, pages, layers = own.in_layout(host_layout), CONVERTED_PAGES, 2
    device = caches(KVArrangement.LAYER_MAJOR, pages, PAGE_SIZE * own.row_bytes, layer_count=layers)
    (group,) = device.groups
    # Rows of normal values: random bytes contain denormals, on which CPU arithmetic takes ten times as long.
    values = torch.randn(pages * PAGE_SIZE, own.head_dim, generator=torch.Generator().manual_seed(0))
    rows = encode_rows(values[:, : own.kv_lora_rank], values[:, own.kv_lora_rank :], own)
    for layer in group.layers:
        device.view(group, layer.runs).view(torch.uint8).copy_(rows.view(pages, 1, -1))
    memory = torch.ones(pages, layers * PAGE_SIZE * other.row_bytes, dtype=torch.uint8)
    host = host_view(memory, group, range(layers), PAGE_SIZE, other, other.tag)
    conversion = RowConversion(source=own, target=other, k_scales=(1.0,) * layers)
    plans = {
        "to_host": TransferPlan(device, host, "kv", conversion),
        "to_device": TransferPlan(host, device, "kv", conversion.reversed()),
    }
    order = np.random.default_rng(0).permutation(pages)
    size_bytes = pages * layers * PAGE_SIZE * own.row_bytes
    row: dict[str, str | float] = {"layout": layout.value, "host_layout": host_layout.value}
    for name, plan in plans.items():
        engine, peer = CpuEngine(plan), TorchEngine(plan)
        transfer = Transfer(order, order, to_host=name == "to_host")
        times: dict[str, list[float]] = {"engine": [], "torch": []}
        for _ in range(rounds + 1):
            times["engine"].append(seconds(partial(engine.copy, transfer)))
            times["torch"].append(seconds(partial(peer.copy, transfer)))
        mine, torchs = (statistics.median(taken[1:]) for taken in times.values())
        row[f"{name}_gb_per_s"] = round(size_bytes / mine / 1e9, 3)
        row[f"{name}_of_torch"] = round(torchs / mine, 2)
    return row


def measure_gpu(quick: bool, save: Callable[[dict], object]) -> list[str]:
    """Run transfer_gpu.py; returns the missed targets. `save` is called with the results after each shape."""
    gpu = transfer_gpu.Gpu()
    counts = transfer_gpu.PAGES[:2] if quick else transfer_gpu.PAGES
    shape: dict[str, Any] = {"layers": LAYERS, "page_size": PAGE_SIZE, "page_counts": counts}
    rows = []
    cases = [(layout, layout, arrangement) for layout, arrangement in shapes()]
    cases += [(layout, host_layout, KVArrangement.LAYER_MAJOR) for layout, host_layout in conversions()]
    for number, (layout, host_layout, arrangement) in enumerate(cases, 1):
        rows += transfer_gpu.measure_shape(gpu, caches, layout, host_layout, arrangement, **shape)
        print(f"{number} of {len(cases)}: {layout} to {host_layout}, {arrangement}", flush=True)
        save({"device": torch.cuda.get_device_name(), "engines": rows, "ended": False})
    peers = transfer_gpu.measure_peers(gpu, **shape)
    for row in (*rows, *peers):
        print(row)
    missed = transfer_gpu.missed(rows, peers)
    report = {"device": torch.cuda.get_device_name(), "engines": rows, "sglang": peers}
    save(report | {"missed_targets": missed, "ended": True})
    return missed


def estimated_seconds(pool_bytes: int, rounds: int) -> float:
    """Estimated time of `measure_cpu`, from two rounds of a small pool and of one pair of layouts."""
    began = time.perf_counter()
    probe = measure_engine(MLAKVCacheLayout.BF16, KVArrangement.LAYER_MAJOR, PROBE_BYTES, 1)
    memory_s = time.perf_counter() - began - 2 * probe["round_s"]
    shape_s = (memory_s + (rounds + 1) * probe["round_s"]) * pool_bytes / PROBE_BYTES
    began = time.perf_counter()
    measure_conversion(*conversions()[0], 1)
    conversion_s = (time.perf_counter() - began) * (rounds + 1) / 2
    return len(shapes()) * shape_s + len(conversions()) * conversion_s


def shapes() -> list[tuple[MLAKVCacheLayout, KVArrangement]]:
    """Layouts and arrangements of pools."""
    return [(layout, each) for layout in MLAKVCacheLayout for each in KVArrangement.of_rows()]


def conversions() -> list[tuple[MLAKVCacheLayout, MLAKVCacheLayout]]:
    """Layouts of pool and host tier."""
    return [
        (layout, host) for layout in MLAKVCacheLayout for host in narrower_layouts(layout.row_format(512, 64))
    ]


def measure_cpu(quick: bool) -> dict[str, Any]:
    """Run all measurements on a CPU; each line is printed as soon as it is known."""
    pool_bytes, rounds = QUICK if quick else FULL
    estimate_s = estimated_seconds(pool_bytes, rounds)
    duration = f"{estimate_s:.0f} s" if estimate_s < 90 else f"{estimate_s / 60:.0f} minutes"
    print(
        f"{len(shapes())} pools and {len(conversions())} pairs of layouts: about {duration} here, up to "
        f"{4 * pool_bytes / 1e9:.1f} GB of memory\n"
        f"\n{shown.COLUMNS}\n",
        flush=True,
    )
    print(shown.heading(), flush=True)
    engine_rows, conversion_rows = [], []
    for layout, arrangement in shapes():
        engine_rows.append(measure_engine(layout, arrangement, pool_bytes, rounds))
        print(shown.engine_line(engine_rows[-1]), flush=True)
    for layout, host_layout in conversions():
        conversion_rows.append(measure_conversion(layout, host_layout, rounds))
        print(shown.conversion_line(conversion_rows[-1]), flush=True)
    return {
        "limits": {"rate_of_copy": shown.RATE_LIMIT},
        "cpu_engine": engine_rows,
        "conversions": conversion_rows,
    }


def facts(quick: bool) -> dict[str, Any]:
    """Machine, versions and settings of the measurement."""
    return {
        "schema": SCHEMA,
        "script": "scripts/bench/transfer.py",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "quick": quick,
        "layers": LAYERS,
        "page_size_tokens": PAGE_SIZE,
    }


def parse(argv: Sequence[str] | None, prog: str | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=__doc__.splitlines()[0],
        epilog=f"The table that is printed on a CPU:\n{shown.COLUMNS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer pages and rounds")
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device of the pool (cpu)")
    arguments = parser.parse_args(argv)
    require_writable(parser, arguments.json)
    return arguments


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Measure, print, write; returns the exit status."""
    arguments = parse(argv, prog)
    report = facts(arguments.quick)

    def save(found: dict) -> None:
        if arguments.json:
            replace_file(arguments.json, json.dumps({**report, **found}, indent=1) + "\n")

    if arguments.device == "cuda":
        missed = measure_gpu(arguments.quick, save)
    else:
        report |= measure_cpu(arguments.quick)
        missed = shown.missed(report)
        save({})
    print(f"missed: {', '.join(missed) or 'nothing'}")
    return int(arguments.check and bool(missed))
