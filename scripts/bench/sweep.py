"""One way to run a benchmark: its cases in order, each checked and then timed, written and printed at once.

A benchmark says which cases there are and how one is measured. On a GPU cases run in a worker process, so
that one that hangs or faults loses only its own result.
"""

import argparse
import os
import platform
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from scripts.bench.measurements import is_ours, what
from scripts.kit.outputs import Report, commit, positive, require_writable
from scripts.kit.workers import cuda_is_broken, run_jobs
from sgl_kvpool import __version__
from sgl_kvpool.commands.processes.worker import Jobs

Case = dict[str, Any]
Row = dict[str, Any]
#: Workers that compile and check at the same time.
_MOST_WORKERS = 12


class Skipped(Exception):
    """A case that cannot be measured here; the message says why."""


class WrongResult(Exception):
    """A result differs from its reference by more than its limit."""


class Benchmark:
    """Cases and how one is measured.

    `schema`: Increased when rows change.
    `devices`: What --device may be, its default first.
    `case_limit_s`, `minutes`: Time limits of a case and of all, the latter by default.
    `side_by_side`: Whether several workers measure at the same time.
    """

    schema: ClassVar[int] = 1
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    case_limit_s: ClassVar[float] = 60.0
    minutes: ClassVar[float] = float("inf")
    side_by_side: ClassVar[bool] = False

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Define arguments of its own."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.quick, self.on_gpu = arguments.quick, arguments.device == "cuda"
        self._kept: tuple[Any, Any] | None = None

    @property
    def has_workers(self) -> bool:
        """Whether cases run in worker processes."""
        return self.on_gpu

    def session(self, body: Callable[[], Any]) -> Any:
        """Run what measures, in the process that does, and return its result."""
        return body()

    def start(self) -> dict[str, Any]:
        """Prepare to measure, in the process that does; returns facts of the machine."""
        return {}

    def checks(self) -> list[Case]:
        """Cases that workers compile and check side by side before the others."""
        return []

    def cases(self, machine: dict[str, Any]) -> list[Case]:
        """All cases, most important first; those that share inputs are adjacent."""
        raise NotImplementedError

    def measure(self, case: Case) -> Row:
        """Fields of a checked and timed case. Skipped, WrongResult: instead of times."""
        raise NotImplementedError

    def is_ruled_out(self, case: Case, rows: Sequence[Row]) -> bool:
        """Whether rows so far leave no reason to measure a case."""
        return False

    def following(self, row: Row, rows: Sequence[Row]) -> list[Case]:
        """Cases that follow from a new row and are measured next."""
        return []

    def wrong(self, rows: Sequence[Row]) -> list[str]:
        """What fails the run."""
        bad = [row for row in rows if is_ours(row["job"]) and row["status"] in ("wrong", "failed")]
        return [f"{what(row['job'])}: {row['status']}: {row['reason']}" for row in bad]

    def targets(self, rows: Sequence[Row], machine: dict[str, Any]) -> list[dict[str, Any]]:
        """Targets of speed, each a `verdict`; fields of rows that follow from other rows are added."""
        return []

    def text(self, rows: Sequence[Row]) -> Iterator[str]:
        """More lines for the end."""
        yield from ()

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, kept until another key is asked for."""
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # frees its memory first
            self._kept = key, make()
        return self._kept[1]


def verdict(target: str, need: str, found: float | None, passed: bool | None, note: str = "") -> dict:
    """A target, and whether it is met; `passed` None if it was not measured."""
    state = "not measured" if passed is None else "passed" if passed else "missed"
    found = None if found is None else round(found, 3)
    return {"target": target, "need": need, "found": found, "state": state, "note": note}


def result_of(benchmark: Benchmark, case: Case) -> Row:
    """A case's fields with its `status`, and a `reason` unless it was measured."""
    try:
        return {"status": "measured", **benchmark.measure(case)}
    except WrongResult as error:
        return {"status": "wrong", "reason": str(error)}
    except (Skipped, torch.OutOfMemoryError) as error:
        return {"status": "skipped", "reason": first_line(error)}
    except Exception as error:  # a new kernel or a peer fails in any way, and the others are measured
        traceback.print_exc()
        return {"status": "failed", "reason": f"{type(error).__name__}: {first_line(error)}"}


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else "no message"


def _filter(text: str) -> tuple[str, list[str]]:
    name, _, values = text.partition("=")
    if not name or not values:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE,...")
    return name, values.split(",")


def _passes(case: Case, name: str, values: Sequence[str]) -> bool:
    """Whether a case has one of the values; a peer passes whatever layouts of ours are asked for."""
    return str(case.get(name)) in values or (name == "layout" and not is_ours(case))


class _Run:
    """Cases, filters and time of one run, and its rows."""

    def __init__(self, benchmark: Benchmark, arguments: argparse.Namespace, report: Report) -> None:
        self.benchmark, self.report, self.only = benchmark, report, arguments.only
        self.minutes = arguments.minutes
        self.end = time.monotonic() + 60 * self.minutes
        self.planned: list[Case] = []
        #: Planned cases that have not ended, in case the run is killed.
        report.facts["left"] = 0

    def wanted(self, cases: Sequence[Case]) -> list[Case]:
        """Cases that pass the filters and have no row. ValueError if none passes."""
        chosen = [one for one in cases if all(_passes(one, *only) for only in self.only)]
        if cases and not chosen:
            fields = ", ".join(dict.fromkeys(name for one in cases for name in one))
            raise ValueError(f"no case passes --only; the fields of cases are {fields}")
        return self._new(chosen)

    def _new(self, cases: Sequence[Case]) -> list[Case]:
        found = [
            case
            for case in cases
            if not self.report.has(case) and not self.benchmark.is_ruled_out(case, self.report.rows)
        ]
        self.planned += found
        self.report.facts["left"] += len(found)
        return found

    def plan(self, machine: dict[str, Any]) -> list[Case]:
        self.report.facts |= {"machine": machine, "threads": torch.get_num_threads()}
        return self.wanted(self.benchmark.cases(machine))

    def ended(self, case: Case, found: Row) -> list[Case]:
        row = {"job": case, **found}
        self.report.facts["wrong"] = self.benchmark.wrong([*self.report.rows, row])
        self.report.facts["left"] -= 1
        self.report.add(row)
        print(line(row), flush=True)
        return self._new(self.benchmark.following(row, self.report.rows))

    def here(self) -> str:
        """Run all cases in this process; returns why cases were left."""
        left = deque(self.plan(self.benchmark.start()))
        while left and time.monotonic() < self.end:
            case = left.popleft()
            left.extendleft(reversed(self.ended(case, result_of(self.benchmark, case))))
        return ""

    def in_workers(self, command: Sequence[str]) -> str:
        """Run all cases in worker processes; returns why cases were left."""
        many = min(_MOST_WORKERS, max(1, (os.cpu_count() or 2) - 2))
        limit_s = self.benchmark.case_limit_s
        checks = self.wanted(self.benchmark.checks())
        go = partial(run_jobs, command, ended=self.ended, end=self.end)
        count = many if self.benchmark.side_by_side else 1
        left = go(checks, workers=many, job_limit_s=2 * limit_s)
        return left or go(self.plan, workers=count, job_limit_s=limit_s)

    def add_the_rest(self, left: str) -> int:
        """Add a row for each case that was not run; returns their number."""
        reason = left or f"the {self.minutes:g} minutes were spent"
        rest = [case for case in self.planned if not self.report.has(case)]
        self.report.facts["left"] = 0
        for case in rest:
            self.report.add({"job": case, "status": "not run", "reason": reason})
        return len(rest)


def line(row: Row) -> str:
    """A row for the terminal."""
    if row["status"] != "measured":
        return f"{what(row['job'])}: {row['status']}: {row['reason']}"
    values = {name: value for name, value in row.items() if name not in ("job", "status")}
    return f"{what(row['job'])}: " + ", ".join(f"{name} {_shown(value)}" for name, value in values.items())


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {_shown(one)}" for name, one in value.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _work(benchmark: Benchmark, sent: Jobs) -> int:
    for case in sent.begin(benchmark.start()):
        sent.answer(result_of(benchmark, case), usable=not cuda_is_broken())
    return 0


def _parser(kind: type[Benchmark], prog: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=sys.modules[kind.__module__].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--device", choices=kind.devices, default=kind.devices[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases and repetitions")
    parser.add_argument(
        "--only", type=_filter, action="append", default=[], metavar="NAME=VALUE,...",
        help="cases with one of these values in a field, as printed before the colon of each line",
    )  # fmt: skip
    parser.add_argument("--minutes", type=positive, default=kind.minutes, help="time limit (%(default)g)")
    parser.add_argument("--json", type=Path, help="write the results to this file after each case")
    parser.add_argument("--continue", action="store_true", dest="goes_on", help="keep the results in --json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    kind.add_arguments(parser)
    return parser


def main(kind: type[Benchmark], argv: Sequence[str], prog: str) -> int:
    """Measure, print, write; returns the exit status: 1 for wrong results, or if nothing was measured."""
    parser = _parser(kind, prog)
    arguments = parser.parse_args(argv)
    benchmark = kind(arguments)
    if arguments.worker:
        return benchmark.session(partial(_work, benchmark, Jobs()))
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; give --device cpu")
    name, head = prog.split()[-1], commit()  # before results are written, which changes the checkout
    require_writable(parser, arguments.json)
    facts = {
        "benchmark": name, "schema": kind.schema, "commit": head, "argv": list(argv),
        "device": arguments.device, "quick": arguments.quick, "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__, "sgl-kvpool": __version__, "python": platform.python_version(),
    }  # fmt: skip
    try:
        report = Report(arguments.json, facts, arguments.goes_on)
        run = _Run(benchmark, arguments, report)
        if benchmark.has_workers:
            left = run.in_workers([sys.executable, "-m", "scripts.bench", name, *argv, "--worker"])
        else:
            left = benchmark.session(run.here)
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))
    rest = run.add_the_rest(left)
    wrong = benchmark.wrong(report.rows)
    if not wrong and not any(row["status"] == "measured" and is_ours(row["job"]) for row in report.rows):
        wrong.append("nothing was measured")
    targets = benchmark.targets(report.rows, report.facts.get("machine", {}))
    report.facts |= {"wrong": wrong, "targets": targets}
    report.write()
    for one in targets:
        found = "" if one["found"] is None else f"{one['found']}, "
        print(f"{one['state']:12} {one['target']}, {one['need']}: {found}{one['note']}")
    for line in (*benchmark.text(report.rows), *(f"WRONG: {line}" for line in wrong)):
        print(line)
    if rest:
        print(f"{rest} of {len(report.rows)} measurements not run: {report.rows[-1]['reason']}")
    return int(bool(wrong) or bool(left))
