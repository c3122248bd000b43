"""Subclasses of SGLang's token-to-KV pools that store rows of a chosen layout."""

from sgl_kvpool.pool.dsa import LayoutDSATokenToKVPool
from sgl_kvpool.pool.mla import LayoutMLATokenToKVPool

__all__ = ["LayoutDSATokenToKVPool", "LayoutMLATokenToKVPool"]
