"""Decode attention straight from stored rows, beside SGLang, FlashInfer and FlashMLA in the same run.

    sgl-kvpool bench attention [--quick] [--check] [--json PATH] [--plot PATH] [--minutes 8]
        [--only dense,sparse,whole_pool,mtp,arrangement] [--layouts ...] [--heads ...] [--batches ...]
        [--contexts ...] [--peers NAMES|none] [--device cuda|cpu]

Before a kernel is timed, up to three queries of its results for the first and the last set of lists are
compared with the float64 reference, with buffers full of NaN before the call. Times are medians between CUDA
events, without launches, over rotating sets of lists that together exceed the L2 cache; and again inside a
CUDA graph. The copy and matrix peaks of the limits are measured in the same run; limits.py has the formulas.
FlashInfer compiles on first use, and the time limit includes it: run `--quick` once on a fresh machine.

A workload that does not fit into memory is recorded as skipped, and a workload for which no time is left as
not run. The workloads of the targets come first. `--check` fails if a target is missed, or if our kernel
fails or gives a wrong result. A target that could not be measured is reported as such, and counts
neither as passed nor as missed.

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
from typing import Any

import torch

from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.commands.bench.attention.cases import CPU_GRID, GPU_GRID, GROUPS, PEERS, Grid, items
from sgl_kvpool.commands.bench.attention.device import CpuDevice, CudaDevice
from sgl_kvpool.commands.bench.attention.measure import Bench, run
from sgl_kvpool.commands.bench.attention.peers import runners
from sgl_kvpool.commands.bench.attention.report import add_ratios, draw, print_ratios, print_table, targets
from sgl_kvpool.commands.bench.outputs import commit, replace_file, require_writable

__all__ = ["main"]

SCHEMA = 1
NOTES = {
    "cuda": "times without launches; ratios use the times inside a CUDA graph if there are any",
    "cpu": "dry run on a CPU: times exercise the program and say nothing about a GPU",
}
_PACKAGES = ("torch", "triton", "sglang", "flashinfer-python", "sgl-flash-mla", "sgl-kvpool")


def versions() -> dict[str, str | None]:
    """Versions of packages (None if missing), and the commit of the checkout (None outside of one)."""
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["torch"] = torch.__version__
    return {**found, "commit": commit(), "python": platform.python_version()}


def report_of(bench: Bench, grid: Grid, rows: list[dict], argv: Sequence[str]) -> dict:
    """Content of the JSON."""
    add_ratios(rows)
    on_gpu = bench.device.kind == "cuda"
    return {
        "schema": SCHEMA,
        "script": "scripts/bench_attention.py",
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


def _names(allowed: Sequence[str]) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(filter(None, text.split(",")))
        unknown = set(names) - set(allowed)
        if unknown:
            known = ", ".join(allowed)
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: choose from {known}")
        return names

    return parse


def _numbers(text: str) -> tuple[int, ...]:
    """Positive numbers; 32k is 32768."""
    try:
        found = tuple(int(n[:-1]) * 1024 if n.endswith("k") else int(n) for n in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive numbers such as 1,16 or 8k,32k")
    return found


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Measure, print, write; returns the exit status."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="only the workloads of the targets, and top-k lists with many heads",
    )
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--plot", type=Path, help="draw the results to this file (PNG)")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit in minutes (8)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", type=_names(GROUPS), default=(), help=", ".join(GROUPS))
    parser.add_argument("--layouts", type=_names([x.value for x in MLAKVCacheLayout]), default=())
    parser.add_argument("--peers", type=_names([*PEERS, "none"]), default=PEERS, help=", ".join(PEERS))
    for name in ("heads", "batches", "contexts"):
        parser.add_argument(f"--{name}", type=_numbers, default=(), help="only these, such as 1,16 or 8k,32k")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu is a dry run")
    commit()  # before results are written, which changes the checkout
    require_writable(parser, arguments.json, arguments.plot)
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
    print_table(None)
    command = sys.argv[1:] if argv is None else argv

    def write(rows: list[dict]) -> dict:
        report = report_of(bench, grid, rows, command)
        if arguments.json:
            replace_file(arguments.json, json.dumps(report, indent=1) + "\n")
        return report

    report = write(run(bench, chosen, arguments.minutes, after_workload=write))
    if arguments.plot:
        title = f"{report['machine']['device']}; {report['note']}"
        if not draw(report["results"], arguments.plot, title):
            print(f"{arguments.plot} not drawn: matplotlib is not installed")
    if device.kind == "cuda":
        print_ratios(report["results"])
    for name, state in report["peers"].items():
        print(f"peer {name}: {state}")
    for verdict in report["targets"]:
        found = "" if verdict["found"] is None else f"{verdict['found']}x, "
        print(f"{verdict['state']:12} {verdict['target']}, {verdict['need']}: {found}{verdict['note']}")
    missed = any(verdict["state"] == "missed" for verdict in report["targets"])
    return int(arguments.check and missed)
