"""The benchmarks, and tests, each imported when it runs: `python -m scripts.bench codec --help`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from sgl_kvpool.commands.waiting import no_gpu, progress

#: Module and class of each benchmark.
BENCHMARKS = {
    "codec": "scripts.bench.codec:Codec",
    "attention": "scripts.bench.attention.benchmark:Attention",
    "transfer": "scripts.bench.transfer:Transfers",
    "tiles": "scripts.bench.tiles.benchmark:Tiles",
    "tests": "scripts.bench.tests:PytestCases",
    "cpu_attention": "scripts.bench.cpu_attention:CpuAttention",
}
#: Benchmarks that run on a GPU unless --device says otherwise; on a CPU they are a dry run.
_ON_A_GPU = ("attention", "tiles")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark; one that needs a GPU looks for it before it imports torch."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench", description=__doc__)
    parser.add_argument("benchmark", choices=list(BENCHMARKS), help="name of the benchmark")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    arguments = parser.parse_args(argv)
    name, rest = arguments.benchmark, arguments.rest
    known = argparse.ArgumentParser(prog=f"{parser.prog} {name}", add_help=False)
    known.add_argument("--device", default="cuda" if name in _ON_A_GPU else "cpu")
    device = known.parse_known_args(rest)[0].device
    if device == "cuda" and not {"-h", "--help"} & set(rest) and (problem := no_gpu()) is not None:
        instead = "; --device cpu is a dry run" if name in _ON_A_GPU else ""
        known.exit(2, f"{known.prog}: error: {problem}{instead}\n")
    with progress(f"bench {name}: importing torch"):
        module, _, kind = BENCHMARKS[name].partition(":")
        found = getattr(importlib.import_module(module), kind)
        sweep = importlib.import_module("scripts.bench.sweep")
    return sweep.main(found, rest, known.prog)


if __name__ == "__main__":
    sys.exit(main())
