"""Jobs in worker processes: a job that hangs or crashes loses only its own result.

A new kernel may hang, may kill its process, or may leave a CUDA context in which every later call fails. So
each job is sent to a worker, with a time limit; a worker that hangs, dies or reports a broken context is
replaced by a new one.

The program with the jobs calls `run_jobs`; a worker is a program that iterates over `Jobs.begin`
(`sgl_kvpool.commands.processes.worker`).
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from scripts.kit.environment import on_path
from sgl_kvpool.commands.processes.worker import Worker, WorkerEnded

#: Consecutive failed starts of a worker after which its thread gives up.
_FAILED_STARTS = 2


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

    def is_unfinished(self) -> bool:
        """Whether a job can be begun; true before the first worker's `hello`."""
        return self._left != deque() and not self.errors and time.monotonic() < self._end

    def work(self) -> None:
        """Body of one thread: run a worker, and replace it whenever it has ended."""
        failed = 0
        try:
            while failed < _FAILED_STARTS and self.is_unfinished():
                try:
                    worker = self._start()
                except (WorkerEnded, OSError) as error:
                    failed, self.reason = failed + 1, f"no worker could be started: {error}"
                    continue
                failed = 0
                with worker:
                    while self.is_unfinished() and self._run(worker):
                        pass
        except BaseException as error:  # raised again by `run_jobs`, in the program's own thread
            self.errors.append(error)

    def _start(self) -> Worker:
        worker = Worker(self._command, on_path())
        hello = worker.hello(self._start_limit_s)
        with self._lock:
            if self._left is None and self._plan is not None:
                self._left = deque(self._plan(hello))
        return worker

    def _run(self, worker: Worker) -> bool:
        """Run a job, if one is left; returns whether the worker can be used again."""
        with self._lock:
            if not self._left:
                return False
            job = self._left.popleft()
        try:
            answer = worker.run(job, self._job_limit_s)
        except WorkerEnded as error:
            answer = {"usable": False, "value": {"status": "failed", "reason": str(error)}}
        with self._lock:
            assert self._left is not None
            more = self._ended(job, answer["value"])
            self._left.extendleft(reversed(more))
        return answer["usable"]


def run_jobs(
    command: Sequence[str],
    jobs: Sequence[Any] | Callable[[Any], Sequence[Any]],
    *,
    ended: Callable[[Any, dict[str, Any]], Sequence[Any]],
    workers: int = 1,
    start_limit_s: float = 120.0,
    job_limit_s: float = 60.0,
    end: float = float("inf"),
) -> str:
    """Run jobs in worker processes.

    `command`: Command that starts a worker, a program that iterates over `Jobs.begin`.
    `jobs`: JSON-able objects, taken in order; or a function of the first worker's `hello` that returns them.
    `ended`: Called with each job and the worker's answer, whose `status` is "failed" with a `reason` if the
      worker hung or died, one call at a time; it returns jobs that are run before the others.
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
    return crew.reason if crew.is_unfinished() else ""
