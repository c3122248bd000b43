"""`sgl-kvpool bench`: the benchmarks codec, attention, transfer, rates and tiles, imported when they run."""

from __future__ import annotations

import argparse
import importlib

__all__ = ["BENCHMARKS", "add_arguments", "run"]

#: Module of each benchmark, with `main(argv, prog)`. The first three have a script, scripts/bench_NAME.py.
BENCHMARKS = {
    "codec": "sgl_kvpool.commands.bench.codec",
    "attention": "sgl_kvpool.commands.bench.attention.program",
    "transfer": "sgl_kvpool.commands.bench.transfer",
    "rates": "sgl_kvpool.commands.bench.rates.program",
    "tiles": "sgl_kvpool.commands.bench.tiles.program",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name of a benchmark, and the benchmark's own arguments after it."""
    parser.add_argument("benchmark", choices=list(BENCHMARKS), help="name of the benchmark")
    rest = parser.add_argument(
        "rest",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="its arguments; `sgl-kvpool bench codec --help` lists those of codec",
    )
    rest.required = False  # the error for missing arguments then names the benchmark only


def run(arguments: argparse.Namespace) -> int:
    """Run one benchmark with the remaining arguments; returns its exit status."""
    program = importlib.import_module(BENCHMARKS[arguments.benchmark])
    return program.main(arguments.rest, prog=f"sgl-kvpool bench {arguments.benchmark}")
