"""Jobs in worker processes: a job that hangs or crashes loses only its own result.

A new kernel may hang, may kill its process, or may leave a CUDA context in which every later call fails. So
each job is sent to a worker, with a time limit; a worker that hangs, dies or reports a broken context is
replaced by a new one.

The program with the jobs calls `run_jobs`; a worker is a program that iterates over `Jobs.begin`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scripts import ROOT
from sgl_kvpool.commands.waiting import Answers

__all__ = ["Jobs", "Outcome", "cuda_is_broken", "end_with_parent", "run_jobs"]

#: PR_SET_PDEATHSIG of Linux's prctl.
_PR_SET_PDEATHSIG = 1
#: Seconds for a worker to end after its last job, and for a killed worker to disappear: a driver may take a
#: while to stop a kernel that hangs.
_ENDING_S = 10.0
#: Consecutive failed starts of a worker after which its thread gives up.
_FAILED_STARTS = 2


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when its parent ends for any reason (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


def cuda_is_broken() -> bool:
    """Whether this process's CUDA context has a permanent error."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


class Jobs:
    """The worker's side. After construction, all printed text goes to standard error."""

    def __init__(self) -> None:
        end_with_parent()
        self._jobs = os.fdopen(os.dup(0))  # not sys.stdin, which a program such as pytest replaces
        self._answers = Answers()

    def begin(self, hello: Any = None) -> Iterator[Any]:
        """Iterate over the jobs; each must be answered before the next is requested.

        `hello`: Value for the program that sends the jobs, as JSON.
        """
        self._answers.send({"hello": hello})
        for line in self._jobs:
            yield json.loads(line)

    def answer(self, value: Any, *, usable: bool = True) -> None:
        """Send a job's result; a worker that is no longer `usable` exits here."""
        self._answers.send({"value": value, "usable": usable})
        if not usable:
            os._exit(0)  # a broken CUDA context raises in destructors


@dataclass(frozen=True)
class Outcome:
    """Result or failure of a job.

    `value`: The worker's answer; None after a failure.
    `failure`: Reason of a failure: the worker hung or died. Empty after an answer.
    """

    job: Any
    value: Any
    failure: str
    seconds: float


class _Ended(Exception):
    """A worker has ended, or was killed at a time limit; the message says how."""


class _Worker:
    """A worker process."""

    def __init__(self, command: Sequence[str], start_limit_s: float) -> None:
        # The worker imports this package from the same place as this process.
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._buffer = b""
        self.hello = self._read(start_limit_s, "before its first job")["hello"]

    def run(self, job: Any, limit_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; its last output or exit status is read below
        return self._read(limit_s, "")

    def close(self) -> None:
        """Tell the worker that there are no more jobs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the worker has ended already
            self._process.stdin.close()
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._kill()
        self._process.stdout.close()

    def _read(self, limit_s: float, when: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        end = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self._kill()
                raise _Ended(f"hung: killed after {limit_s:g} s {when}".rstrip())
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise _Ended(f"its process {self._how_it_ended()} {when}".rstrip())
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _kill(self) -> None:
        self._process.kill()
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            print(f"process {self._process.pid} has not ended {_ENDING_S:g} s after SIGKILL", file=sys.stderr)

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:  # it still runs, with its output closed
            self._kill()
            return "closed its output"
        if status >= 0:
            return f"ended with exit status {status}"
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"


class _Crew:
    """Workers, one per thread, and the remaining jobs."""

    def __init__(
        self,
        command: Sequence[str],
        jobs: Sequence[Any] | Callable[[Any], Sequence[Any]],
        start_limit_s: float,
        job_limit_s: float,
        ended: Callable[[Outcome], Sequence[Any] | None],
    ) -> None:
        self.command, self.start_limit_s, self.job_limit_s = command, start_limit_s, job_limit_s
        self._ended, self._lock = ended, threading.Lock()
        self._plan = jobs if callable(jobs) else None
        self._left: deque[Any] | None = None if callable(jobs) else deque(jobs)
        self.errors: list[BaseException] = []
        self.reason = ""

    def work(self) -> None:
        """Body of one thread: run a worker, and replace it whenever it has ended."""
        worker, failed = None, 0
        try:
            while failed < _FAILED_STARTS and not self.errors and self.is_unfinished:
                try:
                    worker = worker or self._start()
                except (_Ended, OSError) as error:
                    failed, self.reason = failed + 1, f"no worker could be started: {error}"
                    continue
                failed = 0
                with self._lock:
                    if not self._left:
                        break
                    job = self._left.popleft()
                worker = self._one(worker, job)
        except BaseException as error:  # raised again by `run_jobs`, in the program's own thread
            self.errors.append(error)
        finally:
            if worker is not None:
                worker.close()

    def _start(self) -> _Worker:
        worker = _Worker(self.command, self.start_limit_s)
        with self._lock:
            if self._left is None and self._plan is not None:
                self._left = deque(self._plan(worker.hello))
        return worker

    def _one(self, worker: _Worker, job: Any) -> _Worker | None:
        """Run a job; returns the worker if it can be used again."""
        began = time.monotonic()
        try:
            answer = worker.run(job, self.job_limit_s)
            outcome = Outcome(job, answer["value"], "", time.monotonic() - began)
            usable = answer["usable"]
        except _Ended as error:
            outcome, usable = Outcome(job, None, str(error), time.monotonic() - began), False
        with self._lock:
            assert self._left is not None
            self._left.extendleft(reversed(self._ended(outcome) or ()))
        if usable:
            return worker
        worker.close()
        return None

    @property
    def is_unfinished(self) -> bool:
        """Whether untaken jobs remain; true before the first worker's `hello`."""
        return self._left is None or bool(self._left)


def run_jobs(
    command: Sequence[str],
    jobs: Sequence[Any] | Callable[[Any], Sequence[Any]],
    *,
    ended: Callable[[Outcome], Sequence[Any] | None],
    workers: int = 1,
    start_limit_s: float = 120.0,
    job_limit_s: float = 60.0,
) -> str:
    """Run jobs in worker processes.

    `command`: Command that starts a worker, a program that iterates over `Jobs.begin`.
    `jobs`: JSON-able objects, taken in order; or a function of the first worker's `hello` that returns them.
    `ended`: Called with the `Outcome` of each job when it ends, one call at a time; it returns jobs that are
      run before the others.
    `start_limit_s`, `job_limit_s`: Limits after which a worker is killed.
    Returns: reason why jobs were not run: no worker could be started. Empty if all were run.
    """
    crew = _Crew(command, jobs, start_limit_s, job_limit_s, ended)
    count = workers if callable(jobs) else min(workers, len(jobs))
    threads = [threading.Thread(target=crew.work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if crew.errors:
        raise crew.errors[0]
    return crew.reason if crew.is_unfinished else ""
