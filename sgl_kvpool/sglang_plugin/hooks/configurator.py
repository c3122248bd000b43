"""Layout and arrangement that the server of a KVCacheConfigurator requests."""

from __future__ import annotations

from typing import Any

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.sglang_plugin.hooks.server_args import require_decided
from sgl_kvpool.sglang_plugin.options import arrangement_of, layout_of

__all__ = ["requested_arrangement", "requested_layout"]


def requested_layout(configurator: Any) -> MLAKVCacheLayout | None:
    """Requested layout of a KVCacheConfigurator's server; None without one, and for a draft without MLA."""
    require_decided(configurator.server_args)
    layout = layout_of(configurator.server_args)
    if layout is None or configurator.use_mla_backend:
        return layout
    if not configurator.is_draft_worker:
        raise RuntimeError(f"--kv-cache-layout {layout} is set, but SGLang does not serve an MLA model")
    return None  # a draft model without MLA keeps SGLang's pool


def requested_arrangement(configurator: Any) -> KVArrangement:
    """Arrangement of a KVCacheConfigurator's rows."""
    # A draft's rows are layer-major: it has few layers, nothing reads its pages as contiguous bytes, and with
    # a single layer all arrangements have the same strides.
    if configurator.is_draft_worker:
        return KVArrangement.LAYER_MAJOR
    return arrangement_of(configurator.server_args)
