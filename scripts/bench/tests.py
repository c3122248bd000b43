"""Tests of pytest as cases: one that hangs, crashes, or breaks its CUDA context fails alone.

    python -m scripts.bench tests FILES... --json results.json --continue

The first case of every test function comes first, then the second of each, so that an interrupted run has
tried every function. Each worker is a pytest process that has collected all tests and runs the tests it
receives. Module fixtures are created again for each test, except with --together, which runs all tests in
this process.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import pytest

from scripts.bench.sweep import Benchmark, Skipped, WrongResult

_LONGEST_REASON = 300


class PytestCases(Benchmark):
    """All tests of some files. It is also the plugin of the pytest that runs them."""

    devices = ("cpu",)  # the tests choose the GPU themselves
    case_limit_s = 90.0
    side_by_side = True

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("files", nargs="+", metavar="FILE")
        parser.add_argument("--together", action="store_true", help="in this process, in their order")

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self._arguments = arguments
        self._broken_files: dict[str, str] = {}
        self._items: dict[str, Any] = {}
        self._reports: list[Any] = []
        self._results: list[Any] = []

    @property
    def has_workers(self) -> bool:
        return not self._arguments.together

    def session(self, body: Callable[[], Any]) -> Any:
        """Run `body` inside of pytest, once it has collected the tests; RuntimeError if it does not."""
        self._body = body
        # The parent limits the time per test, because it can also end a CUDA call that hangs.
        words = ["-q", "--no-summary", "-p", "no:cacheprovider", *self._arguments.files]
        status = pytest.main(words, plugins=[self])
        if not self._results:
            raise RuntimeError(f"pytest ended with status {int(status)} before its first test")
        return self._results[0]

    def start(self) -> dict[str, Any]:
        return {"tests": list(self._items), "broken_files": self._broken_files}

    def cases(self, machine: dict[str, Any]) -> list[dict[str, Any]]:
        asked, names = self._arguments, machine["tests"]
        order = names if asked.together else in_order(names)
        self._broken_files = machine["broken_files"]
        return [{"test": name} for name in (*self._broken_files, *order)]

    def measure(self, case: dict[str, Any]) -> dict[str, Any]:
        name = case["test"]
        if name in self._broken_files:
            raise WrongResult(f"cannot be collected: {self._broken_files[name]}")
        self._reports.clear()
        self._items[name].config.hook.pytest_runtest_protocol(
            item=self._items[name], nextitem=self._following(name)
        )
        failed = [report for report in self._reports if report.failed]
        for report in failed:  # whole, for the log
            print(f"\n{report.nodeid}, {report.when}\n{report.longreprtext}", flush=True)
        if failed:
            crash = getattr(failed[0].longrepr, "reprcrash", None)
            raise WrongResult(_shortened(failed[0].longreprtext if crash is None else crash.message))
        for report in self._reports:
            if report.skipped:
                raise Skipped(_shortened(report.longrepr[2] if isinstance(report.longrepr, tuple) else ""))
        return {"seconds": round(sum(report.duration for report in self._reports), 2)}

    def _following(self, name: str) -> Any:
        """The next test, whose fixtures are kept; None in a worker."""
        names = list(self._items)
        later = names[names.index(name) + 1 :][:1] if self._arguments.together else []
        return self._items[later[0]] if later else None

    def wrong(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        left = sum(row["status"] == "not run" for row in rows)
        return [*super().wrong(rows), *([f"{left} tests not run"] if left else [])]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            last = str(report.longrepr).strip().splitlines()[-1]
            self._broken_files[report.nodeid] = last.removeprefix("E").strip()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._reports.append(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        self._results.append(self._body())
        return True


def _shortened(reason: str) -> str:
    return " ".join(reason.removeprefix("Skipped: ").split())[:_LONGEST_REASON]


def in_order(names: Sequence[str]) -> list[str]:
    """The first case of each test function, then the second of each, and so on."""
    cases: dict[str, Iterator[int]] = defaultdict(count)
    return sorted(names, key=lambda name: next(cases[name.partition("[")[0]]))
