"""Plan of a transfer between two sets of caches: which bytes of a page are copied where.

Everything that does not depend on page indices is computed once, when both sides are known: one `CopyRun` per
layer. For pages p_source and p_target a `CopyRun` moves, for i in range(run_count), the bytes ::

    source_address + p_source * source_page_stride + i * source_run_stride   [run_bytes]
    target_address + p_target * target_page_stride + i * target_run_stride   [run_bytes]

Layers whose runs are adjacent on both sides share one `CopyRun`. Compiled code gets the runs as integers
(`run_table`). For the copy engine, csrc/copies.h also joins the runs of adjacent pages.

Where rows change their format on the way (`RowConversion`), a run is one row, `run_bytes` long in the source,
and each layer keeps its own `CopyRun`.

Addresses are byte addresses as integers, in host or device memory; only the engines distinguish the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch

from sgl_kvpool.memory.canonical import (
    CanonicalGroup,
    CanonicalKVCaches,
    LayerReference,
    check_interchangeable,
)
from sgl_kvpool.memory.runs import PageRuns, joined_in_order
from sgl_kvpool.transfer.conversion import CONVERTED_ALIGNMENT_BYTES, RowConversion

_Job = TypeVar("_Job")


@dataclass(frozen=True, kw_only=True)
class CopyRun:
    """Equal runs of bytes of one layer of a page, or of adjacent layers; see the module's docstring."""

    source_address: int
    target_address: int
    source_page_stride: int
    target_page_stride: int
    run_bytes: int
    run_count: int = 1
    source_run_stride: int = 0
    target_run_stride: int = 0

    @property
    def bytes_fields(self) -> tuple[int, ...]:
        """The fields that are addresses, strides or sizes in bytes."""
        return astuple(replace(self, run_count=0))

    @property
    def size_bytes(self) -> int:
        return self.run_bytes * self.run_count

    def simplified(self) -> CopyRun:
        """The same bytes as one run if neither side has gaps between its runs."""
        if self.run_count == 1:
            return replace(self, source_run_stride=self.run_bytes, target_run_stride=self.run_bytes)
        if self.source_run_stride == self.target_run_stride == self.run_bytes:
            return replace(self, run_bytes=self.size_bytes, run_count=1).simplified()
        return self

    def joined(self, other: CopyRun) -> CopyRun | None:
        """This run and `other` as one if `other` follows on both sides, else None."""
        pattern = ["source_page_stride", "target_page_stride", "run_count"]
        if self.run_count > 1:
            pattern += ["source_run_stride", "target_run_stride"]
        continues = (
            self.source_address + self.run_bytes == other.source_address
            and self.target_address + self.run_bytes == other.target_address
            and all(getattr(self, name) == getattr(other, name) for name in pattern)
        )
        return replace(self, run_bytes=self.run_bytes + other.run_bytes) if continues else None


def run_table(runs: Sequence[CopyRun], device: torch.device | str = "cpu") -> torch.Tensor:
    """Runs as compiled code takes them, `[runs, 8]` int64: the fields in their order (csrc/copy_run.h)."""
    return torch.tensor([astuple(run) for run in runs], dtype=torch.int64, device=device).view(-1, 8)


class TransferPlan:
    """Transfers of one group's pages between two sets of caches.

    `group` is the name of a group of both sides, whose layers and the meaning of their bytes have to be the
    same on both; their arrangement may differ. `conversion`: that of the rows, if their formats differ.

    KeyError if a side lacks the group; ValueError if layers differ or their runs cannot be paired, or if rows
    to convert have other formats than the conversion or do not begin at multiples of 16 bytes.
    """

    def __init__(
        self,
        source: CanonicalKVCaches,
        target: CanonicalKVCaches,
        group: str,
        conversion: RowConversion | None = None,
    ) -> None:
        self.source, self.target, self.conversion = source, target, conversion
        self.source_group, self.target_group = source.group(group), target.group(group)
        if conversion is None:
            check_interchangeable(self.source_group, self.target_group)
        else:
            _check_convertible(self.source_group, self.target_group, conversion)
        rows = self.source_group.page_size_tokens or 0
        self._per_layer = tuple(
            _paired(source, ours, target, theirs)
            if conversion is None
            else _paired_rows(source, ours, target, theirs, rows)
            for ours, theirs in zip(self.source_group.layers, self.target_group.layers, strict=True)
        )

    @cached_property
    def copy_runs(self) -> tuple[CopyRun, ...]:
        return self.copy_runs_of(range(len(self._per_layer)))

    def copy_runs_of(self, parts: Sequence[int]) -> tuple[CopyRun, ...]:
        """Copy runs of some of the group's `layers`, by index; call at setup only."""
        if self.conversion is not None:
            return tuple(self._per_layer[i] for i in parts)  # every layer has its own k_scale
        ordered = sorted((self._per_layer[i] for i in parts), key=lambda r: r.source_address)
        return tuple(run.simplified() for run in joined_in_order(ordered, CopyRun.joined))

    def by_part(self, make: Callable[[Sequence[CopyRun], Sequence[int]], _Job]) -> dict[int | None, _Job]:
        """`make(runs, parts)` for each part of the group and, under None, for all; call at setup only."""
        every = range(len(self._per_layer))
        return {None: make(self.copy_runs, every)} | {i: make(self.copy_runs_of([i]), [i]) for i in every}

    def bytes_per_page(self, part: int | None = None) -> int:
        """Bytes that a transfer of one page moves, for all layers or for one.

        For converted rows these are the bytes of the narrower ones, which cross the link (engine `torch`
        converts on the source's device, so its loads move the wider ones).
        """
        chosen = range(len(self._per_layer)) if part is None else [part]
        sides = (self.source_group.layers, self.target_group.layers)
        return min(sum(layers[i].runs.size_bytes for i in chosen) for layers in sides)

    def check_pages(self, source_pages: np.ndarray, target_pages: np.ndarray) -> None:
        """Check lists of pages before anything is enqueued; TypeError if a list is not an array of integers.

        ValueError if the lists differ in length, a page is outside of its group, or a target is listed twice.
        """
        source, target = self.source_group, self.target_group
        for name, pages, group in (("source", source_pages, source), ("target", target_pages, target)):
            if not isinstance(pages, np.ndarray) or pages.dtype.kind != "i" or pages.ndim != 1:
                raise TypeError(f"{name} pages are {type(pages).__name__}, expected a 1-d array of integers")
            require_pages(f"{name} pages", pages, group)
        if len(source_pages) != len(target_pages):
            raise ValueError(f"{len(source_pages)} source pages for {len(target_pages)} target pages")
        seen: np.ndarray = np.zeros(target.num_pages, dtype=bool)
        seen[target_pages] = True
        if np.count_nonzero(seen) != len(target_pages):
            raise ValueError("a target page is listed twice, so its content would be undefined")


def require_pages(name: str, pages: np.ndarray, group: CanonicalGroup) -> None:
    """Raise ValueError if a page is outside of its group."""
    if len(pages) and not (pages.min() >= 0 and pages.max() < group.num_pages):
        span = f"{name} {pages.min()} to {pages.max()}"
        raise ValueError(f"{span} requested; group {group.name} has {group.num_pages}")


def _paired(
    source: CanonicalKVCaches, ours: LayerReference, target: CanonicalKVCaches, theirs: LayerReference
) -> CopyRun:
    """Runs of a layer on both sides, cut to the same length."""
    a, b = ours.runs, theirs.runs
    if a.run_bytes != b.run_bytes and 1 not in (a.run_count, b.run_count):
        raise ValueError(
            f"{ours.part} of layer {ours.layer_id} has {a.run_count} runs of {a.run_bytes} bytes on one side "
            f"and {b.run_count} of {b.run_bytes} on the other, which cannot be paired"
        )
    return _copy_run(source, a, target, b, min(a.run_bytes, b.run_bytes)).simplified()


def _copy_run(
    source: CanonicalKVCaches, a: PageRuns, target: CanonicalKVCaches, b: PageRuns, run_bytes: int
) -> CopyRun:
    from_tensor, to_tensor = source.tensors[a.tensor_index], target.tensors[b.tensor_index]
    return CopyRun(
        source_address=from_tensor.data_ptr() + a.offset_bytes,
        target_address=to_tensor.data_ptr() + b.offset_bytes,
        source_page_stride=from_tensor.stride(0),
        target_page_stride=to_tensor.stride(0),
        run_bytes=run_bytes,
        run_count=max(a.run_count, b.run_count),
        # A side with a single run is split into as many runs as the other side has.
        source_run_stride=a.run_stride_bytes if a.run_count > 1 else run_bytes,
        target_run_stride=b.run_stride_bytes if b.run_count > 1 else run_bytes,
    )


def _check_convertible(ours: CanonicalGroup, theirs: CanonicalGroup, conversion: RowConversion) -> None:
    """Raise ValueError unless both groups hold the same layers, as rows of the conversion's two formats."""
    mine, other = ([(layer.layer_id, layer.part) for layer in group.layers] for group in (ours, theirs))
    if mine != other or ours.page_size_tokens != theirs.page_size_tokens or ours.page_size_tokens is None:
        raise ValueError(
            f"the layers of group {ours.name} differ: {mine} in pages of {ours.page_size_tokens} tokens and "
            f"{other} in pages of {theirs.page_size_tokens}"
        )
    if len(conversion.k_scales) != len(mine):
        raise ValueError(f"{len(conversion.k_scales)} k_scales for {len(mine)} layers of group {ours.name}")
    for group, fmt in ((ours, conversion.source), (theirs, conversion.target)):
        for layer in group.layers:
            if layer.runs.size_bytes != ours.page_size_tokens * fmt.row_bytes:
                raise ValueError(
                    f"{layer.part} of layer {layer.layer_id} has {layer.runs.size_bytes} bytes in a page of "
                    f"{ours.page_size_tokens} tokens, which are not rows of format {fmt.tag}"
                )


def _paired_rows(
    source: CanonicalKVCaches,
    ours: LayerReference,
    target: CanonicalKVCaches,
    theirs: LayerReference,
    rows: int,
) -> CopyRun:
    """Copy run of a layer's rows: one run per row on both sides."""
    a, b = _row_runs(ours.runs, rows), _row_runs(theirs.runs, rows)
    run = _copy_run(source, a, target, b, a.run_bytes)
    numbers = (*run.bytes_fields, b.run_bytes)
    if odd := [number for number in numbers if number % CONVERTED_ALIGNMENT_BYTES]:
        raise ValueError(
            f"rows of layer {ours.layer_id} do not all begin at a multiple of {CONVERTED_ALIGNMENT_BYTES} "
            f"bytes ({odd[0]}), which conversions need; use --kv-host-layout same"
        )
    return run


def _row_runs(runs: PageRuns, rows: int) -> PageRuns:
    """The same bytes with one run per row."""
    row_bytes = runs.size_bytes // rows
    if runs.run_bytes % row_bytes or runs.run_count not in (1, rows):
        raise ValueError(f"{runs} does not hold {rows} rows one after the other")
    stride = row_bytes if runs.run_count == 1 else runs.run_stride_bytes
    return replace(runs, run_bytes=row_bytes, run_count=rows, run_stride_bytes=stride)
