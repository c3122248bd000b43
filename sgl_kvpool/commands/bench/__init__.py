"""`sgl-kvpool bench`: speed of the codec, of attention and of transfers, none of them imported here."""

from __future__ import annotations

import argparse
import importlib

__all__ = ["BENCHMARKS", "add_arguments", "run"]

#: Module of each, which has `main(argv, prog)`. scripts/bench_*.py of a checkout run the same functions.
BENCHMARKS = {
    "codec": "sgl_kvpool.commands.bench.codec",
    "attention": "sgl_kvpool.commands.bench.attention.program",
    "transfer": "sgl_kvpool.commands.bench.transfer",
    "rates": "sgl_kvpool.commands.bench.rates.program",
    "tiles": "sgl_kvpool.commands.bench.tiles.program",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The name of a benchmark; what follows is the benchmark's."""
    parser.add_argument("benchmark", choices=list(BENCHMARKS), help="which one")
    rest = parser.add_argument(
        "rest",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="its arguments; `sgl-kvpool bench codec --help` lists those of codec",
    )
    rest.required = False  # an error that lists what is missing names the benchmark alone


def run(arguments: argparse.Namespace) -> int:
    """Run one benchmark with the rest of the arguments; returns its exit status."""
    program = importlib.import_module(BENCHMARKS[arguments.benchmark])
    return program.main(arguments.rest, prog=f"sgl-kvpool bench {arguments.benchmark}")
