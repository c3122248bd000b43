"""A command in a session of its own, with a time limit, of which nothing is left when it has ended.

A step starts servers, and servers are started in sessions of their own: ending the step's process group would
leave them, and the GPU's memory with them. So who descends from a step is looked up while it runs.
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

#: Between two looks at the processes of a step.
_LOOK_S = 0.5
#: For a step to stop its servers after SIGTERM; a server gets ten seconds itself.
_GRACE_S = 20.0
#: For processes to end by themselves after their step. A server's take seconds to let go of CUDA and of
#: pinned memory, also after the server was told to stop and has ended.
_DYING_S = 10.0


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes
    ----------
    returncode : int
        Negative for a signal.
    seconds : float
    timed_out : bool
    left_behind : int
        Processes that it had started, that outlived it by ten seconds, and were ended.
    """

    returncode: int
    seconds: float
    timed_out: bool
    left_behind: int


@dataclass(frozen=True)
class _Process:
    """A process, told apart from a later one of the same id by when it started."""

    pid: int
    started: str


class _Family:
    """Everybody who descends from a process, as far as was seen."""

    def __init__(self, pid: int):
        self.sessions = {pid}
        self.pids = {pid}
        self.members: dict[int, _Process] = {}

    def look(self) -> None:
        """Take in who is there now: children, and orphans by their session."""
        rows = _processes()
        # A number that was given to somebody else since is none of ours.
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
        """Wait for who is still dying, kill who is left; returns how many were."""
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
    """Parent, session and start of every living process, by id; empty where there is no /proc."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text()
        except OSError:  # it has ended since
            continue
        # The name, in brackets, may hold anything.
        rest = text.rpartition(")")[2].split()
        if rest[0] != "Z":
            found[int(entry.parent.name)] = (int(rest[1]), int(rest[3]), rest[19])
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself
        os.kill(pid, number)


def _end_with_this_program() -> None:
    """In the child: if this program is killed, it would disturb whoever runs next."""
    end_with_parent(signal.SIGTERM)


def run_command(
    command: Sequence[str],
    *,
    log: Path,
    cwd: Path,
    environment: Mapping[str, str],
    limit_s: float,
) -> Ended:
    """Run a command to its end or to its time limit.

    Parameters
    ----------
    command : sequence of str
    log : Path
        Gets its output.
    cwd : Path
    environment : mapping
        All of it.
    limit_s : float
        After which it gets SIGTERM, and SIGKILL 20 seconds later.

    Returns
    -------
    Ended
        Nothing that the command started is left.

    Raises
    ------
    OSError
        The command cannot be started.
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
        # Also when Ctrl-C or SIGTERM ended this program's wait.
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
