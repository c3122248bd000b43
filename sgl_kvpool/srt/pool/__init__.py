"""Subclasses of SGLang's token-to-KV pools that store rows of a chosen layout."""

import importlib
from typing import Any

#: Public name -> module.
_MODULES = {
    "LayoutDSATokenToKVPool": "dsa",
    "LayoutHybridLinearKVPool": "hybrid",
    "LayoutMLATokenToKVPool": "mla",
    "PoolOptions": "row_pool",
    "RowPool": "row_pool",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    # Imported on first use: if SGLang lacks what one class needs, servers without that class still start.
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
