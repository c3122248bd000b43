"""Programs in sessions of their own, which end with the process that starts them; imports no torch."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sgl_kvpool.commands.processes.forks import Forked

#: Runs a program to which the kernel sends signal `argv[2]` (PR_SET_PDEATHSIG) when the thread of process
#: `argv[1]` that started it ends, so that no server outlives a SIGKILL of this process. SGLang's schedulers
#: do the same.
_BOUND = """import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[2])) or os.getppid() != int(sys.argv[1]) or \\
    os.execvp(sys.argv[3], sys.argv[3:])"""


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    *,
    folder: Path | None = None,
    parent_ended: signal.Signals = signal.SIGKILL,
) -> subprocess.Popen[bytes]:
    """Start a program whose output replaces `log`; `parent_ended` ends it if the thread that starts it ends.

    A program that does not exist ends with status 1, and the reason is in `log`.
    """
    bound = [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), str(int(parent_ended))]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*bound, *command], cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def end(process: subprocess.Popen[bytes] | Forked, grace_s: float) -> int:
    """End a program, after `grace_s` by SIGKILL, and all processes of its group; returns its exit status."""
    try:
        # The program ends its children. If they got the signal too, SGLang would take their end for a
        # crash, and wait for 5 s.
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=grace_s)
    except subprocess.TimeoutExpired:
        pass  # killed below
    finally:
        # Also if the wait was interrupted, and if children outlive the program.
        kill(process)
        status = process.wait()
    return status


def kill(process: subprocess.Popen[bytes] | Forked) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
