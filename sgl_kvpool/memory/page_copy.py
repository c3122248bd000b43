"""Copies of pages between two sets of caches with torch alone: for tests, and as the fallback engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from sgl_kvpool.memory.canonical import CanonicalKVCaches, check_interchangeable

__all__ = ["copy_checked_pages", "copy_pages"]


def copy_pages(
    source: CanonicalKVCaches,
    target: CanonicalKVCaches,
    group: str,
    source_pages: torch.Tensor,
    target_pages: torch.Tensor,
) -> None:
    """Copy pages of one group from one set of caches to another, with torch alone.

    Each layer takes a gather and a scatter, with a copy between them if the devices differ. Arrangements may
    differ; the content of each layer may not. Bytes outside the layers of the group stay as they are.

    Parameters
    ----------
    source, target : CanonicalKVCaches
    group : str
        Name of a group in both.
    source_pages, target_pages : Tensor [pages], int32 or int64
        Page indices, on the device of their caches.

    Raises
    ------
    ValueError
        If the lists have different lengths, a page is outside of the group or listed twice for the target,
        or the layers have different content.
    TypeError
        If a list is not an integer tensor.
    """
    ours, theirs = source.group(group), target.group(group)
    for pages in (source_pages, target_pages):
        kind = getattr(pages, "dtype", type(pages).__name__)
        if kind not in (torch.int32, torch.int64):
            raise TypeError(f"a list of pages is {kind}, expected a tensor of int32 or int64")
    if source_pages.shape != target_pages.shape or source_pages.dim() != 1:
        raise ValueError(
            f"page lists have shapes {tuple(source_pages.shape)} and {tuple(target_pages.shape)}"
        )
    for pages, count in ((source_pages, ours.num_pages), (target_pages, theirs.num_pages)):
        if len(pages) and not (int(pages.min()) >= 0 and int(pages.max()) < count):
            raise ValueError(
                f"pages {int(pages.min())} to {int(pages.max())} requested, the group has {count}"
            )
    if len(target_pages.unique()) != len(target_pages):
        raise ValueError("a page of the target is listed twice")
    check_interchangeable(ours, theirs)
    copy_checked_pages(source, target, group, source_pages, target_pages, range(len(ours.layers)))


def copy_checked_pages(
    source: CanonicalKVCaches,
    target: CanonicalKVCaches,
    group: str,
    source_pages: torch.Tensor,
    target_pages: torch.Tensor,
    parts: Iterable[int],
    convert: Callable[[torch.Tensor, int], torch.Tensor] = lambda moved, part: moved,
) -> None:
    """`copy_pages` for some layers, given by their index in the group, with lists that have been checked.

    `convert(moved, part)` makes the target's bytes from the source's, `[pages, runs, run_bytes]` int8, on the
    source's device. Page lists may be on any device.
    """
    ours, theirs = source.group(group), target.group(group)
    source_pages, target_pages = source_pages.long(), target_pages.long()
    for part in parts:
        from_bytes = source.view(ours, ours.layers[part].runs)
        moved = convert(from_bytes[source_pages.to(from_bytes.device)], part)
        into = target.view(theirs, theirs.layers[part].runs)
        into[target_pages.to(into.device)] = moved.reshape(len(target_pages), *into.shape[1:]).to(into.device)
