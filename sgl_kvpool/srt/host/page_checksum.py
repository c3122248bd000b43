"""Checksums of host pages as stores keep them. Needs numpy and xxhash alone.

The last 16 bytes of a stored page are XXH3-128 of all bytes before them, seeded by the page's format and by
the key it is stored under. So a page that was cut short, filled up, changed, written in another format or
stored under another key is noticed, and not served. It is a checksum against faults, none against forgery:
who may write to a store may write other pages.
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

#: Threads of a process that make checksums: four read faster than a network or a disk delivers.
_THREADS = 4
#: Bytes of a page from which threads are worth it. xxhash keeps the GIL for short inputs.
_THREADED_BYTES = 1 << 18
_DAMAGED = "its checksum is not that of its bytes, format and key"


class DamagedPage(ValueError):
    """A stored page that is not what was stored; it must be taken for a miss."""


def failure_kind(error: Exception) -> str:
    """Kind, of `sgl_kvpool.metrics.FAILURES`, of a page of a store that could not be read."""
    return "page_checksum" if isinstance(error, DamagedPage) else "page_read"


def checksum(content: np.ndarray, tag: str, key: str = "") -> bytes:
    """Checksum of a page's bytes.

    Parameters
    ----------
    content : ndarray [bytes], uint8, contiguous
        All of the page before its checksum.
    tag : str
        What the bytes are; see `HierarchicalMLAHostPool.storage_format_tag`.
    key : str
        What the page is stored under; empty where that is not known.

    Returns
    -------
    bytes
        `CHECKSUM_BYTES` of them.
    """
    # Lengths first, so that no tag and key together read as another tag and key.
    seed = xxhash.xxh3_64_intdigest(f"{len(tag)} {len(key)} {tag}{key}".encode())
    return xxhash.xxh3_128_digest(content.data, seed)


def write_checksum(page: np.ndarray, tag: str, key: str = "") -> None:
    """Write a page's checksum into its last bytes.

    Parameters
    ----------
    page : ndarray [size_bytes], uint8, contiguous
    tag, key : str
        As `checksum`.
    """
    page[-CHECKSUM_BYTES:] = np.frombuffer(checksum(page[:-CHECKSUM_BYTES], tag, key), dtype=np.uint8)


def damage(page: np.ndarray, tag: str, key: str = "") -> str | None:
    """What is wrong with a page that has a checksum; None if nothing is. Parameters as `write_checksum`."""
    if len(page) < CHECKSUM_BYTES:
        return f"{len(page)} bytes are no page"
    whole = page[-CHECKSUM_BYTES:].tobytes() == checksum(page[:-CHECKSUM_BYTES], tag, key)
    return None if whole else _DAMAGED


def write_checksums(pages: Sequence[np.ndarray], tag: str, keys: Sequence[str]) -> None:
    """`write_checksum` of several pages, on several threads if they are long."""
    list(_map(write_checksum, pages, tag, keys))


def first_damage(pages: Sequence[np.ndarray], tag: str, keys: Sequence[str]) -> tuple[int, str] | None:
    """Place of the first page that `damage` finds wrong, and what it says; None if all are whole."""
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
