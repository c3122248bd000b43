"""NUMA nodes of the machine, and memory whose pages alternate between them. Standard library only."""

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

#: MPOL_INTERLEAVE of <linux/mempolicy.h>.
_MPOL_INTERLEAVE = 3
#: Numbers of the mbind system call by machine; the C library has no function for it.
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
#: Bits per word of mbind's node mask, and words of the mask: Linux has at most 1024 nodes.
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_MASK_WORDS = 1024 // _WORD_BITS


def numa_nodes(folder: Path = Path("/sys/devices/system/node")) -> list[int]:
    """Numbers of the nodes that have memory; empty if the system does not list them."""
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
    """Make pages of a mapping that are not in memory yet alternate between nodes of `numa_nodes`.

    The address is a multiple of the system's page size. Returns the reason of a failure (containers often
    forbid the call); None on success.
    """
    number = _SYS_MBIND.get(os.uname().machine)
    if number is None:
        return f"mbind is not known on {os.uname().machine}"
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
        # The kernel reads one bit less than this count.
        ctypes.c_ulong(_MASK_WORDS * _WORD_BITS + 1),
        ctypes.c_ulong(0),
    )
    return None if status == 0 else os.strerror(ctypes.get_errno())
