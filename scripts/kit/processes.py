"""Run of a command in its own session with a time limit; all its descendants are ended with it.

A step starts servers in sessions of their own: ending the step's process group would leave them running, with
the GPU's memory. So this process adopts its orphaned descendants (PR_SET_CHILD_SUBREAPER), which are then
found as its children.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_kvpool.commands.processes import program

#: PR_SET_CHILD_SUBREAPER of Linux's prctl.
_PR_SET_CHILD_SUBREAPER = 36
#: Time for a step to stop its servers after SIGTERM, in seconds; each server gets ten seconds.
_GRACE_S = 20.0
#: Time for processes to end by themselves after their step, in seconds. A stopped server's processes take
#: seconds to release CUDA and pinned memory.
_DYING_S = 10.0


@dataclass(frozen=True)
class Ended:
    """Result of a command.

    `returncode`: Exit status; negative for a signal.
    `left_behind`: Descendants that outlived it by ten seconds and were killed.
    """

    returncode: int
    seconds: float
    timed_out: bool
    left_behind: int


def processes() -> dict[int, tuple[int, int, str]]:
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


def _descendants() -> set[tuple[int, str]]:
    """Id and start time of every live descendant of this process; ids alone are reused."""
    rows, found, parents = processes(), set(), {os.getpid()}
    while parents:
        children = {pid for pid, (parent, _, _) in rows.items() if parent in parents}
        found |= {(pid, rows[pid][2]) for pid in children}
        parents = children
    return found


def _end_descendants(before: set[tuple[int, str]]) -> int:
    """Wait for descendants that are ending, kill the rest; returns the number of killed processes."""
    deadline = time.monotonic() + _DYING_S
    while (left := _descendants() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    count, deadline = len(left), time.monotonic() + 5
    while left and time.monotonic() < deadline:
        for pid, _ in left:
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        left = _descendants() - before
    return count


def run_command(
    command: Sequence[str], *, log: Path, cwd: Path, environment: Mapping[str, str], limit_s: float
) -> Ended:
    """Run a command until it ends or its time limit is reached.

    `log`: File for its output.
    `environment`: The complete environment.
    `limit_s`: Time after which it gets SIGTERM, and SIGKILL 20 seconds later.
    Returns: result; all processes that this process started since have ended.
    OSError: if the command cannot be started.
    """
    began = time.monotonic()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    before = _descendants()
    # If this program is killed, the step ends too and does not disturb later runs.
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"there is no program {command[0]}")
    process = program.start(command, environment, log, folder=cwd, parent_ended=signal.SIGTERM)
    timed_out = False
    try:
        process.wait(timeout=max(0.0, limit_s))
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:  # also if Ctrl-C or SIGTERM ended this program's wait
        status = program.end(process, _GRACE_S)
        left_behind = _end_descendants(before)
    return Ended(status, time.monotonic() - began, timed_out, left_behind)
