"""Checksums of host pages in stores. Numpy and xxhash are the only dependencies.

The last 16 bytes of a page are XXH3-128 of all bytes before them, seeded with the page's format and its
storage key; only zeros may follow them in a store. Therefore a page that was truncated, extended, changed,
written in another format or stored under another key is detected and not served. The checksum protects
against faults, not against forgery: whoever may write to a store can replace pages.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash

from sgl_kvpool.srt.host.page_format import CHECKSUM_BYTES

__all__ = [
    "DamagedPage",
    "checksum",
    "damage",
    "failure_kind",
    "first_damage",
    "write_checksum",
    "write_checksums",
]

#: Threads of a process that compute checksums: four read faster than a network or a disk delivers.
_THREADS = 4
#: Bytes of a page from which threads pay off; xxhash keeps the GIL for short inputs.
_THREADED_BYTES = 1 << 18
_DAMAGED = "its checksum does not match its bytes, format and key"


class DamagedPage(ValueError):
    """Error for a page that came back from a store changed; callers have to treat it as a miss."""


def failure_kind(error: Exception) -> str:
    """Kind in `sgl_kvpool.metrics.FAILURES` for a page of a store that could not be read."""
    return "page_checksum" if isinstance(error, DamagedPage) else "page_read"


def checksum(content: np.ndarray, tag: str, key: str = "") -> bytes:
    """Checksum of a page's bytes.

    Parameters
    ----------
    content : ndarray [bytes], uint8, contiguous
        All bytes of the page before its checksum.
    tag : str
        Tag of the bytes; see `HierarchicalMLAHostPool.storage_format_tag`.
    key : str
        Storage key of the page; empty if unknown.

    Returns
    -------
    bytes
        The checksum, `CHECKSUM_BYTES` long.
    """
    # Lengths first, so that different pairs of tag and key cannot make the same text.
    seed = xxhash.xxh3_64_intdigest(f"{len(tag)} {len(key)} {tag}{key}".encode())
    return xxhash.xxh3_128_digest(content.data, seed)


def write_checksum(page: np.ndarray, tag: str, key: str = "") -> None:
    """Write a page's checksum into its last bytes.

    Parameters
    ----------
    page : ndarray [size_bytes], uint8, contiguous
    tag, key : str
        Parameters of `checksum`.
    """
    page[-CHECKSUM_BYTES:] = np.frombuffer(checksum(page[:-CHECKSUM_BYTES], tag, key), dtype=np.uint8)


def damage(page: np.ndarray, tag: str, key: str = "") -> str | None:
    """Reason why a page with a checksum is damaged; None if it is not. Parameters as `write_checksum`."""
    if len(page) < CHECKSUM_BYTES:
        return f"{len(page)} bytes are too short for a page"
    whole = page[-CHECKSUM_BYTES:].tobytes() == checksum(page[:-CHECKSUM_BYTES], tag, key)
    return None if whole else _DAMAGED


def write_checksums(pages: Sequence[np.ndarray], tag: str, keys: Sequence[str]) -> None:
    """Call `write_checksum` for several pages, with threads if they are long."""
    list(_map(write_checksum, pages, tag, keys))


def first_damage(pages: Sequence[np.ndarray], tag: str, keys: Sequence[str]) -> tuple[int, str] | None:
    """Index of the first damaged page, and the reason by `damage`; None if no page is damaged."""
    found = enumerate(_map(damage, pages, tag, keys))
    return next(((place, problem) for place, problem in found if problem is not None), None)


def _map(function, pages: Sequence[np.ndarray], tag: str, keys: Sequence[str]):
    if len(pages) != len(keys):
        raise ValueError(f"{len(pages)} pages for {len(keys)} keys")
    tags = [tag] * len(pages)
    if len(pages) > 1 and len(pages[0]) >= _THREADED_BYTES:
        return _threads().map(function, pages, tags, keys)
    return map(function, pages, tags, keys)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Threads of this process, which storing and fetching share."""
    return ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), thread_name_prefix="kvpool-checksum")
