"""Hooks of models that mix MLA with linear attention: their pool, and the backend of their linear layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sgl_kvpool.sglang_plugin import hook_points
from sgl_kvpool.sglang_plugin.hooks.configurator import requested_layout
from sgl_kvpool.sglang_plugin.hooks.pools import bound

__all__ = ["install"]


def install() -> None:
    """Apply the hooks."""
    hook_points.wrap_all(HOOKS)


def _build_hybrid_linear_kv_pool(original, self, **kwargs):
    """Build SGLang's wrapper of rows and states as our class, which the builder finds by a global name."""
    layout = requested_layout(self)
    if layout is None:
        return original(self, **kwargs)
    from sglang.srt.mem_cache import kv_cache_configurator

    from sgl_kvpool.srt.pool.hybrid import LayoutHybridLinearKVPool

    stock = kv_cache_configurator.HybridLinearKVPool
    kv_cache_configurator.HybridLinearKVPool = bound(self, layout, LayoutHybridLinearKVPool)
    try:
        return original(self, **kwargs)
    finally:
        kv_cache_configurator.HybridLinearKVPool = stock


def _wrap_for_model(original, runner, full_attn_backend):
    """Wrap the backend for a hybrid model, and hide the dtype of the rows from its linear layers.

    Lightning attention casts its float32 queries to the dtype of the KV cache unless that is `auto`, and
    writes its result in the dtype of the queries. A layout's dtype is that of rows, which linear layers do
    not have.
    """
    backend = original(runner, full_attn_backend)
    linear: Any = getattr(backend, "linear_attn_backend", None)
    if hasattr(linear, "kv_cache_dtype_str"):
        from sgl_kvpool.srt.pool.row_pool import RowPool

        if isinstance(runner.token_to_kv_pool, RowPool):
            linear.kv_cache_dtype_str = "auto"
    return backend


#: Function of SGLang -> hook around it.
HOOKS: Mapping[str, Callable] = {
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_hybrid_linear_kv_pool": (
        _build_hybrid_linear_kv_pool
    ),
    "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper": _wrap_for_model,
}
