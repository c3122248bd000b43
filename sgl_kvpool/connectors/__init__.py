"""Byte views of any SGLang pool and buffers of pages, for software beside the server; docs/connectors.md.

No server imports this package.
"""

import importlib
from typing import Any

#: Public name -> module.
_MODULES = {
    "CrossLayerGroup": "cross_layer",
    "LayerPages": "cross_layer",
    "allocate_cross_layer": "allocation",
    "allocate_states": "allocation",
    "as_canonical": "allocation",
    "copy_pages": "allocation",
    "describe": "pools",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    # Imported on first use: `describe` imports SGLang, the others only torch.
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
