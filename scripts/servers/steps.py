"""The steps of a run on a given machine, as shown by --list."""

import sys
from collections.abc import Sequence
from fnmatch import fnmatch

from scripts.bench.measurements import measurements
from scripts.kit.environment import Machine
from scripts.kit.runner import Step
from scripts.servers.request import Options
from scripts.servers.server_steps import server_steps
from scripts.servers.shapes import LAYOUTS

#: Time limit of first light in minutes; its steps' limits add up to less. A step that is ended then may take
#: half a minute to stop.
FIRST_LIGHT_MINUTES = 8.5
#: Prefix of the files of GPU tests.
_TESTS = "tests/gpu/test_"
#: Runs all tests in one process, which keeps the fixtures of a module.
_TOGETHER = ("--together",)
_GPU = ("gpu", "ml_dtypes", "triton", "cc")
_SGLANG = (*_GPU, "sglang")
#: What compiles the transfer engines for a GPU.
_ENGINES = ("tvm_ffi", "c++", "nvcc")


def checks(
    name: str, what: str, limit_s: float, *words: str, needs: Sequence[str] = _GPU,
    expected_s: float = 100,
) -> Step:  # fmt: skip
    """Step of tests; `words` are files and options. Each test fails alone, unless they run in one process."""
    return Step(
        name=f"tests-{name}",
        what=what,
        command=(
            *(sys.executable, "-m", "scripts.bench", "tests", *words, "--json", "{folder}/results.json"),
            *(() if _TOGETHER[0] in words else ("--continue",)),
        ),
        limit_s=limit_s,
        parse=measurements,
        needs=("pytest", "numpy", *needs),
        environment={"OMP_NUM_THREADS": "2"},  # per process
        expected_s=expected_s,
    )


def bench(name: str, what: str, limit_s: float, expected_s: float, *words: str) -> Step:
    """Step of a benchmark; `words` are its name and options."""
    command = (sys.executable, "-m", "scripts.bench", *words, "--json", "{folder}/results.json")
    on_cpu = {"codec": (), "transfer": ("tvm_ffi", "c++")}.get(words[0], ("triton",))
    on_gpu = ("gpu", "triton", "cc", *(_ENGINES if words[0] == "transfer" else ()))
    needs = ("numpy", *(on_gpu if "cuda" in words else on_cpu))
    return Step(name, what, command, limit_s, measurements, needs=needs, expected_s=expected_s)


def _core(options: Options) -> list[Step]:
    """Steps that do not need SGLang."""
    on_gpu, quick = options.on_gpu, options.quick or not options.on_gpu
    flags = ("--device", "cuda" if on_gpu else "cpu", *(("--quick",) if quick else ()))
    layouts = ("--only", f"layout={','.join(options.layouts)}") if options.layouts != LAYOUTS else ()
    mark, limit_s = "-quick" if quick else "", 2400 if on_gpu else 300
    if on_gpu:
        expected = (30, 150, 90) if quick else (60, 750, 420)
        found = [
            checks("codec", "rows against the reference, bit for bit", 900, _TESTS + "codec_gpu.py"),
            checks("mla_decode", "attention against float64", 900, _TESTS + "mla_decode_gpu.py"),
            checks("transfer", "engines: bytes", 1800, _TESTS + "transfer_gpu.py", needs=(*_GPU, *_ENGINES)),
        ]
    else:
        expected = (15, 45, 100)
        files = [f"tests/memory/test_{name}.py" for name in ("canonical", "arrangement")]
        files.append("tests/connectors/test_cross_layer.py")
        found = [
            checks(
                "canonical", "byte views and cross-layer buffers", 300, *_TOGETHER, *files,
                needs=("hypothesis",), expected_s=30,
            )
        ]  # fmt: skip
    return [
        *found,
        bench(f"codec{mark}", "the codec beside a copy", limit_s, expected[0], "codec", *flags),
        bench(
            f"attention{mark}", "mla_decode beside SGLang, FlashInfer, FlashMLA" if on_gpu else "a dry run",
            limit_s, expected[1], "attention", "--minutes", "3" if quick else "12", *layouts, *flags,
        ),
        bench(
            f"transfer{mark}", "transfer engines beside a copy", limit_s, expected[2], "transfer", *flags
        ),
    ]  # fmt: skip


def _with_sglang(options: Options) -> list[Step]:
    """Tests on a GPU with SGLang."""
    found = [
        # They reuse cases of CPU tests, which import hypothesis.
        checks(
            "cuda_backend", "kvpool_mla below the server", 1800, *_TOGETHER, _TESTS + "cuda_backend_gpu.py",
            needs=(*_SGLANG, "hypothesis"), expected_s=240,
        ),
        checks(
            "dsa_backend", "SGLang's DSA backend over every layout", 900, *_TOGETHER,
            _TESTS + "dsa_backend_gpu.py", needs=(*_SGLANG, "hypothesis"), expected_s=60,
        ),
    ]  # fmt: skip
    if options.thorough:
        what, needs = "graphs, MTP, mixed batches, narrower hosts", (*_SGLANG, "plugin", "transformers")
        words = (*_TOGETHER, f"{_TESTS}server_gpu.py")
        found.append(checks("server", what, 3 * 3600, *words, needs=needs, expected_s=3600))
    return found


def all_steps(machine: Machine, options: Options) -> list[Step]:
    """All steps in order, including those that cannot run on this machine."""
    found = _core(options)
    if options.core:
        return found
    return [*found, *(_with_sglang(options) if options.on_gpu else ()), *server_steps(machine, options)]


def first_light_steps(*, on_gpu: bool) -> list[Step]:
    """Steps of first light in order of their value, without a GPU those that can be rehearsed."""
    device = ("--device", "cuda" if on_gpu else "cpu")

    def tiles(heads: int, expected_s: float, limit_s: float) -> Step:
        # Triton's interpreter takes a second per block of rows.
        less = () if on_gpu else ("--only", "layout=fp4")
        words = ("tiles", "--continue", "--only", f"heads={heads}", *less, *device)
        what = f"tiles and splits of mla_decode, {heads} heads"
        return bench(f"tiles-{heads}", what, limit_s, expected_s, *words)

    def quick(name: str, what: str, limit_s: float, expected_s: float, *words: str) -> Step:
        return bench(f"{name}-quick", what, limit_s, expected_s, name, "--quick", *device, *words)

    core = checks(
        "core", "attention and codec against their references", 90, f"{_TESTS}mla_decode_gpu.py",
        f"{_TESTS}codec_gpu.py", expected_s=70,
    )  # fmt: skip
    # Steps of their own, so that kernels are tested where the engines cannot be compiled.
    transfer = checks(
        "transfer", "transfer engines: bytes", 75, f"{_TESTS}transfer_gpu.py", needs=(*_GPU, *_ENGINES),
        expected_s=50,
    )  # fmt: skip
    return [
        *([core, tiles(16, 55, 75), transfer] if on_gpu else [tiles(2, 60, 150)]),
        quick("attention", "mla_decode beside FlashMLA, if it is installed", 65, 50, "--minutes", "0.8"),
        *([tiles(8, 35, 45), tiles(32, 35, 45), tiles(64, 18, 25)] if on_gpu else []),
        quick("codec", "speed of the codec", 28, 18),
        quick("transfer", "transfer engines beside a pinned copy", 60, 50),
    ]  # fmt: skip


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
    wanted: set[str] = set()
    pending = [step.name for step in steps if any(fnmatch(step.name, pattern) for pattern in only)]
    while pending:
        step = by_name[pending.pop()]
        wanted.add(step.name)
        pending += [name for name in (*step.requires, *step.peers) if name in by_name and name not in wanted]
    return [step for step in steps if step.name in wanted]
