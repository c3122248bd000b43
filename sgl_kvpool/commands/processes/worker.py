"""Jobs in a worker process, as JSON: a job that hangs or crashes loses only its own result.

A program that has jobs makes a :class:`Worker`; the worker is a program that iterates over `Jobs.begin`.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Self

from sgl_kvpool.commands.processes import program

#: Seconds for a worker to end after its last job, and for a killed worker to disappear: a driver may take a
#: while to stop a kernel that hangs.
_ENDING_S = 10.0


class Jobs:
    """The worker's side. After construction, all printed text goes to standard error."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the thread that started it
        # Descriptors, not sys.stdin and sys.stdout, which a program such as pytest replaces.
        self._jobs, self._answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def begin(self, hello: Any = None) -> Iterator[Any]:
        """Iterate over the jobs; each must be answered before the next is requested.

        `hello`: Value for the program that sends the jobs, as JSON.
        """
        print(file=self._answers)  # ends what imports have printed
        self._send({"hello": hello})
        for line in self._jobs:
            yield json.loads(line)

    def answer(self, value: Any, *, usable: bool = True) -> None:
        """Send a job's result; a worker that is no longer `usable` exits here."""
        self._send({"value": value, "usable": usable})
        if not usable:
            os._exit(0)  # a broken CUDA context raises in destructors

    def _send(self, answer: Any) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)


class WorkerEnded(RuntimeError):
    """A worker has ended, or was killed at a time limit; the message says how."""


class Worker:
    """A worker process, in a session of its own; an exception that leaves its block kills it."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        errors: IO[Any] | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment,
            start_new_session=True,  # so that its forks end with it
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out, self._buffer = self._process.stdin, self._process.stdout, b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._kill()
        self.close()

    def hello(self, limit_s: float) -> Any:
        """What it says once it is ready for jobs; to be called first. WorkerEnded as `run`."""
        while not (line := self._read(limit_s, " before its first job")).startswith(b'{"hello":'):
            pass  # printed by imports
        return json.loads(line)["hello"]

    def run(self, job: Any, limit_s: float) -> dict[str, Any]:
        """Send a job; returns its `value` and whether the worker is still `usable`.

        WorkerEnded if the worker has ended, or does not answer within `limit_s`.
        """
        # If it has ended, its last output or exit status is read below.
        with contextlib.suppress(BrokenPipeError):
            self._in.write(json.dumps(job).encode() + b"\n")
            self._in.flush()
        return json.loads(self._read(limit_s, ""))

    def close(self) -> None:
        """Tell the worker that there are no more jobs."""
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._in.close()
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._kill()
        self._out.close()

    def _read(self, limit_s: float, when: str) -> bytes:
        end = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._out], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self._kill()
                raise WorkerEnded(f"hung: killed after {limit_s:g} s{when}")
            chunk = os.read(self._out.fileno(), 1 << 16)
            if not chunk:
                raise WorkerEnded(f"its process {self._how_it_ended()}{when}")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _kill(self) -> None:
        program.kill(self._process)
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


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
