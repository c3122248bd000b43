"""Run of a command in its own session with a time limit; all its descendants are ended with it.

A step starts servers in sessions of their own: ending the step's process group would leave them running, with
the GPU's memory. So the descendants of a step are recorded while it runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_kvpool.commands.bench.crew import end_with_parent

__all__ = ["Ended", "run_command"]

#: Interval between two scans of a step's processes, in seconds.
_LOOK_S = 0.5
#: Time for a step to stop its servers after SIGTERM, in seconds; each server gets ten seconds.
_GRACE_S = 20.0
#: Time for processes to end by themselves after their step, in seconds. A stopped server's processes take
#: seconds to release CUDA and pinned memory.
_DYING_S = 10.0


@dataclass(frozen=True)
class Ended:
    """Result of a command.

    Attributes
    ----------
    returncode : int
        Exit status; negative for a signal.
    seconds : float
    timed_out : bool
    left_behind : int
        Descendants that outlived it by ten seconds and were killed.
    """

    returncode: int
    seconds: float
    timed_out: bool
    left_behind: int


@dataclass(frozen=True)
class _Process:
    """A process, identified by its id and start time, since ids are reused."""

    pid: int
    started: str


class _Family:
    """The observed descendants of a process."""

    def __init__(self, pid: int):
        self.sessions = {pid}
        self.pids = {pid}
        self.members: dict[int, _Process] = {}

    def look(self) -> None:
        """Record the present descendants: children, and orphans by their session."""
        rows = _processes()
        # Ignore ids that have been reused by other processes.
        self.sessions &= {session for _, session, _ in rows.values()}
        for pid, known in list(self.members.items()):
            if pid not in rows or rows[pid][2] != known.started:
                del self.members[pid]
        self.pids = {*self.members, *(self.pids & self.sessions)}
        grown = True
        while grown:
            grown = False
            for pid, (parent, session, started) in rows.items():
                if pid not in self.members and (parent in self.pids or session in self.sessions):
                    self.members[pid] = _Process(pid, started)
                    self.pids.add(pid)
                    if session == pid:
                        self.sessions.add(session)
                    grown = True

    def end(self) -> int:
        """Wait for descendants that are ending, kill the rest; returns the number of killed processes."""
        self.look()
        deadline = time.monotonic() + _DYING_S
        while self.members and time.monotonic() < deadline:
            time.sleep(0.05)
            self.look()
        count = len(self.members)
        deadline = time.monotonic() + 5
        while self.members and time.monotonic() < deadline:
            for pid in self.members:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.05)
            self.look()
        return count


def _processes() -> dict[int, tuple[int, int, str]]:
    """Parent, session and start time of every live process, by id; empty without /proc."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text()
        except OSError:  # the process has ended
            continue
        # The name, in parentheses, may contain any character.
        rest = text.rpartition(")")[2].split()
        if rest[0] != "Z":
            found[int(entry.parent.name)] = (int(rest[1]), int(rest[3]), rest[19])
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        os.kill(pid, number)


def _end_with_this_program() -> None:
    """Runs in the child: end it if this program is killed, so that it does not disturb later runs."""
    end_with_parent(signal.SIGTERM)


def run_command(
    command: Sequence[str],
    *,
    log: Path,
    cwd: Path,
    environment: Mapping[str, str],
    limit_s: float,
) -> Ended:
    """Run a command until it ends or its time limit is reached.

    Parameters
    ----------
    command : sequence of str
    log : Path
        File for its output.
    cwd : Path
    environment : mapping
        The complete environment.
    limit_s : float
        Time after which it gets SIGTERM, and SIGKILL 20 seconds later.

    Returns
    -------
    Ended
        Result; all processes that the command started have ended.

    Raises
    ------
    OSError
        If the command cannot be started.
    """
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=cwd, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_end_with_this_program,
        )  # fmt: skip
    family = _Family(process.pid)
    timed_out = False
    try:
        while True:
            left_s = began + limit_s - time.monotonic()
            if left_s <= 0:
                timed_out = True
                break
            try:
                process.wait(timeout=min(_LOOK_S, left_s))
                break
            except subprocess.TimeoutExpired:
                family.look()
    finally:
        # Stop the command, also if Ctrl-C or SIGTERM ended this program's wait.
        if process.poll() is None:
            family.look()
            _signal(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                _signal(process.pid, signal.SIGKILL)
                process.wait()
        left_behind = family.end()
    return Ended(process.returncode, time.monotonic() - began, timed_out, left_behind)
