"""The host tier: pages that leave the device and come back."""

from typing import Any

__all__ = ["HierarchicalMLAHostPool"]


def __getattr__(name: str) -> Any:
    # Not at once: it imports SGLang's pools, and this package's other modules are read without them.
    if name == "HierarchicalMLAHostPool":
        from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool

        return HierarchicalMLAHostPool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
