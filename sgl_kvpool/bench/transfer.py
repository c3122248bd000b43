"""Transfers of pages between a pool and a host tier: the plan, and the engines that carry it out.

    sgl-kvpool bench transfer [--device cpu|cuda] [--quick] [--check] [--json PATH] [--plot PATH]

On a GPU: engines staged, copy_engine and kernel beside SGLang's backends, as ratios to a pinned copy in the
same run; see transfer_gpu.py. The rest is about the CPU.

Measured: the time to make descriptors of 1024 scattered pages of 61 layers; and for each layout and
arrangement of the pool the rate of the `cpu` engine to and from a page-major host tier, as a ratio to two
peers in the same run: torch's contiguous copy of as many bytes, which is the limit, and torch's copies of the
same scattered pages. `--check` fails below 70 % of the former for page-sized runs, and above 1 ms for the
plan. Then, for each pair of layouts, the rate of the engine that encodes and decodes, beside torch's.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sgl_kvpool import KVArrangement, MLAKVCacheLayout
from sgl_kvpool.allocation import allocate_cross_layer, as_canonical
from sgl_kvpool.bench import transfer_gpu
from sgl_kvpool.bench.outputs import replace_file, require_writable
from sgl_kvpool.canonical import CanonicalGroup, CanonicalKVCaches, LayerReference, TensorList
from sgl_kvpool.cross_layer import LayerPages
from sgl_kvpool.host.conversion import RowConversion, narrower_layouts
from sgl_kvpool.host.cpu_engine import CpuEngine
from sgl_kvpool.host.page_view import host_view
from sgl_kvpool.host.plan import TransferPlan
from sgl_kvpool.host.torch_engine import TorchEngine
from sgl_kvpool.page_runs import PageRuns

__all__ = ["caches", "main"]

SCHEMA = 3
LAYERS, PAGE_SIZE = 61, 64
RATE_LIMIT, PLAN_LIMIT_MS = 0.7, 1.0


def caches(
    arrangement: KVArrangement,
    pages: int,
    page_bytes: int,
    device: torch.device | str = "cpu",
    layer_count: int = LAYERS,
    page_size: int = PAGE_SIZE,
) -> CanonicalKVCaches:
    """Byte view of layers, backed by memory that has been touched."""
    if not arrangement.is_layer_packed:
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


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure_plan(rounds: int) -> dict:
    """Milliseconds to make the descriptors of 1024 scattered pages, layer-major to page-major."""
    pages, moved = 2048, 1024
    small = 16  # bytes of a page: descriptors do not depend on it
    plan = TransferPlan(
        caches(KVArrangement.LAYER_MAJOR, pages, small), caches(KVArrangement.PAGE_MAJOR, pages, small), "kv"
    )
    generator = np.random.default_rng(0)
    source, target = (generator.permutation(pages)[:moved] for _ in range(2))
    plan.descriptors(source, target)
    times = [seconds(lambda: plan.descriptors(source, target)) * 1e3 for _ in range(rounds)]
    count = len(plan.descriptors(source, target).sources)
    return {"pages": moved, "descriptors": count, "ms": round(statistics.median(times), 3)}


def measure_engine(
    layout: MLAKVCacheLayout, arrangement: KVArrangement, pool_bytes: int, rounds: int
) -> dict:
    """Rates of the `cpu` engine in both directions beside two peers, interleaved.

    Peers: torch's copy of as many contiguous bytes, which is the limit, and torch's copies of the same
    scattered pages (the `torch` engine). Every round takes another quarter of the pages, and another quarter
    of the contiguous buffers, so that nobody finds its bytes in a cache.
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
        for name, (a, b) in {"to_host": (on_device, on_host), "to_device": (on_host, on_device)}.items():
            calls[name] = partial(engines[name].copy, a, b)
            calls[f"torch_{name}"] = partial(peers[name].copy, a, b)
        for name, call in calls.items():
            took = seconds(call)
            if number:  # the first round touches memory for the first time
                times.setdefault(name, []).append(took)

    def ratio(peer: str, name: str) -> float:
        """Median over rounds of how many times the peer's rate; 1 is as fast."""
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
    }


def measure_conversion(layout: MLAKVCacheLayout, host_layout: MLAKVCacheLayout, rounds: int) -> dict:
    """Rates of the `cpu` engine with another layout on the host, beside torch's; bytes of the device."""
    own = layout.row_format(512, 64)
    other, pages, layers = own.in_layout(host_layout), 8, 2
    device = caches(KVArrangement.LAYER_MAJOR, pages, PAGE_SIZE * own.row_bytes, layer_count=layers)
    (group,) = device.groups
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
        times: dict[str, list[float]] = {"engine": [], "torch": []}
        for _ in range(rounds + 1):
            times["engine"].append(seconds(partial(engine.copy, order, order)))
            times["torch"].append(seconds(partial(peer.copy, order, order)))
        mine, torchs = (statistics.median(taken[1:]) for taken in times.values())
        row[f"{name}_gb_per_s"] = round(size_bytes / mine / 1e9, 3)
        row[f"{name}_of_torch"] = round(torchs / mine, 2)
    return row


def measure_gpu(quick: bool, save: Callable[[dict], object]) -> list[str]:
    """All of transfer_gpu.py: which targets were missed. `save` gets what there is after each shape."""
    gpu = transfer_gpu.Gpu()
    counts = transfer_gpu.PAGES[:2] if quick else transfer_gpu.PAGES
    shape: dict[str, Any] = {"layers": LAYERS, "page_size": PAGE_SIZE, "page_counts": counts}
    rows = []
    for layout in MLAKVCacheLayout:
        pairs = [(layout, arrangement) for arrangement in KVArrangement.of_rows()]
        pairs += [(host, KVArrangement.LAYER_MAJOR) for host in narrower_layouts(layout.row_format(512, 64))]
        for host_layout, arrangement in pairs:
            rows += transfer_gpu.measure_shape(gpu, caches, layout, host_layout, arrangement, **shape)
            print(f"{layout} to {host_layout}, {arrangement}: measured", flush=True)
            save({"device": torch.cuda.get_device_name(), "engines": rows, "ended": False})
    peers = transfer_gpu.measure_peers(gpu, **shape)
    for row in (*rows, *peers):
        print(row)
    missed = transfer_gpu.missed(rows, peers)
    report = {"device": torch.cuda.get_device_name(), "engines": rows, "sglang": peers}
    save(report | {"missed_targets": missed, "ended": True})
    return missed


def draw(results: list[dict], path: Path) -> bool:
    """Bars of both directions, the copy as a line; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4))
    places = np.arange(len(results))
    for shift, name in ((-0.2, "to_host"), (0.2, "to_device")):
        axes.bar(
            places + shift, [row[f"{name}_of_copy"] for row in results], 0.4, label=name.replace("_", " ")
        )
    axes.axhline(1, color="black", linewidth=1, label="torch copy")
    axes.axhline(RATE_LIMIT, color="grey", linestyle="--", linewidth=1, label="target, page-sized runs")
    axes.set_xticks(places, [f"{r['layout']}\n{r['arrangement']}" for r in results], rotation=60, fontsize=8)
    axes.set_ylabel("rate, contiguous copy = 1")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Measure, print, write; returns the exit status."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer pages and rounds")
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--plot", type=Path, help="draw them here (PNG)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="whose transfers")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    if arguments.device == "cuda" and arguments.plot:
        parser.error("--plot draws what is measured on the CPU")
    require_writable(parser, arguments.json, arguments.plot)
    pool_bytes, rounds = (200 << 20, 4) if arguments.quick else (1 << 30, 24)

    facts = {
        "schema": SCHEMA,
        "script": "scripts/bench_transfer.py",
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "layers": LAYERS,
        "page_size_tokens": PAGE_SIZE,
    }
    if arguments.device == "cuda":

        def save(report: dict) -> None:
            if arguments.json:
                replace_file(arguments.json, json.dumps({**facts, **report}, indent=1) + "\n")

        missed = measure_gpu(arguments.quick, save)
        print(f"missed: {', '.join(missed) or 'nothing'}")
        return int(arguments.check and bool(missed))

    plan = measure_plan(rounds)
    print(f"{plan['descriptors']} descriptors of {plan['pages']} pages: {plan['ms']} ms")
    results = []
    print(f"{'':16} {'':12} {'':>10} {'of a contiguous copy':>20} {'of torch, the same pages':>25}")
    print(
        f"{'layout':16} {'arrangement':12} {'run bytes':>10} {'to host':>9} {'to device':>10} "
        f"{'to host':>14} {'to device':>10}"
    )
    for layout in MLAKVCacheLayout:
        for arrangement in KVArrangement.of_rows():
            row = measure_engine(layout, arrangement, pool_bytes, rounds)
            results.append(row)
            print(
                f"{row['layout']:16} {row['arrangement']:12} {row['run_bytes']:10} "
                f"{row['to_host_of_copy']:9.2f} {row['to_device_of_copy']:10.2f} "
                f"{row['to_host_of_torch']:14.2f} {row['to_device_of_torch']:10.2f}",
                flush=True,
            )
    conversions = [
        measure_conversion(layout, host, rounds)
        for layout in MLAKVCacheLayout
        for host in narrower_layouts(layout.row_format(512, 64))
    ]
    for row in conversions:
        print(
            f"{row['layout']:16} as {row['host_layout']:16} {row['to_host_gb_per_s']:6.2f} GB/s out "
            f"({row['to_host_of_torch']:.1f} of torch) {row['to_device_gb_per_s']:6.2f} GB/s back "
            f"({row['to_device_of_torch']:.1f})"
        )
    if arguments.json:
        report = {
            **facts,
            "limits": {"rate_of_copy": RATE_LIMIT, "plan_ms": PLAN_LIMIT_MS},
            "plan": plan,
            "cpu_engine": results,
            "conversions": conversions,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot and not draw(results, arguments.plot):
        print(f"{arguments.plot} not drawn: matplotlib is not installed")
    missed = [
        f"{row['layout']} {row['arrangement']}"
        for row in results
        # Token-major rows go to and from page-major pages one by one.
        if row["arrangement"] != KVArrangement.TOKEN_MAJOR.value
        and min(row["to_host_of_copy"], row["to_device_of_copy"]) < RATE_LIMIT
    ]
    if plan["ms"] > PLAN_LIMIT_MS:
        missed.append("plan")
    if arguments.check and missed:
        print(f"missed: {', '.join(missed)}")
        return 1
    return 0
