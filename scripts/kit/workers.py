"""Jobs in worker processes: a job that hangs or crashes loses only its own result.

A new kernel may hang, may kill its process, or may leave a CUDA context in which every later call fails. So
each job is sent to a worker, with a time limit; a worker that hangs, dies or reports a broken context is
replaced by a new one.

The program with the jobs calls `run_jobs`; a worker is a program that iterates over `Jobs.begin`.
"""

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

from scripts.kit.environment import on_path
from sgl_kvpool.commands.waiting import Answers

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


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


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


class _Ended(Exception):
    """A worker has ended, or was killed at a time limit; the message says how."""


class _Worker:
    """A worker process, which imports this package from the same place as this process."""

    def __init__(self, command: Sequence[str], start_limit_s: float) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=on_path()
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out, self._buffer = self._process.stdin, self._process.stdout, b""
        self.hello = self._read(start_limit_s, " before its first job")["hello"]

    def run(self, job: Any, limit_s: float) -> dict[str, Any]:
        # If it has ended, its last output or exit status is read below.
        with contextlib.suppress(BrokenPipeError):
            self._in.write(json.dumps(job).encode() + b"\n")
            self._in.flush()
        return self._read(limit_s, "")

    def close(self) -> None:
        """Tell the worker that there are no more jobs."""
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._in.close()
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._kill()
        self._out.close()

    def _read(self, limit_s: float, when: str) -> dict[str, Any]:
        end = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._out], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self._kill()
                raise _Ended(f"hung: killed after {limit_s:g} s{when}")
            chunk = os.read(self._out.fileno(), 1 << 16)
            if not chunk:
                raise _Ended(f"its process {self._how_it_ended()}{when}")
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
        return f"ended with exit status {status}" if status >= 0 else f"was killed by {signal_name(-status)}"


class _Crew:
    """Workers, one per thread, and the remaining jobs. See `run_jobs`."""

    def __init__(self, command, jobs, ended, start_limit_s: float, job_limit_s: float, end: float) -> None:
        self._command, self._ended, self._end = command, ended, end
        self._start_limit_s, self._job_limit_s = start_limit_s, job_limit_s
        self._plan: Callable[[Any], Sequence[Any]] | None = jobs if callable(jobs) else None
        self._left: deque[Any] | None = None if callable(jobs) else deque(jobs)
        self._lock = threading.Lock()
        self.errors: list[BaseException] = []
        self.reason = ""

    @property
    def is_unfinished(self) -> bool:
        """Whether untaken jobs remain; true before the first worker's `hello`."""
        return self._left is None or bool(self._left)

    def work(self) -> None:
        """Body of one thread: run a worker, and replace it whenever it has ended."""
        worker, failed = None, 0
        try:
            while failed < _FAILED_STARTS and not self.errors and self.is_unfinished:
                if time.monotonic() >= self._end:
                    self.reason = ""
                    break
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
                if not self._run(worker, job):
                    worker.close()
                    worker = None
        except BaseException as error:  # raised again by `run_jobs`, in the program's own thread
            self.errors.append(error)
        finally:
            if worker is not None:
                worker.close()

    def _start(self) -> _Worker:
        worker = _Worker(self._command, self._start_limit_s)
        with self._lock:
            if self._left is None and self._plan is not None:
                self._left = deque(self._plan(worker.hello))
        return worker

    def _run(self, worker: _Worker, job: Any) -> bool:
        """Run a job; returns whether the worker can be used again."""
        usable, value, failure = False, None, ""
        try:
            answer = worker.run(job, self._job_limit_s)
            usable, value = answer["usable"], answer["value"]
        except _Ended as error:
            failure = str(error)
        with self._lock:
            assert self._left is not None
            more = self._ended(Outcome(job, value, failure))
            self._left.extendleft(reversed(more or ()))
        return usable


def run_jobs(
    command: Sequence[str],
    jobs: Sequence[Any] | Callable[[Any], Sequence[Any]],
    *,
    ended: Callable[[Outcome], Sequence[Any] | None],
    workers: int = 1,
    start_limit_s: float = 120.0,
    job_limit_s: float = 60.0,
    end: float = float("inf"),
) -> str:
    """Run jobs in worker processes.

    `command`: Command that starts a worker, a program that iterates over `Jobs.begin`.
    `jobs`: JSON-able objects, taken in order; or a function of the first worker's `hello` that returns them.
    `ended`: Called with the `Outcome` of each job when it ends, one call at a time; it returns jobs that are
      run before the others.
    `start_limit_s`, `job_limit_s`: Limits after which a worker is killed.
    `end`: Time of `time.monotonic` from which no job is begun.
    Returns: reason why jobs were not run: no worker could be started. Empty if all were run, or at `end`.
    """
    crew = _Crew(command, jobs, ended, start_limit_s, job_limit_s, end)
    count = workers if callable(jobs) else min(workers, len(jobs))
    threads = [threading.Thread(target=crew.work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if crew.errors:
        raise crew.errors[0]
    return crew.reason if crew.is_unfinished else ""
