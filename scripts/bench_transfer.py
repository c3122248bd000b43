#!/usr/bin/env python3
"""Transfers of pages between a pool and a host tier: the plan, and the engines that carry it out.

    python scripts/bench_transfer.py [--quick] [--check] [--json PATH] [--plot PATH]

Measured: the time to make descriptors of 1024 scattered pages of 61 layers; and for each layout and
arrangement of the pool the rate of the `cpu` engine to and from a page-major host tier, as a ratio to torch's
contiguous copy of as many bytes in the same run, which is the limit. `--check` fails below 70 % of it for
page-sized runs, and above 1 ms for the plan.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from sgl_kvpool import KVArrangement, MLAKVCacheLayout
from sgl_kvpool.allocation import allocate_cross_layer, as_canonical
from sgl_kvpool.canonical import CanonicalGroup, CanonicalKVCaches, LayerReference, TensorList
from sgl_kvpool.cross_layer import LayerPages
from sgl_kvpool.host.cpu_engine import CpuEngine
from sgl_kvpool.host.plan import TransferPlan
from sgl_kvpool.page_runs import PageRuns

SCHEMA = 1
LAYERS, PAGE_SIZE = 61, 64
RATE_LIMIT, PLAN_LIMIT_MS = 0.7, 1.0


def caches(arrangement: KVArrangement, pages: int, page_bytes: int) -> CanonicalKVCaches:
    """Byte view of `LAYERS` layers, backed by memory that has been touched."""
    if not arrangement.is_layer_packed:
        members = [
            LayerPages(name=i, page_bytes=page_bytes, backend="bench", page_size_tokens=PAGE_SIZE)
            for i in range(LAYERS)
        ]
        groups = allocate_cross_layer([members], pages=pages, arrangement=arrangement, device="cpu")
        groups[0].tensor.fill_(1)
        return as_canonical(groups, ["kv"])
    tensors, layers = TensorList(), []
    for layer in range(LAYERS):
        index = tensors.add(torch.ones(pages, page_bytes, dtype=torch.int8))
        runs = PageRuns(tensor_index=index, offset_bytes=0, run_bytes=page_bytes)
        layers.append(LayerReference(layer_id=layer, part="kv", runs=runs, content="bytes"))
    group = CanonicalGroup(name="kv", layers=tuple(layers), num_pages=pages, page_size_tokens=PAGE_SIZE)
    return CanonicalKVCaches(tuple(tensors.tensors), (group,))


def seconds(call) -> float:
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


def measure_engine(layout: MLAKVCacheLayout, arrangement: KVArrangement, pages: int, rounds: int) -> dict:
    """Rates of the `cpu` engine in both directions and of torch's copy, GB/s, interleaved."""
    page_bytes = PAGE_SIZE * layout.row_format(512, 64).row_bytes
    device, host = (caches(a, pages, page_bytes) for a in (arrangement, KVArrangement.PAGE_MAJOR))
    there, back = CpuEngine(TransferPlan(device, host, "kv")), CpuEngine(TransferPlan(host, device, "kv"))
    generator = np.random.default_rng(0)
    moved = pages // 4
    one, other = (generator.permutation(pages)[:moved] for _ in range(2))
    contiguous = torch.ones(moved * LAYERS * page_bytes, dtype=torch.int8)
    into = torch.ones_like(contiguous)
    calls = {
        "to_host": lambda: there.copy(one, other),
        "to_device": lambda: back.copy(other, one),
        "copy": lambda: into.copy_(contiguous),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call))
    rates = {name: contiguous.nbytes / statistics.median(values) / 1e9 for name, values in times.items()}
    run_bytes = min(run.run_bytes for run in there.plan.copy_runs)
    return {
        "layout": layout.value,
        "arrangement": str(arrangement),
        "run_bytes": run_bytes,
        "moved_bytes": contiguous.nbytes,
        "copy_gb_per_s": round(rates["copy"], 2),
        **{f"{name}_of_copy": round(rates[name] / rates["copy"], 3) for name in ("to_host", "to_device")},
    }


def draw(results: list[dict], path: Path) -> None:
    """Bars of both directions, the copy as a line."""
    import matplotlib

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


def main() -> int:
    """Measure, print, write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer pages and rounds")
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--plot", type=Path, help="draw them here (PNG)")
    arguments = parser.parse_args()
    for path in (arguments.json, arguments.plot):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()  # fails now rather than after the measurement
    pages, rounds = (32, 5) if arguments.quick else (256, 15)

    plan = measure_plan(rounds)
    print(f"{plan['descriptors']} descriptors of {plan['pages']} pages: {plan['ms']} ms")
    results = []
    print(f"{'layout':16} {'arrangement':12} {'run bytes':>10} {'to host':>8} {'to device':>10} of a copy")
    for layout in MLAKVCacheLayout:
        for arrangement in KVArrangement.of_rows():
            row = measure_engine(layout, arrangement, pages, rounds)
            results.append(row)
            print(
                f"{row['layout']:16} {row['arrangement']:12} {row['run_bytes']:10} "
                f"{row['to_host_of_copy']:8.2f} {row['to_device_of_copy']:10.2f}",
                flush=True,
            )
    if arguments.json:
        report = {
            "schema": SCHEMA,
            "script": "scripts/bench_transfer.py",
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "layers": LAYERS,
            "page_size_tokens": PAGE_SIZE,
            "limits": {"rate_of_copy": RATE_LIMIT, "plan_ms": PLAN_LIMIT_MS},
            "plan": plan,
            "cpu_engine": results,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot:
        draw(results, arguments.plot)
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


if __name__ == "__main__":
    sys.exit(main())
