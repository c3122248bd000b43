"""Subclasses of SGLang's token-to-KV pools that store rows of a chosen layout."""

import importlib
from typing import Any

#: Public name -> module.
_MODULES = {
    "LayoutDSATokenToKVPool": "dsa",
    "LayoutHybridLinearKVPool": "hybrid",
    "LayoutMLATokenToKVPool": "mla",
    "RowPool": "row_pool",
    "describe": "regions",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    # Not at once: where SGLang lacks what one of them needs, servers that do not use it go on.
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
