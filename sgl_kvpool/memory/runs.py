"""Runs of bytes inside a page, of equal size at equal distances. Imports no torch or SGLang."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from sgl_kvpool.refusal import whole_number

_Runs = TypeVar("_Runs")


@dataclass(frozen=True, kw_only=True)
class PageRuns:
    """Runs of equal size inside a page, run i at `offset_bytes + i * run_stride_bytes`.

    ValueError if a number is not a size, or the runs are empty or overlap.
    """

    #: Index into `CanonicalKVCaches.tensors`.
    tensor_index: int
    #: Place of the runs; the stride of a single run is its size.
    offset_bytes: int
    run_bytes: int
    run_count: int = 1
    run_stride_bytes: int = 0

    def __post_init__(self) -> None:
        least = {"tensor_index": 0, "offset_bytes": 0, "run_bytes": 1, "run_count": 1, "run_stride_bytes": 0}
        for name, at_least in least.items():
            object.__setattr__(self, name, whole_number(name, getattr(self, name), at_least))
        if self.run_count == 1:
            object.__setattr__(self, "run_stride_bytes", self.run_bytes)
        if self.run_stride_bytes < self.run_bytes:
            raise ValueError(f"{self}: runs {self.run_stride_bytes} bytes apart overlap")

    @property
    def size_bytes(self) -> int:
        """Bytes of all runs, which a transfer of the page moves."""
        return self.run_bytes * self.run_count

    @property
    def end_bytes(self) -> int:
        """Offset of the first byte behind the last run."""
        return self.offset_bytes + (self.run_count - 1) * self.run_stride_bytes + self.run_bytes

    def simplified(self) -> PageRuns:
        """The same bytes, as one run if the runs are adjacent."""
        if self.run_stride_bytes != self.run_bytes:
            return self
        return replace(self, run_bytes=self.size_bytes, run_count=1)

    def folded(self, pages: int, page_bytes: int) -> PageRuns:
        """The runs of `pages` consecutive pages of `page_bytes` each, as those of one larger page.

        ValueError if the runs of consecutive pages are not at equal distances.
        """
        if pages == 1:
            return self
        if self.run_count == 1:
            many = replace(self, run_count=pages, run_stride_bytes=page_bytes)
        elif self.run_count * self.run_stride_bytes == page_bytes:
            many = replace(self, run_count=self.run_count * pages)
        else:
            raise ValueError(
                f"{pages} pages of {page_bytes} bytes cannot be one page: {self.run_count} runs at a "
                f"distance of {self.run_stride_bytes} do not continue in the next page; use the pool's own "
                "page size"
            )
        return many.simplified()


def joined_in_order(ordered: Iterable[_Runs], join: Callable[[_Runs, _Runs], _Runs | None]) -> list[_Runs]:
    """Runs in their order; two neighbours are one where `join` returns it, and not None."""
    joined: list[_Runs] = []
    for runs in ordered:
        both = join(joined[-1], runs) if joined else None
        if both is not None:
            joined.pop()
        joined.append(both or runs)
    return joined


def merged(references: Iterable[PageRuns]) -> tuple[PageRuns, ...]:
    """Join adjacent references that have the same stride pattern; those that overlap stay apart."""
    ordered = sorted(references, key=lambda r: (r.tensor_index, r.offset_bytes))
    return tuple(runs.simplified() for runs in joined_in_order(ordered, _joined))


def _joined(a: PageRuns, b: PageRuns) -> PageRuns | None:
    """Both as one if `b` begins where `a` ends, in every run; else None."""
    size, end = a.run_bytes + b.run_bytes, a.offset_bytes + a.run_bytes
    if (a.tensor_index, a.run_count, end) != (b.tensor_index, b.run_count, b.offset_bytes):
        return None
    if b.run_count > 1 and not a.run_stride_bytes == b.run_stride_bytes >= size:
        return None
    return replace(a, run_bytes=size, run_stride_bytes=a.run_stride_bytes if a.run_count > 1 else 0)
