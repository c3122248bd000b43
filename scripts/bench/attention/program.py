"""Decode attention straight from stored rows, beside SGLang, FlashInfer and FlashMLA in the same run.

    python -m scripts.bench attention [--quick] [--check] [--json PATH] [--minutes 8]
        [--only dense,sparse,whole_pool,mtp,arrangement] [--layouts ...] [--heads ...] [--batches ...]
        [--contexts ...] [--peers NAMES|none] [--device cuda|cpu]

Before a kernel is timed, up to three queries of its results for the first and the last set of lists are
compared with the float64 reference, with buffers full of NaN before the call. Times are medians between CUDA
events, without launches, over rotating sets of lists that together exceed the L2 cache; and again inside a
CUDA graph. The copy and matrix peaks of the limits are measured in the same run; limits.py has the formulas.
FlashInfer compiles on first use, and the time limit includes it: run `--quick` once on a fresh machine.

A workload that does not fit into memory is recorded as skipped, and a workload for which no time is left as
not run. The workloads of the targets come first. The status is 1 if our kernel fails, gives a wrong result or
was not measured; with `--check` also if a target is missed, or none could be measured. Another target that
could not be measured is reported as such, and counts neither as passed nor as missed.

`--device cpu` runs tiny workloads through the CPU path of `mla_decode`: a dry run whose times mean nothing
and neither pass nor miss a target.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from scripts.bench.attention.cases import CPU_GRID, GPU_GRID, GROUPS, OURS, PEERS, Grid, items
from scripts.bench.attention.device import CpuDevice, CudaDevice
from scripts.bench.attention.limits import TILE_COSTS, uncounted
from scripts.bench.attention.measure import Bench, run
from scripts.bench.attention.peers import runners
from scripts.bench.attention.report import add_ratios, print_ratios, print_table, targets
from scripts.kit.arguments import names, numbers
from scripts.kit.outputs import commit, replace_file, require_writable
from sgl_kvpool import MLAKVCacheLayout, __version__

__all__ = ["main"]

SCHEMA = 1
NOTES = {
    "cuda": "times without launches; ratios use the times inside a CUDA graph if there are any",
    "cpu": "dry run on a CPU: times exercise the program and say nothing about a GPU",
}
_PACKAGES = ("torch", "triton", "sglang", "flashinfer-python", "sgl-flash-mla")


def versions() -> dict[str, str | None]:
    """Versions of packages (None if missing), and the commit of the checkout (None outside of one)."""
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found |= {"torch": torch.__version__, "sgl-kvpool": __version__}
    return {**found, "commit": commit(), "python": platform.python_version()}


def report_of(bench: Bench, grid: Grid, rows: list[dict], argv: Sequence[str]) -> dict:
    """Content of the JSON."""
    add_ratios(rows)
    on_gpu = bench.device.kind == "cuda"
    return {
        "schema": SCHEMA,
        "script": "scripts.bench attention",
        "argv": list(argv),
        "device_kind": bench.device.kind,
        "note": NOTES[bench.device.kind],
        "machine": bench.device.facts(),
        "versions": versions(),
        "peaks": {
            "copy_gb_per_s": round(bench.peaks.copy_bytes_per_s / 1e9, 2),
            "matmul_tflop_per_s": round(bench.peaks.matmul_flop_per_s / 1e12, 3),
            "clock_mhz": bench.peaks.clock_hz / 1e6,
        },
        "peers": bench.peers(),
        "targets": targets(rows, on_gpu=on_gpu, target=grid.target, many_heads=grid.many_heads),
        "results": rows,
    }


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Measure, print, write; returns the exit status."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="only the workloads of the targets, and top-k lists with many heads",
    )
    parser.add_argument(
        "--check", action="store_true", help="exit 1 if a target is missed, or none is measured"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit in minutes (8)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", type=names(GROUPS), default=(), help=", ".join(GROUPS))
    parser.add_argument("--layouts", type=names([x.value for x in MLAKVCacheLayout]), default=())
    parser.add_argument("--peers", type=names([*PEERS, "none"]), default=PEERS, help=", ".join(PEERS))
    for name in ("heads", "batches", "contexts"):
        parser.add_argument(f"--{name}", type=numbers, default=(), help="only these, such as 1,16 or 8k,32k")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu is a dry run")
    if arguments.device == "cpu" and arguments.check:
        parser.error("--check needs a GPU: times on a CPU neither pass nor miss a target")
    commit()  # before results are written, which changes the checkout
    require_writable(parser, arguments.json)
    grid = GPU_GRID if arguments.device == "cuda" else CPU_GRID
    chosen = items(
        grid, quick=arguments.quick, only=arguments.only, layouts=arguments.layouts, heads=arguments.heads,
        batches=arguments.batches, contexts=arguments.contexts, peers=arguments.peers,
    )  # fmt: skip
    if not chosen:
        parser.error("no workload passes these filters")

    device = CudaDevice() if arguments.device == "cuda" else CpuDevice()
    bench = Bench(device, device.peaks(), runners())
    print(NOTES[device.kind])
    if missing := uncounted(item.layout for item in chosen):
        print(
            f"{TILE_COSTS.name} has no counts for {', '.join(missing)}, so the limit by multiprocessors is "
            "missing; python -m scripts.figures.attention_facts --write counts them"
        )
    print_table(None)
    command = sys.argv[1:] if argv is None else argv

    def write(rows: list[dict]) -> dict:
        report = report_of(bench, grid, rows, command)
        if arguments.json:
            replace_file(arguments.json, json.dumps(report, indent=1) + "\n")
        return report

    report = write(run(bench, chosen, arguments.minutes, after_workload=write))
    if device.kind == "cuda":
        print_ratios(report["results"])
    for name, state in report["peers"].items():
        print(f"peer {name}: {state}")
    for verdict in report["targets"]:
        found = "" if verdict["found"] is None else f"{verdict['found']}x, "
        print(f"{verdict['state']:12} {verdict['target']}, {verdict['need']}: {found}{verdict['note']}")
    ours = {row["status"] for row in report["results"] if row["runner"] == OURS}
    if "measured" not in ours:
        print("no workload of our kernel was measured")
    states = {verdict["state"] for verdict in report["targets"]}
    unmet = "missed" in states or "passed" not in states
    return int(bool({"wrong", "failed"} & ours) or "measured" not in ours or (arguments.check and unmet))
