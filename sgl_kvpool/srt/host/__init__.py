"""The host tier: backup and loading of device pages."""

from typing import Any

__all__ = ["HierarchicalMLAHostPool"]


def __getattr__(name: str) -> Any:
    # Imported on demand: `rows` imports SGLang's pools, which modules such as `page_format` do not need.
    if name == "HierarchicalMLAHostPool":
        from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool

        return HierarchicalMLAHostPool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
