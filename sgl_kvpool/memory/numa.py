"""NUMA nodes of the machine, and memory whose pages alternate between them. Needs ctypes alone."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["interleave", "numa_nodes"]

#: Of <linux/mempolicy.h>.
_MPOL_INTERLEAVE = 3
#: Numbers of the system call, which the C library has no function for.
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
#: Bits of a word of mbind's mask of nodes, and words that it gets here: Linux has at most 1024 nodes.
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_MASK_WORDS = 1024 // _WORD_BITS


def numa_nodes(folder: Path = Path("/sys/devices/system/node")) -> list[int]:
    """Numbers of the nodes that have memory; empty where the system does not say."""
    try:
        text = (folder / "has_memory").read_text().strip()
    except OSError:
        return []
    nodes: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return nodes


def interleave(address: int, size_bytes: int, nodes: Sequence[int]) -> str | None:
    """Let pages of a mapping that are not in memory yet alternate between nodes.

    Parameters
    ----------
    address, size_bytes : int
        Of the mapping; the address of a page of the system.
    nodes : sequence of int
        From `numa_nodes`.

    Returns
    -------
    str or None
        Why the system did not; containers often forbid it. None if it did.
    """
    number = _SYS_MBIND.get(os.uname().machine)
    if number is None:
        return f"not known on {os.uname().machine}"
    mask = (ctypes.c_ulong * _MASK_WORDS)()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    libc = ctypes.CDLL(None, use_errno=True)
    status = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(-(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE),
        ctypes.c_long(_MPOL_INTERLEAVE),
        mask,
        # The kernel takes one bit less than it is told.
        ctypes.c_ulong(_MASK_WORDS * _WORD_BITS + 1),
        ctypes.c_ulong(0),
    )
    return None if status == 0 else os.strerror(ctypes.get_errno())
