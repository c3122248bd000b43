"""Processes that still run, as tests ask for them."""

import psutil


def alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not: the init of some containers never reaps orphans."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
