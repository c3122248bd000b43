"""The steps of a run on a given machine, as shown by --list."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatch

from scripts.kit.environment import Machine
from scripts.kit.runner import Step
from scripts.servers import parsers
from scripts.servers.options import Options
from scripts.servers.server_steps import server_steps
from scripts.servers.shapes import LAYOUTS

__all__ = ["TESTS", "all_steps", "bench", "choose", "isolated"]

_PYTEST = ("pytest", "numpy")
#: Prefix of the files of GPU tests.
TESTS = "tests/gpu/test_"
_CODEC = "speed of the codec beside a copy"


def _tests(name: str, what: str, limit_s: float, *files: str, needs: Sequence[str]) -> Step:
    return Step(
        name=f"tests-{name}",
        what=what,
        command=(
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit2"),
            *("--junitxml={folder}/junit.xml", *files),
        ),
        limit_s=limit_s,
        parse=parsers.junit,
        needs=(*_PYTEST, *needs),
    )


def isolated(name: str, what: str, limit_s: float, *words: str) -> Step:
    """Step of parallel GPU kernel tests, each of which fails alone; `words` are files and options."""
    return Step(
        name=f"tests-{name}",
        what=what,
        command=(sys.executable, "-m", "scripts.kit.isolated_tests", "--out", "{folder}", *words),
        limit_s=limit_s,
        parse=parsers.isolated_tests,
        needs=("gpu", *_PYTEST, "ml_dtypes"),
        environment={"OMP_NUM_THREADS": "2"},  # per process
    )


def bench(
    name: str, what: str, limit_s: float, parse: parsers.Parser, *words: str, expected_s: float = 0.0
) -> Step:
    """Step of a benchmark; `words` are its name and options."""
    command = (sys.executable, "-m", "scripts.bench", *words, "--json", "{folder}/results.json")
    return Step(name, what, command, limit_s, parse, needs=("numpy",), expected_s=expected_s)


def _gpu_core(options: Options) -> list[Step]:
    quick = ("--quick",) if options.quick else ()
    mark = "-quick" if options.quick else ""
    layouts = ("--layouts", ",".join(options.layouts)) if options.layouts != LAYOUTS else ()
    minutes = "3" if options.quick else "12"
    steps = [
        isolated("codec", "rows against the reference, bit for bit", 900, TESTS + "codec_gpu.py"),
        isolated("mla_decode", "attention against float64", 900, TESTS + "mla_decode_gpu.py"),
        isolated("transfer", "engines: bytes, order", 1800, TESTS + "transfer_gpu.py"),
        bench(f"codec{mark}", _CODEC, 900, parsers.benchmark, "codec", *quick),
        bench(
            f"attention{mark}", "mla_decode beside SGLang, FlashInfer, FlashMLA", 2400, parsers.benchmark,
            "attention", "--minutes", minutes, *layouts, *quick,
        ),
        bench(
            f"transfer{mark}", "engines beside a pinned copy and SGLang's", 2400, parsers.benchmark,
            "transfer", "--device", "cuda", *quick,
        ),
    ]  # fmt: skip
    return [_with_gpu(step) for step in steps]


def _with_gpu(step: Step) -> Step:
    return step if "gpu" in step.needs else replace(step, needs=("gpu", *step.needs))


def _cpu_core() -> list[Step]:
    quick = "--quick"
    files = ["tests/memory/test_canonical.py", "tests/memory/test_arrangement.py"]
    files.append("tests/connectors/test_cross_layer.py")
    return [
        _tests("canonical", "byte views and cross-layer buffers", 300, *files, needs=("hypothesis",)),
        bench("codec-quick", _CODEC, 300, parsers.benchmark, "codec", quick),
        bench(
            "attention-quick", "dry run of the attention benchmark", 300, parsers.benchmark,
            "attention", "--device", "cpu", quick,
        ),
        bench(
            "transfer-quick", "engine cpu beside a copy", 300, parsers.benchmark, "transfer", quick
        ),
    ]  # fmt: skip


#: Steps that need a GPU, listed on a machine without a GPU: (name, description).
_NEEDS_GPU = (
    ("tests-codec", "rows against the reference on a GPU, bit for bit"),
    ("tests-mla_decode", "attention against float64 on a GPU"),
    ("tests-transfer", "transfer engines staged, copy_engine, kernel"),
    ("codec", "speed of the codec on a GPU"),
    ("attention", "mla_decode on a GPU beside SGLang, FlashInfer, FlashMLA"),
    ("transfer", "transfer engines beside a pinned copy"),
)
_SERVERS_NEED_GPU = (
    ("tests-cuda_backend", "kvpool_mla below the server"),
    ("tests-dsa_rows", "656-byte rows read by FlashMLA"),
    ("serve-v3", "servers of DeepSeek-V3's shape"),
    ("serve-v32", "servers of DeepSeek-V3.2's shape"),
    ("serve-kimi", "servers of Kimi-Linear's shape"),
    ("memory", "tokens that SGLang finds room for"),
    ("tp2", "two ranks"),
)


def _not_here(machine: Machine, names: Iterable[tuple[str, str]]) -> list[Step]:
    """Steps that are listed as skipped."""
    reason = machine.missing(("gpu",)) or "--device cpu was requested"
    return [Step(name, what, (), 0, None, without=reason) for name, what in names]


def _gpu_with_sglang(machine: Machine, options: Options) -> list[Step]:
    sglang = ("gpu", "sglang", "ml_dtypes")
    steps = [
        # It reuses the cases of a CPU test, which imports hypothesis.
        _tests(
            "cuda_backend", "kvpool_mla below the server", 1800, TESTS + "cuda_backend_gpu.py",
            needs=(*sglang, "hypothesis"),
        ),
        _tests("dsa_rows", "656-byte rows read by FlashMLA", 900, TESTS + "dsa_rows_gpu.py", needs=sglang),
        *server_steps(machine, options),
    ]  # fmt: skip
    for name in ("", "dsa_", "hybrid_") if options.thorough else ():
        file, needs = f"{TESTS}{name}server_gpu.py", (*sglang, "plugin", "transformers")
        what = "graphs, MTP, mixed batches, host hits of servers"
        steps.append(_tests(f"{name}server", what, 3 * 3600, file, needs=needs))
    return steps


def all_steps(machine: Machine, options: Options) -> list[Step]:
    """All steps in order, including those that cannot run on this machine."""
    if options.on_gpu:
        return [*_gpu_core(options), *(() if options.core else _gpu_with_sglang(machine, options))]
    steps = _cpu_core()
    if options.core:
        return [*steps, *_not_here(machine, _NEEDS_GPU)]
    return [*steps, *server_steps(machine, options), *_not_here(machine, (*_NEEDS_GPU, *_SERVERS_NEED_GPU))]


def choose(steps: Sequence[Step], only: Sequence[str]) -> list[Step]:
    """Steps that match a pattern of `only`, with their requirements and peers; all steps without patterns.

    ValueError: if a pattern does not match any step.
    """
    if not only:
        return list(steps)
    for pattern in only:
        if not any(fnmatch(step.name, pattern) for step in steps):
            names = ", ".join(step.name for step in steps)
            raise ValueError(f"--only {pattern}: no step has such a name; there are {names}")
    by_name = {step.name: step for step in steps}
    wanted = {step.name for step in steps if any(fnmatch(step.name, pattern) for pattern in only)}
    pending = list(wanted)
    while pending:
        step = by_name[pending.pop()]
        for name in (*step.requires, *step.peers):
            if name in by_name and name not in wanted:
                wanted.add(name)
                pending.append(name)
    return [step for step in steps if step.name in wanted]
