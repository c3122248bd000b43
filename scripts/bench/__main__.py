"""The benchmarks, and tests, each imported when it runs: `python -m scripts.bench codec --help`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from sgl_kvpool.commands.processes.progress import progress

#: Module and class of each benchmark.
BENCHMARKS = {
    "codec": "scripts.bench.codec:Codec",
    "attention": "scripts.bench.attention.benchmark:Attention",
    "transfer": "scripts.bench.transfer:Transfers",
    "tiles": "scripts.bench.tiles:Tiles",
    "tests": "scripts.bench.tests:PytestCases",
    "cpu_attention": "scripts.bench.cpu_attention:CpuAttention",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench", description=__doc__)
    parser.add_argument("benchmark", choices=list(BENCHMARKS), help="name of the benchmark")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    arguments = parser.parse_args(argv)
    name, rest = arguments.benchmark, arguments.rest
    with progress(f"bench {name}: importing torch"):
        module, _, kind = BENCHMARKS[name].partition(":")
        found = getattr(importlib.import_module(module), kind)
        sweep = importlib.import_module("scripts.bench.sweep")
    return sweep.main(found, rest, f"{parser.prog} {name}")


if __name__ == "__main__":
    sys.exit(main())
