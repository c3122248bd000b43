"""Pages as stores keep them: the bytes, and a digest that says what they are. Needs torch alone.

A store that copies (SGLang's `file` and others) gets `page_bytes + DIGEST_BYTES` bytes. The last 16 are
BLAKE2b of the page's format, of the key it was stored under where that is known, and of its bytes. So a page
that was cut short, changed, written in another format or stored under another key is noticed, and not served.
"""

from __future__ import annotations

import hashlib

import numpy as np

__all__ = ["DIGEST_BYTES", "DamagedPage", "digest", "failure_kind", "verified", "with_digest"]

DIGEST_BYTES = 16


class DamagedPage(ValueError):
    """A stored page that is not what was stored; it must be taken for a miss."""


def failure_kind(error: Exception) -> str:
    """Kind, of `sgl_kvpool.metrics.FAILURES`, of a page of a store that could not be read."""
    return "page_digest" if isinstance(error, DamagedPage) else "page_read"


def digest(page: np.ndarray, tag: str, key: str = "") -> bytes:
    """Digest of a page.

    Parameters
    ----------
    page : ndarray [page_bytes], uint8, contiguous
    tag : str
        What the bytes are; see `HierarchicalMLAHostPool.storage_format_tag`.
    key : str
        What the page is stored under; empty where that is not known.

    Returns
    -------
    bytes
        `DIGEST_BYTES` of them.
    """
    # Lengths first, so that no tag and key together read as another tag and key.
    head = f"{len(tag)} {len(key)} {tag}{key}".encode()
    state = hashlib.blake2b(head, digest_size=DIGEST_BYTES)
    state.update(page.data)
    return state.digest()


def with_digest(page: np.ndarray, tag: str, key: str = "") -> np.ndarray:
    """A page and its digest, `[page_bytes + DIGEST_BYTES]` uint8, a copy."""
    return np.concatenate([page, np.frombuffer(digest(page, tag, key), dtype=np.uint8)])


def verified(stored: np.ndarray, page_bytes: int, tag: str, key: str = "") -> np.ndarray:
    """The page in what `with_digest` made, a view.

    Raises
    ------
    DamagedPage
        Another size, or bytes whose digest is not theirs.
    """
    if len(stored) != page_bytes + DIGEST_BYTES:
        raise DamagedPage(f"{len(stored)} bytes instead of {page_bytes} and a digest of {DIGEST_BYTES}")
    page = stored[:page_bytes]
    if stored[page_bytes:].tobytes() != digest(page, tag, key):
        raise DamagedPage("its digest is not that of its bytes, format and key")
    return page
