"""Attention over rows of a KV pool, and tables of the attention backends that can read each layout.

`mla_decode`, `DecodeWorkspace` and `workspace_bytes` are imported on first use, so that the tables can be
imported without torch.
"""

from typing import Any

__all__ = ["DecodeWorkspace", "mla_decode", "workspace_bytes"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from sgl_kvpool.attention import decode as module

        value = getattr(module, name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
