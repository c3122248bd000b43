"""Speed of the codec beside a plain copy of as many bytes, on the CPU and, if present, on a GPU.

    python -m scripts.bench codec [--quick] [--check] [--threads N] [--json PATH]

Every operation is timed in turn with a copy that moves as many bytes (read plus written), so that both see
the same machine. A ratio of 0.1 means that rows are processed at a tenth of the speed of a copy. On a GPU the
inputs rotate through more memory than its L2 cache holds. ``--check`` fails if a CPU gate is missed; the GPU
targets are only reported.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scripts.kit.outputs import replace_file, require_writable
from scripts.kit.timing import seconds
from sgl_kvpool import MLAKVCacheLayout, RowFormat
from sgl_kvpool.codec import decode_rows, encode_rows, gather_rows, store_rows
from sgl_kvpool.commands.machine import machine
from sgl_kvpool.layout import Encoding

__all__ = ["main"]

SCHEMA_VERSION = 1
RANK, ROPE = 512, 64
OPERATIONS = ("encode", "decode", "store", "gather")

#: Least share of a copy's speed, by the encoding of latent values and the operation. The CPU values are
#: gates. Encoding is bound by arithmetic, whose speed depends on the width of vectors.
CPU_GATES = {
    (Encoding.E2M1, "gather"): 0.08,
    (Encoding.E4M3, "gather"): 0.04,
    (Encoding.E2M1, "encode"): 0.10 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 0.04,
}
#: FP4 encoding tries five scales for each block and is bound by arithmetic.
GPU_TARGET, GPU_TARGETS = 0.80, {(Encoding.E2M1, "encode"): 0.40, (Encoding.E2M1, "store"): 0.40}

Run = Callable[[int], Any]

#: Explanation of the table's columns, which is printed with it.
COLUMNS = """\
encode, decode: values to rows and back; store, gather: the same into and out of scattered rows of a pool
GB/s:   bytes read and written per second, rows and their bf16 values together
copy:   GB/s of a plain copy of as many bytes, measured in turn with it
ratio:  GB/s divided by copy; 0.1 is a tenth of a copy's speed
target: least ratio; on a CPU --check fails below it, on a GPU it is only reported"""


def operations(fmt: RowFormat, tokens: int, device: str, sets: int) -> dict[str, Run]:
    """Operations as functions of a round number; round i works on input set i modulo `sets`."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(tokens, RANK + ROPE, generator=generator).to(torch.bfloat16)
    inputs = [values.to(device).clone() for _ in range(sets)]
    nope = [x[:, :RANK] for x in inputs]
    rope = [x[:, RANK:] for x in inputs]
    rows = encode_rows(nope[0], rope[0], fmt)
    # One pool; each set owns every `sets`-th row, in random order.
    pool = rows.repeat_interleave(sets, dim=0)
    order = torch.randperm(tokens, generator=generator) * sets
    slots = [(order + i).to(device) for i in range(sets)]
    dense = [rows.clone() for _ in range(sets)]
    out = [torch.empty_like(inputs[0]) for _ in range(sets)]
    return {
        "encode": lambda i: encode_rows(nope[i % sets], rope[i % sets], fmt),
        "decode": lambda i: decode_rows(dense[i % sets], fmt),
        "store": lambda i: store_rows(pool, slots[i % sets], nope[i % sets], rope[i % sets], fmt),
        "gather": lambda i: gather_rows(pool, slots[i % sets], fmt, out=out[i % sets]),
    }


def copy_of(size: int, device: str, sets: int) -> Run:
    """A copy that reads and writes `size` bytes in total."""
    source = [torch.ones(size // 2, dtype=torch.uint8, device=device) for _ in range(sets)]
    target = [torch.empty_like(x) for x in source]
    return lambda i: target[i % sets].copy_(source[i % sets])


def measure(device: str, layout: MLAKVCacheLayout, tokens: int, rounds: int) -> list[dict]:
    fmt = layout.row_format(RANK, ROPE)
    size = tokens * (fmt.row_bytes + 2 * fmt.head_dim)  # a row on one side, bf16 on the other
    sets = 1
    if device == "cuda":
        sets = 2 + 4 * torch.cuda.get_device_properties(0).L2_cache_size // size
    runs, copy = operations(fmt, tokens, device, sets), copy_of(size, device, sets)
    results = []
    for name in OPERATIONS:
        run = runs[name]
        for i in range(2):  # compile, fill tables, touch pages
            run(i), copy(i)
        pairs = [(seconds(partial(copy, i), device), seconds(partial(run, i), device)) for i in range(rounds)]
        copy_s, run_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        if device == "cpu":
            target = CPU_GATES.get((layout.latent.values, name))
        else:
            target = GPU_TARGETS.get((layout.latent.values, name), GPU_TARGET)
        ratio = copy_s / run_s
        results.append(
            {
                "device": device,
                "layout": layout.value,
                "operation": name,
                "tokens": tokens,
                "bytes": size,
                "gb_per_s": round(size / run_s / 1e9, 3),
                "copy_gb_per_s": round(size / copy_s / 1e9, 3),
                "ratio_to_copy": round(ratio, 4),
                "target": target,
                "gate": device == "cpu" and target is not None,
                "passed": None if target is None else ratio >= target,
            }
        )
    return results


def print_head() -> None:
    print(f"{'device':6} {'layout':15} {'operation':9} {'GB/s':>8} {'copy':>8} {'ratio':>6} {'target':>6}")


def print_rows(results: list[dict]) -> None:
    for r in results:
        target = "" if r["target"] is None else f"{r['target']:.2f}"
        verdict = {None: "", True: "ok", False: "MISSED"}[r["passed"]]
        print(
            f"{r['device']:6} {r['layout']:15} {r['operation']:9} {r['gb_per_s']:8.2f} "
            f"{r['copy_gb_per_s']:8.2f} {r['ratio_to_copy']:6.3f} {target:>6} {verdict}",
            flush=True,
        )


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Measure, print, write; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=__doc__.splitlines()[0],
        epilog=f"The table that is printed:\n{COLUMNS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer tokens; on the CPU also fewer rounds")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a CPU gate is missed")
    parser.add_argument("--threads", type=int, default=1, help="torch threads on the CPU (1)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args(argv)
    if arguments.threads < 1:
        parser.error(f"--threads {arguments.threads} is not positive")
    torch.set_num_threads(arguments.threads)
    require_writable(parser, arguments.json)

    cases = [("cpu", *((16384, 3) if arguments.quick else (65536, 7)))]
    if torch.cuda.is_available():
        cases += [("cuda", tokens, 50) for tokens in ((65536,) if arguments.quick else (65536, 262144))]
    print(f"{COLUMNS}\n\nabout {'10 seconds' if arguments.quick else 'a minute'} on an idle CPU")
    print_head()
    results = []
    for device, tokens, rounds in cases:
        for layout in MLAKVCacheLayout:
            measured = measure(device, layout, tokens, rounds)
            print_rows(measured)
            results += measured

    missed = [r for r in results if r["gate"] and not r["passed"]]
    report = {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "codec",
        "machine": machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "quick": arguments.quick,
        "geometry": {"kv_lora_rank": RANK, "qk_rope_head_dim": ROPE},
        "gates_passed": not missed,
        "results": results,
    }
    if arguments.json:
        replace_file(arguments.json, json.dumps(report, indent=1) + "\n")
    return 1 if arguments.check and missed else 0
