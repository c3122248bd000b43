"""The ranks of one machine that hold the same rows, and their collectives. Torch is the only dependency."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sgl_kvpool.refusal import Refusal

__all__ = ["NodeRanks"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class NodeRanks:
    """Ranks of a group that run on this machine.

    Attributes
    ----------
    group : ProcessGroup
        Gloo group of all ranks that hold the same rows, on one or several machines.
    members : tuple of int
        Ranks of the group on this machine, in order.
    rank : int
        Index of this process in `members`.
    fewest : int
        Number of ranks on the machine with the fewest ranks: the tiers of all machines have this many parts.
    """

    group: Any
    members: tuple[int, ...]
    rank: int
    fewest: int

    @classmethod
    def of(cls, group: Any) -> NodeRanks:
        """Find the ranks of a group on this machine; every rank of the group has to call it."""
        places: list[Any] = [None] * dist.get_world_size(group)
        here = _machine()
        dist.all_gather_object(places, here, group=group)
        members = tuple(rank for rank, place in enumerate(places) if place == here)
        fewest = min(Counter(places).values())
        return cls(group, members, members.index(dist.get_rank(group)), fewest)

    @property
    def count(self) -> int:
        """Number of ranks on this machine."""
        return len(self.members)

    @property
    def is_leader(self) -> bool:
        """Whether this is the first rank of the machine."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Values of all ranks of this machine, in order; every rank of the group has to call it."""
        found = self.gather_all(value)
        return [found[member] for member in self.members]

    def gather_all(self, value: Any) -> list[Any]:
        """Values of all ranks of the group, on every machine, in order; every rank has to call it."""
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, value, group=self.group)
        return found

    def minimum(self, *values: int) -> list[int]:
        """Minimum of each value over all ranks of the group, on all machines."""
        least = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.group)
        return least.tolist()


def _machine() -> tuple[str, int]:
    """Kernel and PID namespace: equal for processes that can open each other's files in /proc."""
    try:
        return _BOOT_ID.read_text().strip(), os.stat("/proc/self/ns/pid").st_ino
    except OSError as error:
        raise Refusal(
            f"{error.filename} tells which ranks are on one machine and cannot be read ({error.strerror}); "
            "give --kv-host-sharing rank"
        ) from error
