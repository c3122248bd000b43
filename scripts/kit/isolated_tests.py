#!/usr/bin/env python3
"""pytest tests in worker processes: a test that hangs, crashes, or breaks its CUDA context fails alone.

    python -m scripts.kit.isolated_tests --out FOLDER [--workers N] [--test-limit-s 90]
        [--first TEST] [--then FILE] FILES...

FOLDER gets tests.jsonl: the number of tests, then a line per test as soon as it has ended. Tests with a line
there are not run again, so that an interrupted run continues. The first case of every test function comes
first, then the second of each, so that an interrupted run has tried every function. --first names a test that
compiles code for others, --then the files whose tests need this code. Exit status 1 if a test failed
or could not be run, or if none passed.

Each worker is a pytest process that has collected all tests and runs the tests it receives. Module fixtures
are created again for each test, except with --workers 0, which runs all tests in this process.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.kit.records import Measurement, read_lines, write_lines
from scripts.kit.workers import Jobs, Outcome, cuda_is_broken, run_jobs

__all__ = ["in_order", "main", "measurements"]

#: A worker on a GPU uses one core most of the time, for the compiler or for a reference on the CPU.
_MOST_WORKERS = 12
_LONGEST_REASON = 300


class _Results:
    """Writer of a line per test."""

    def __init__(self, path: Path, first: str | None = None, then: Sequence[str] = ()) -> None:
        self.path, self.first, self.then = path, first, then
        lines = read_lines(path) if path.exists() else []
        self.done = {line["test"]: line["outcome"] for line in lines if "test" in line}

    def write(self, test: str, outcome: str, reason: str = "", seconds: float = 0.0) -> None:
        self.done[test] = outcome
        line = {"test": test, "outcome": outcome, "reason": reason, "seconds": round(seconds, 2)}
        write_lines(self.path, [line])
        print(f"{outcome:8} {seconds:6.1f} s  {test}{f'  {reason}' if reason else ''}", flush=True)

    def plan(self, hello: dict[str, Any]) -> list[str]:
        """Remaining tests of those that the first worker has collected."""
        write_lines(self.path, [{"collected": len(hello["tests"])}])
        for file, reason in hello["broken_files"].items():
            self.write(file, "failed", f"cannot be collected: {reason}")
        names = in_order(hello["tests"], self.first, self.then)
        return [name for name in names if name not in self.done]

    def ended(self, outcome: Outcome) -> None:
        found = outcome.value or {"outcome": "failed", "reason": outcome.failure}
        self.write(outcome.job, found["outcome"], found["reason"], outcome.seconds)


class _Plugin:
    """pytest plugin that makes the process a worker, or with `results` runs all tests here."""

    def __init__(self, results: _Results | None) -> None:
        self.results, self._jobs = results, None if results else Jobs()
        self.broken_files: dict[str, str] = {}
        self._reports: list[Any] = []

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            last = str(report.longrepr).strip().splitlines()[-1]
            self.broken_files[report.nodeid] = last.removeprefix("E").strip()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._reports.append(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> bool:
        items = {item.nodeid: item for item in session.items}
        hello = {"tests": list(items), "broken_files": self.broken_files}
        if self._jobs is not None:
            for name in self._jobs.begin(hello):
                found = self._run(items[name], None)
                self._jobs.answer(found, usable=found["outcome"] != "failed" or not cuda_is_broken())
            return True
        assert self.results is not None
        wanted = set(self.results.plan(hello))
        left = [item for item in session.items if item.nodeid in wanted]
        for item, following in zip(left, [*left[1:], None], strict=False):
            found = self._run(item, following)
            self.results.ended(Outcome(item.nodeid, found, "", sum(one.duration for one in self._reports)))
        return True

    def _run(self, item: Any, following: Any) -> dict[str, Any]:
        """Outcome of one test, from the reports of its setup, call and teardown."""
        self._reports.clear()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        failed = [report for report in self._reports if report.failed]
        skipped = [report for report in self._reports if report.skipped]
        reason = ""
        for report in failed:
            # The step's log has the whole report.
            print(f"\n{report.nodeid}, {report.when}\n{report.longreprtext}", flush=True)
        if failed:
            crash = getattr(failed[0].longrepr, "reprcrash", None)
            reason = failed[0].longreprtext if crash is None else crash.message
        elif skipped:
            reason = skipped[0].longrepr[2] if isinstance(skipped[0].longrepr, tuple) else "skipped"
        return {
            "outcome": "failed" if failed else "skipped" if skipped else "passed",
            "reason": " ".join(reason.removeprefix("Skipped: ").split())[:_LONGEST_REASON],
        }


def in_order(names: Sequence[str], first: str | None = None, then: Sequence[str] = ()) -> list[str]:
    """The first case of each test function, then the second of each, and so on.

    `first`, `then`: A test before all others, and files whose tests come last.
    """
    seen: dict[str, int] = defaultdict(int)
    places = []
    for name in names:
        function = name.partition("[")[0]
        group = 0 if name == first else 2 if name.partition("::")[0] in then else 1
        places.append((group, seen[function]))
        seen[function] += 1
    return [name for _, name in sorted(zip(places, names, strict=True), key=lambda pair: pair[0])]


def _pytest(files: Sequence[str], results: _Results | None) -> int:
    # The parent limits the time per test, because it can also end a CUDA call that hangs.
    words = ["-q", "--no-summary", "-p", "no:cacheprovider", *files]
    return int(pytest.main(words, plugins=[_Plugin(results)]))


def measurements(folder: Path) -> list[Measurement]:
    """Measurements of tests.jsonl, also of an interrupted run."""
    found = read_lines(folder / "tests.jsonl")
    tests = {line["test"]: line for line in found if "test" in line}.values()
    collected = [line["collected"] for line in found if "collected" in line]
    count = {name: sum(one["outcome"] == name for one in tests) for name in ("passed", "failed", "skipped")}
    failing = [f"{_short(one['test'])}: {one['reason']}" for one in tests if one["outcome"] == "failed"]
    note = "; ".join(failing[:5]) + (f"; and {len(failing) - 5} more" if len(failing) > 5 else "")
    why = "; ".join(sorted({one["reason"] for one in tests if one["outcome"] == "skipped"})[:3])
    left = max(0, collected[-1] - sum("::" in one["test"] for one in tests))
    return [
        Measurement("tests passed", count["passed"], "tests", "count", at_least=1),
        Measurement("tests failed", count["failed"], "tests", "count", "lower", at_most=0, note=note),
        Measurement("tests skipped", count["skipped"], "tests", "count", "lower", note=why),
        Measurement("tests not run", left, "tests", "count", "lower", at_most=0),
    ]


def _short(test: str) -> str:
    """Name of a test without the folder of its file."""
    file, _, name = test.partition("::")
    return f"{Path(file).stem.removeprefix('test_')}: {name}" if name else file


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tests; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workers", type=int, default=min(_MOST_WORKERS, max(1, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--test-limit-s", type=float, default=90.0)
    parser.add_argument("--first", metavar="TEST")
    parser.add_argument("--then", action="append", default=[], metavar="FILE")
    parser.add_argument("files", nargs="+")
    arguments = parser.parse_args(argv)
    if arguments.worker:
        return _pytest(arguments.files, None)
    results = _Results(arguments.out / "tests.jsonl", arguments.first, arguments.then)
    files = [*arguments.files, *arguments.then]
    if arguments.workers:
        command = [sys.executable, "-m", "scripts.kit.isolated_tests", "--worker", *files]
        left = run_jobs(
            command, results.plan, ended=results.ended, workers=arguments.workers,
            job_limit_s=arguments.test_limit_s,
        )  # fmt: skip
    else:
        left = "pytest collected nothing" if _pytest(files, results) > 1 else ""
    passed = "passed" in results.done.values()
    if left or not passed:
        print(left or "no test passed")
    return int(bool(left) or not passed or "failed" in results.done.values())


if __name__ == "__main__":
    sys.exit(main())
