"""Micro-benchmarks of a Hopper GPU: rates per SM clock of the operations of decode attention.

    python -m scripts.bench rates [--json PATH] [--continue]

* instructions that decode rows: lanes per clock and SM, alone and alternating with others; and whole decoders
  of e2m1 and e4m3, the present ones and alternatives, in values per clock and SM;
* wgmma of 8, 16 and 32 columns with A in registers or in shared memory: SM clocks per wgmma, with the wgmma
  of all warp groups counted;
* whether products use the exact values of bf16 subnormals;
* gathers of rows from memory by one bulk copy per row, by copies or by loads of 16 bytes: bytes per second.

Needs torch and nvcc, but neither Triton nor SGLang. A measurement that hangs or faults loses only its own
result. The benchmark has not run on a GPU yet, where it should take about half a minute; on an emulator its
kernels give the expected results (tests/ptxrun/test_ptx_rates.py).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.bench.attention.device import CudaDevice
from scripts.bench.rates.library import Library, compile_library
from scripts.bench.rates.measure import Measurer, jobs
from scripts.kit.outputs import Report, commit, require_writable
from scripts.kit.workers import Jobs, Outcome, cuda_is_broken, run_jobs

__all__ = ["main"]

SCHEMA = 1
_JOB_LIMIT_S = 20.0


def _worker(path: Path) -> int:
    sent = Jobs()
    device = CudaDevice(seconds_per_timing=0.05, min_rounds=5)
    measurer = Measurer(Library(path), device)
    for job in sent.begin(device.facts()):
        try:
            sent.answer({"status": "measured", **measurer.measure(job)})
        except Exception as error:  # a new kernel may fail in any way; the report has the reason
            first = (str(error).strip().splitlines() or ["no message"])[0]
            found = {"status": "failed", "reason": f"{type(error).__name__}: {first}"}
            sent.answer(found, usable=not cuda_is_broken())
    return 0


def _line(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    if row["status"] != "measured":
        job = ", ".join(f"{name} {value}" for name, value in row["job"].items())
        return f"{row['status']:10} {job}: {row['reason']}"
    numbers = {k: v for k, v in row.items() if k not in ("job", "status", "name")}
    where = ", ".join(f"{k} {v}" for k, v in row["job"].items() if k in ("sums", "warp_groups"))
    shown = ", ".join(f"{value} {name}" for name, value in numbers.items())
    return f"{row.get('name', row['job']['what'])}{f', {where}' if where else ''}: {shown}"


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Measure, print, write; returns the exit status: 1 if a measurement failed or was not made."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results to this file after each measurement")
    parser.add_argument("--continue", action="store_true", dest="goes_on", help="keep the results in --json")
    parser.add_argument("--library", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.library is not None:
        return _worker(arguments.library)
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    require_writable(parser, arguments.json)
    report = Report(
        arguments.json, {"benchmark": "rates", "schema": SCHEMA, "commit": commit()}, arguments.goes_on
    )

    def plan(machine: dict[str, Any]) -> list[dict[str, Any]]:
        report.facts["machine"] = machine
        return [job for job in jobs() if not report.has(job)]

    def ended(outcome: Outcome) -> None:
        row = {"job": outcome.job, **(outcome.value or {"status": "failed", "reason": outcome.failure})}
        report.add(row)
        print(_line(row), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        try:
            library = compile_library(Path(folder))
        except (OSError, RuntimeError) as error:
            parser.error(str(error))
        command = [sys.executable, "-m", "scripts.bench", "rates", "--library", str(library)]
        left = run_jobs(command, plan, ended=ended, job_limit_s=_JOB_LIMIT_S)
    if left:
        print(left)
    return int(bool(left) or any(row["status"] != "measured" for row in report.rows))
