"""Processes that run tests for another pytest, which hands them out one by one and reports their results.

Processes of their own, because Triton reads TRITON_INTERPRET when kernels are imported, and ptxrun replaces
its driver.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

#: The worker's end of a socket, by number; set in workers.
SOCKET_VARIABLE = "TEST_PTXRUN_SOCKET"


class Workers:
    """Runs tests in several processes at a time.

    Parameters
    ----------
    config : pytest.Config
    items : list of pytest.Item
        All tests that will be requested, in this order.
    environment : dict
    """

    def __init__(self, config: pytest.Config, items: list[pytest.Item], environment: dict[str, str]) -> None:
        self._config, self._environment = config, environment
        self._waiting, self._count = deque(items), len(items)
        self._files = sorted({str(item.path) for item in items})
        self._selector = selectors.DefaultSelector()
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self._done: set[str] = set()
        self._broken = ""
        for _ in range(min(len(items), len(os.sched_getaffinity(0)), 4)):
            self._start()

    def reports(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        """Reports of a test; waits for them."""
        while item.nodeid not in self._done:
            if not self._selector.get_map():
                yield _failure(item, f"no process to run it\n{self._broken}")
                return
            for key, _ in self._selector.select():
                key.data.receive()
        if len(self._done) == self._count:
            # Each worker would hold 2.4 GB until the session ends, beside servers that want 10.7 GB free.
            self.close()
        yield from self._reports.pop(item.nodeid)

    def close(self) -> None:
        for key in list((self._selector.get_map() or {}).values()):
            key.data.kill()
        self._selector.close()

    def _start(self) -> None:
        worker = _Worker(self)
        self._selector.register(worker.socket, selectors.EVENT_READ, worker)

    def next(self) -> pytest.Item | None:
        return self._waiting.popleft() if self._waiting else None

    def add(self, report: pytest.TestReport) -> None:
        self._reports.setdefault(report.nodeid, []).append(report)

    def finished(self, item: pytest.Item) -> None:
        self._done.add(item.nodeid)

    def ended(self, worker: _Worker, item: pytest.Item | None, output: str) -> None:
        """A worker is gone; another takes its place unless this one never got to a test."""
        self._selector.unregister(worker.socket)
        if item is None:
            self._broken = output
            return
        self.add(_failure(item, f"the process ended while it ran this test\n{output}"))
        self.finished(item)
        if self._waiting:
            self._start()


class _Worker:
    def __init__(self, workers: Workers) -> None:
        self._workers, config = workers, workers._config
        self.socket, other = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115, open as long as the process
        self._item: pytest.Item | None = None
        self._received = b""
        command = [
            sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={config.rootpath}",
            f"--tb={config.option.tbstyle}", *["-v"] * config.option.verbose, *workers._files,
        ]  # fmt: skip
        with other:
            self._process = subprocess.Popen(
                command,
                cwd=config.rootpath,
                env={**workers._environment, SOCKET_VARIABLE: str(other.fileno())},
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
            )

    def receive(self) -> None:
        """Read the available lines: null asks for the next test, any other line is a report."""
        found = self.socket.recv(1 << 16)
        if not found:
            self._process.wait()
            self._output.seek(max(0, self._output.tell() - 4000))
            output = f"exit status {self._process.returncode}\n{self._output.read().decode(errors='replace')}"
            self._workers.ended(self, self._item, output)
            self.socket.close()
            return
        *lines, self._received = (self._received + found).split(b"\n")
        config = self._workers._config
        for data in map(json.loads, lines):
            if data is not None:
                self._workers.add(config.hook.pytest_report_from_serializable(config=config, data=data))
                continue
            if self._item is not None:
                self._workers.finished(self._item)
            self._item = self._workers.next()
            if self._item is not None:
                self.socket.sendall(self._item.nodeid.encode() + b"\n")
            # Without an answer the worker waits until it is killed.

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.socket.close()


def _failure(item: pytest.Item, text: str) -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")


class Answers:
    """The plugin of a worker: asks for tests, runs them and sends their reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._socket = socket.socket(fileno=int(os.environ[SOCKET_VARIABLE]))

    def _send(self, data: Any) -> None:
        self._socket.sendall(json.dumps(data).encode() + b"\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            return True  # at collection: the process ends, and its output says why
        items = {item.nodeid: item for item in session.items}
        requests = self._socket.makefile()
        self._send(None)
        for line in requests:
            # Fixtures live for one test only, because the next test is not known yet.
            item = items[line.rstrip("\n")]
            self._config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            self._send(None)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._send(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))
