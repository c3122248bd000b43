"""Pages from one set of caches to another with torch alone: for tests, and where no engine can be used."""

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

    Two copies per layer. Arrangements may differ, the bytes
    of each layer may not. Bytes that no layer of the group owns stay as they are.

    Parameters
    ----------
    source, target : CanonicalKVCaches
    group : str
        Name of a group in both.
    source_pages, target_pages : Tensor [pages], int32 or int64
        On the device of their caches.

    Raises
    ------
    ValueError
        Lists of different lengths, a page outside of the group or twice in the target, or layers whose
        bytes do not mean the same.
    TypeError
        Lists that are no tensors of integers.
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
    """`copy_pages` of some layers, by their places in the group, for lists that have been checked.

    `convert(moved, part)` makes the target's bytes of the source's, `[pages, runs, run_bytes]` int8, on the
    source's device. Page lists may be on any.
    """
    ours, theirs = source.group(group), target.group(group)
    source_pages, target_pages = source_pages.long(), target_pages.long()
    for part in parts:
        from_bytes = source.view(ours, ours.layers[part].runs)
        moved = convert(from_bytes[source_pages.to(from_bytes.device)], part)
        into = target.view(theirs, theirs.layers[part].runs)
        into[target_pages.to(into.device)] = moved.reshape(len(target_pages), *into.shape[1:]).to(into.device)
