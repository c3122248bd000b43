"""Bytes of a host page: content, padding, checksum. Numpy and xxhash are the only dependencies.

A host page of format version 2 is contiguous, so that stores can read and write it in place: ::

    [rows of all layers | index keys | padding | checksum]     size_bytes in all; the checksum is at the end

`size_bytes` is also the distance between pages. It is a multiple of 4096 if that adds at most 3 % to the
content, so that stores that open files with O_DIRECT (NIXL's default) move pages without a copy. Otherwise
such stores get copies, which are padded to the next multiple.

The checksum is XXH3-128 of all bytes before it, seeded with the page's format and its storage key. Therefore
a page that was truncated, changed, written in another format or stored under another key is detected and not
served. Stores read as many bytes as a page has, so what follows them in a file is ignored. The checksum
protects against faults, not against forgery: whoever may write to a store can replace pages.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import xxhash

#: Bytes of a checksum, XXH3-128.
CHECKSUM_BYTES = 16
#: Alignment of addresses and sizes for O_DIRECT; the default of SGLang's `is_stride_page_aligned`.
DIRECT_IO_BYTES = 4096
#: Minimum alignment of pages: enough for every dtype and for the widest words of kernels.
_ALIGNMENT_BYTES = 16
#: Maximum bytes added to align a page to `DIRECT_IO_BYTES`, as a share of the content's bytes.
_MAX_PADDING = 0.03
#: Threads that compute checksums: four read faster than a network or a disk delivers.
_THREADS = 4
#: Bytes of a page from which threads pay off; xxhash keeps the GIL for short inputs.
_THREADED_BYTES = 1 << 18
_DAMAGED = "its checksum does not match its bytes, format and key"


def _rounded_up(size_bytes: int, multiple_bytes: int) -> int:
    return -(-size_bytes // multiple_bytes) * multiple_bytes


@dataclass(frozen=True)
class HostPageFormat:
    #: Of the content: rows of all layers and index keys, or the states of a slot.
    content_bytes: int
    #: Of the page with padding and checksum.
    size_bytes: int
    #: Of a copy for a store: the page, then zeros.
    copied_bytes: int
    has_checksum: bool = True

    @classmethod
    def of_rows(cls, content_bytes: int, page_size: int) -> HostPageFormat:
        """Format of a page of rows, given the bytes of its content.

        The page gets a whole number of bytes per token, because SGLang and its stores count bytes per token.
        """
        unpadded_bytes = content_bytes + CHECKSUM_BYTES
        aligned_bytes = _rounded_up(unpadded_bytes, math.lcm(DIRECT_IO_BYTES, page_size))
        close_bytes = _rounded_up(unpadded_bytes, math.lcm(_ALIGNMENT_BYTES, page_size))
        costs_little = aligned_bytes - content_bytes <= _MAX_PADDING * content_bytes
        size_bytes = aligned_bytes if costs_little else close_bytes
        return cls(content_bytes, size_bytes, _rounded_up(size_bytes, DIRECT_IO_BYTES))

    @classmethod
    def of_states(cls, content_bytes: int) -> HostPageFormat:
        """Format of a slot of states, given their bytes in all linear layers.

        Slots are not padded to `DIRECT_IO_BYTES`: zero-copy stores keep each part of a slot under a separate
        key, and the size of a part is seldom a multiple of `DIRECT_IO_BYTES`.
        """
        size_bytes = _rounded_up(content_bytes + CHECKSUM_BYTES, _ALIGNMENT_BYTES)
        return cls(content_bytes, size_bytes, _rounded_up(size_bytes, DIRECT_IO_BYTES))

    @classmethod
    def bare(cls, content_bytes: int) -> HostPageFormat:
        """Format of a page in SGLang's own size: content without padding and checksum."""
        return cls(content_bytes, content_bytes, content_bytes, has_checksum=False)

    def bytes_per_token(self, page_size: int) -> int:
        """Bytes per token in all layers, with its share of padding and checksum."""
        return self.size_bytes // page_size


class DamagedPage(ValueError):
    """Error for a page that came back from a store changed; callers have to treat it as a miss."""


def failure_kind(error: Exception) -> str:
    """Kind in `sgl_kvpool.metrics.FAILURES` for a page of a store that could not be read."""
    return "page_checksum" if isinstance(error, DamagedPage) else "page_read"


def checksum(content: np.ndarray, tag: str, key: str = "") -> bytes:
    """Checksum of a page's bytes before it, uint8, contiguous; an unknown storage key is empty."""
    # Lengths first, so that different pairs of tag and key cannot make the same text.
    seed = xxhash.xxh3_64_intdigest(f"{len(tag)} {len(key)} {tag}{key}".encode())
    return xxhash.xxh3_128_digest(content.data, seed)


def write_checksum(page: np.ndarray, tag: str, key: str = "") -> None:
    """Write a page's checksum into its last bytes; `[size_bytes]` uint8, contiguous."""
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
        # They end with the call: none writes into a page later. If one cannot start, this one does it all.
        with suppress(RuntimeError), ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
            return list(threads.map(function, pages, tags, keys))
    return map(function, pages, tags, keys)
