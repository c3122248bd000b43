"""Host pages lost in their backup, of one rank or of ranks that share a tier. Needs numpy only."""

from __future__ import annotations

import numpy as np

__all__ = ["LostPages"]


class LostPages:
    """Flags of each rank, which only that rank writes; a page is lost if any rank has flagged it.

    Therefore a slow rank cannot clear the flag of another rank.

    Parameters
    ----------
    flags : ndarray [ranks, pages], uint8
        Zeros, in memory that the ranks share if there are several.
    rank : int
        Rank whose flags this object writes.
    """

    def __init__(self, flags: np.ndarray, rank: int = 0):
        self._flags, self._own = flags, flags[rank]
        self.is_closed = False

    @classmethod
    def private(cls, count: int) -> LostPages:
        """Flags of `count` pages that belong to this process alone."""
        return cls(np.zeros((1, count), dtype=np.uint8))

    def of(self, pages: np.ndarray) -> np.ndarray:
        """Flags of some pages, `[pages]` bool: whether each is lost."""
        return np.asarray(self._flags[:, pages].any(axis=0) | self.is_closed)

    def any(self, pages: np.ndarray | slice | int) -> bool:
        """Whether any of some pages is lost."""
        return self.is_closed or self.any_flagged(pages)

    def any_flagged(self, pages: np.ndarray | slice | int) -> bool:
        """As `any`, but ignores `close`: loads on which the ranks agreed before the close continue."""
        return bool(self._flags[:, pages].any())

    def set(self, pages: np.ndarray | slice | int, lost: bool) -> None:
        """Set this rank's flags of some pages."""
        self._own[pages] = lost

    def close(self) -> None:
        """Mark every page as lost from now on; each rank has to call it."""
        self.is_closed = True
