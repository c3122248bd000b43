"""Programs that have ended, processes that still run, and waiting for a condition, as tests ask for them."""

import os
import subprocess
import time
from collections.abc import Callable

import psutil


def ran(*command, **options) -> subprocess.CompletedProcess:
    """A program that has ended, with its output as text."""
    return subprocess.run(command, **{"capture_output": True, "text": True, "timeout": 600, **options})


def alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not: the init of some containers never reaps orphans."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ended(pid: int, seconds: float = 5.0) -> bool:
    """Whether a process ends within so many seconds."""
    return holds(lambda: not alive(pid), seconds)


def holds(condition: Callable[[], object], seconds: float) -> bool:
    """Whether a condition holds within so many seconds."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(found)


def naming(text: str) -> list[str]:
    """Command lines of other living processes that hold a text."""
    others = (one for one in psutil.process_iter(["cmdline"]) if one.pid != os.getpid())
    return [words for one in others if text in (words := " ".join(one.info["cmdline"] or ()))]
