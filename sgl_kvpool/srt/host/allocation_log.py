"""Digests of a host tier's allocations, which ranks compare. Numpy and xxhash are the only dependencies."""

from __future__ import annotations

from collections import deque

import numpy as np
import xxhash

__all__ = ["AllocationLog", "first_difference", "slots_digest", "slots_in_words"]

#: Number of operations that are kept to name the first one in which ranks differ: those of a few hundred
#: requests.
_KEPT = 1024
#: 62 bits, so that the digest and its negative are int64.
_DIGEST_BITS = 62


class AllocationLog:
    """A rolling digest of the allocations and frees of one rank in order, and the latest operations.

    Ranks that share a tier run the same scheduler, so they give the same pages to the same requests. If they
    did not, one rank would overwrite a page of another.
    """

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self._count = 0
        self._latest: deque[tuple[int, str, int]] = deque(maxlen=_KEPT)

    def add(self, what: str, slots: np.ndarray) -> None:
        """Record an operation.

        Parameters
        ----------
        what : str
            "alloc", "free" or "clear".
        slots : ndarray [slots], int64
            Slots that were allocated or freed; for "clear", all slots.
        """
        self._hash.update(what.encode())
        self._hash.update(np.ascontiguousarray(slots, dtype=np.int64).data)
        self._count += 1
        self._latest.append((self._count, f"{what} of {slots_in_words(slots)}", self.digest))

    @property
    def digest(self) -> int:
        """Digest from 0 to 2 ** 62 - 1, equal on ranks with the same operations."""
        return _int62(self._hash)

    def latest(self) -> list[tuple[int, str, int]]:
        """The latest operations as (number, text, digest after it)."""
        return list(self._latest)


def slots_digest(slots: np.ndarray) -> int:
    """Digest of one list in its order, from 0 to 2 ** 62 - 1."""
    return _int62(xxhash.xxh3_64(np.ascontiguousarray(slots, dtype=np.int64).data))


def slots_in_words(slots: np.ndarray) -> str:
    """Text about a list for the log."""
    return f"{len(slots)} slots from {slots[0]}" if len(slots) else "0 slots"


def _int62(hashed: xxhash.xxh3_64) -> int:
    return hashed.intdigest() >> (64 - _DIGEST_BITS)


def first_difference(histories: list[list[tuple[int, str, int]]]) -> str:
    """Text about the first operation in which ranks differ.

    Parameters
    ----------
    histories : list of list
        `AllocationLog.latest` of each rank.
    """
    by_number = [{number: (what, digest) for number, what, digest in history} for history in histories]
    for number in sorted(set().union(*by_number)):
        entries = [entries.get(number) for entries in by_number]
        digests = {entry[1] if entry else None for entry in entries}
        # An operation that one rank no longer keeps cannot be compared.
        oldest = max((min(entries) for entries in by_number if entries), default=0)
        if len(digests) > 1 and number >= oldest:
            texts = [f"rank {rank}: {entry[0] if entry else 'nothing'}" for rank, entry in enumerate(entries)]
            return f"operation {number}, {'; '.join(texts)}"
    return f"an operation before the latest {_KEPT}"
