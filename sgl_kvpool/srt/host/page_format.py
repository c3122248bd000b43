"""Bytes of a host page: rows, padding, checksum. A leaf module that the host tier and `plan` share.

A host page of format version 2 is contiguous, so that stores can read and write it in place: ::

    [rows of all layers | padding | checksum]     size_bytes in all; the checksum is at the end

`size_bytes` is also the distance between pages. It is a multiple of 4096 if that adds at most 3 % to the
rows, so that stores that open files with O_DIRECT (NIXL's default) move pages without a copy. Otherwise such
stores get copies, which are padded to the next multiple.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["CHECKSUM_BYTES", "DIRECT_IO_BYTES", "HostPageFormat"]

#: Bytes of a checksum, XXH3-128.
CHECKSUM_BYTES = 16
#: Alignment of addresses and sizes for O_DIRECT; the default of SGLang's `is_stride_page_aligned`.
DIRECT_IO_BYTES = 4096
#: Minimum alignment of pages: enough for every dtype and for the widest words of kernels.
_ALIGNMENT_BYTES = 16
#: Maximum bytes added to align a page to `DIRECT_IO_BYTES`, as a share of the rows' bytes.
_MAX_PADDING = 0.03


def _rounded_up(size_bytes: int, multiple_bytes: int) -> int:
    return -(-size_bytes // multiple_bytes) * multiple_bytes


@dataclass(frozen=True)
class HostPageFormat:
    """Sizes of a host page.

    Attributes
    ----------
    content_bytes : int
        Bytes of the content: rows of all layers, or the states of a slot.
    size_bytes : int
        Bytes of the page with padding and checksum.
    copied_bytes : int
        Bytes of a copy for a store: the page, then zeros.
    has_checksum : bool
    """

    content_bytes: int
    size_bytes: int
    copied_bytes: int
    has_checksum: bool = True

    @classmethod
    def of_rows(cls, content_bytes: int, page_size: int) -> HostPageFormat:
        """Format of a page of rows.

        Parameters
        ----------
        content_bytes : int
            Bytes of the rows of `page_size` tokens in all layers.
        page_size : int
            Tokens of a page. The page gets a whole number of bytes per token, because SGLang and its stores
            count bytes per token.
        """
        unpadded_bytes = content_bytes + CHECKSUM_BYTES
        aligned_bytes = _rounded_up(unpadded_bytes, math.lcm(DIRECT_IO_BYTES, page_size))
        close_bytes = _rounded_up(unpadded_bytes, math.lcm(_ALIGNMENT_BYTES, page_size))
        costs_little = aligned_bytes - content_bytes <= _MAX_PADDING * content_bytes
        size_bytes = aligned_bytes if costs_little else close_bytes
        return cls(content_bytes, size_bytes, _rounded_up(size_bytes, DIRECT_IO_BYTES))

    @classmethod
    def of_states(cls, content_bytes: int) -> HostPageFormat:
        """Format of a slot of states.

        Slots are not padded to `DIRECT_IO_BYTES`: zero-copy stores keep each part of a slot under a separate
        key, and the size of a part is seldom a multiple of `DIRECT_IO_BYTES`.

        Parameters
        ----------
        content_bytes : int
            Bytes of the states of one slot in all linear layers.
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
