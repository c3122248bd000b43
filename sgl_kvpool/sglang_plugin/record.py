"""The layout on SGLang's `ServerArgs`: a string in an underscore attribute.

SGLang drops what is not a field of its own when it parses arguments, but it pickles underscore attributes
of a record into every process of the server.
"""

from __future__ import annotations

from typing import Any

from sgl_kvpool.layout import MLAKVCacheLayout

__all__ = ["ATTRIBUTE", "AUTO", "layout_of"]

#: SGLang as it is.
AUTO = "auto"

#: What the user wrote (None for nothing), and after resolution the layout in use or `AUTO`.
ATTRIBUTE = "_kvpool_kv_cache_layout"


def layout_of(server_args: Any) -> MLAKVCacheLayout | None:
    """Layout a resolved `ServerArgs` was asked for; None for SGLang as it is."""
    value = getattr(server_args, ATTRIBUTE, None) or AUTO
    return None if value == AUTO else MLAKVCacheLayout.parse(value)
