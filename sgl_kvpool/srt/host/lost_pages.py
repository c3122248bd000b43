"""Which host pages were lost in their backup, of one rank or of all that share a tier. Needs numpy alone."""

from __future__ import annotations

import numpy as np

__all__ = ["LostPages"]


class LostPages:
    """A column of flags for each rank, which that rank alone writes; a page is lost if any column says so.

    So a rank that is slow cannot clear what another one has lost.

    Parameters
    ----------
    columns : ndarray [ranks, pages], uint8
        Zeros; memory that the ranks share, if there are several.
    rank : int
        Whose column is written here.
    """

    def __init__(self, columns: np.ndarray, rank: int = 0):
        self._columns, self._own = columns, columns[rank]
        self.is_closed = False

    @classmethod
    def private(cls, count: int) -> LostPages:
        """Of `count` pages that this process alone has."""
        return cls(np.zeros((1, count), dtype=np.uint8))

    def of(self, pages: np.ndarray) -> np.ndarray:
        """Whether each of some pages is lost, `[pages]` bool."""
        return np.asarray(self._columns[:, pages].any(axis=0) | self.is_closed)

    def any(self, pages: np.ndarray | slice | int) -> bool:
        """Whether one of some pages is lost."""
        return self.is_closed or self.any_flagged(pages)

    def any_flagged(self, pages: np.ndarray | slice | int) -> bool:
        """Whether the backup of one of some pages failed: loads that were agreed on before `close` go on."""
        return bool(self._columns[:, pages].any())

    def set(self, pages: np.ndarray | slice | int, lost: bool) -> None:
        """What this rank says of some pages."""
        self._own[pages] = lost

    def close(self) -> None:
        """Every page is lost from now on; each rank has to call it."""
        self.is_closed = True
