"""Subclasses of SGLang's token-to-KV pools that store rows of a chosen layout."""

from sgl_kvpool.srt.pool.dsa import LayoutDSATokenToKVPool
from sgl_kvpool.srt.pool.hybrid import LayoutHybridLinearKVPool
from sgl_kvpool.srt.pool.mla import LayoutMLATokenToKVPool
from sgl_kvpool.srt.pool.regions import describe
from sgl_kvpool.srt.pool.row_pool import RowPool

__all__ = [
    "LayoutDSATokenToKVPool",
    "LayoutHybridLinearKVPool",
    "LayoutMLATokenToKVPool",
    "RowPool",
    "describe",
]
