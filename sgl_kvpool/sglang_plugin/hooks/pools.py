"""Hooks of the scheduler process: the pool's class, and the layout in the server info."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from sgl_kvpool import metrics
from sgl_kvpool.attention.readers import DSA_BACKEND, KVPOOL_BACKEND
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.sglang_plugin import hook_points
from sgl_kvpool.sglang_plugin.hooks import disaggregation
from sgl_kvpool.sglang_plugin.hooks.configurator import requested_arrangement, requested_layout
from sgl_kvpool.sglang_plugin.hooks.launching import build_server_info
from sgl_kvpool.sglang_plugin.models import is_dsa, is_hybrid, layers_with_rows, model_name
from sgl_kvpool.sglang_plugin.options import ARRANGEMENT, AUTO, host_tier_of
from sgl_kvpool.sglang_plugin.rules.attention import backends_in_use, check_draft
from sgl_kvpool.sglang_plugin.rules.dsa import check_draft_backend
from sgl_kvpool.sglang_plugin.rules.host_tier import has_host_tier

if TYPE_CHECKING:
    from sgl_kvpool.srt.pool.row_pool import RowPool

logger = logging.getLogger(__name__)

__all__ = ["bound", "collect_k_scales", "install"]

_GB = 1 << 30  # as in SGLang's own log lines


def install() -> None:
    """Apply the hooks."""
    hook_points.wrap_all(HOOKS)


# -------------------------------------------------------------------- the pool


def _resolve_kv_pool_class(original, self, *, kind, default):
    pool_class = original(self, kind=kind, default=default)
    layout = requested_layout(self)
    if layout is None:
        return pool_class
    # SGLang resolves the class of every kind, for any model, and constructs one of them.
    sparse = is_dsa(self.model_config)
    if kind != ("dsa" if sparse else "mla"):
        return pool_class
    if pool_class is not default:
        raise Refusal(
            f"this platform brings its own MLA pool ({pool_class.__name__}), which cannot store "
            f"--kv-cache-layout {layout}; leave the argument out"
        )
    if self.is_draft_worker:
        _check_draft(self, layout, sparse)
    if is_hybrid(self.model_config):
        return pool_class  # our hybrid pool replaces this class of its inner pool
    if sparse:
        from sgl_kvpool.srt.pool.dsa import LayoutDSATokenToKVPool

        return bound(self, layout, LayoutDSATokenToKVPool)
    from sgl_kvpool.srt.pool.mla import LayoutMLATokenToKVPool

    return bound(self, layout, LayoutMLATokenToKVPool)


def bound(configurator: Any, layout: MLAKVCacheLayout, pool_class: type[RowPool]) -> type:
    """Our pool class, bound to the options of a KVCacheConfigurator's server."""
    readers = (DSA_BACKEND,) if is_dsa(configurator.model_config) else _readers(configurator)
    return pool_class.bind(
        layout,
        _checked_k_scales(configurator, layout, readers, _layers_with_rows(configurator)),
        arrangement=requested_arrangement(configurator),
        readers=readers,
        host_tier=host_tier_of(configurator.server_args),
    )


def _check_draft(configurator: Any, layout: MLAKVCacheLayout, sparse: bool) -> None:
    """Refuse a draft whose pool cannot have the rows of its target, or whose backend cannot read them."""
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.runtime_context import get_spec

    if sparse != is_dsa(model_config_of(configurator.server_args)):
        raise Refusal(
            f"{model_name(configurator.model_config)}, the draft model, {'has' if sparse else 'has no'} "
            f"sparse attention (DSA) and its target {'does not' if sparse else 'has'}: their pools are "
            "declared to SGLang differently; leave out --kv-cache-layout, or use a draft of the target's kind"
        )
    backend = get_spec().speculative_draft_attention_backend
    if sparse:
        check_draft_backend(backend, model_name(configurator.model_config))
    else:
        check_draft(layout, requested_arrangement(configurator), backend)


def _readers(configurator: Any) -> tuple[str, ...]:
    """Names of the attention backends that read the pool of a KVCacheConfigurator."""
    from sglang.srt.runtime_context import attention_backends, get_spec

    # As in model_runner.resolve_draft_attention_backend, a draft's explicit backend serves all its phases.
    draft = get_spec().speculative_draft_attention_backend if configurator.is_draft_worker else None
    if draft is not None:
        return (draft,)
    return tuple(name for name in attention_backends() if name is not None)


def _layers_with_rows(configurator: Any) -> Collection[int] | None:
    """Model layers with rows; None if all have rows.

    `collect_k_scales` also finds linear layers, if these are `RadixAttention` modules (lightning).
    """
    layers = layers_with_rows(configurator.model_config)
    # A hybrid draft is one MLA layer, to which SGLang's builder of pools gives the number 0.
    return (0,) if layers is not None and configurator.is_draft_worker else layers


def _checked_k_scales(
    self,
    layout: MLAKVCacheLayout,
    readers: tuple[str, ...],
    with_rows: Collection[int] | None = None,
) -> dict[int, float]:
    if not layout.uses_k_scale:
        return {}
    k_scales = collect_k_scales(self.model)
    if with_rows is not None:
        k_scales = {layer: value for layer, value in k_scales.items() if layer in with_rows}
    scaled = sorted(layer for layer, value in k_scales.items() if value != 1.0)
    stock = sorted({name for name in readers if name != KVPOOL_BACKEND})
    if scaled and stock:
        ours = "" if DSA_BACKEND in stock else f"--attention-backend {KVPOOL_BACKEND}, or "
        raise Refusal(
            f"the checkpoint has k_scale={k_scales[scaled[0]]} in layer {scaled[0]}, and attention backend "
            f"{', '.join(stock)} does not multiply rows by it in both prefill and decode; use "
            f"{ours}--kv-cache-layout bf16"
        )
    return k_scales


def collect_k_scales(model: Any) -> dict[int, float]:
    """k_scale of every model layer that has one, from the modules on which SGLang's loader sets it.

    Parameters
    ----------
    model : torch.nn.Module
        The loaded model.

    Returns
    -------
    dict of int to float
        Model layer id to scale; for a layer that is absent, the scale is 1.0.

    Raises
    ------
    ValueError
        Two modules of a layer disagree.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    attentions = [(n, m) for n, m in model.named_modules() if isinstance(m, RadixAttention)]
    # DeepSeek models have two per layer, and the loader sets k_scale on attn_mqa alone.
    absorbed = [(n, m) for n, m in attentions if n.rpartition(".")[2] == "attn_mqa"]
    k_scales: dict[int, float] = {}
    for name, module in absorbed or attentions:
        if module.k_scale_float is None:
            continue
        value = float(module.k_scale_float)
        if k_scales.setdefault(module.layer_id, value) != value:
            raise Refusal(
                f"two attention modules of layer {module.layer_id} have k_scale "
                f"{k_scales[module.layer_id]} and {value} ({name}); the checkpoint's KV scales are damaged"
            )
    return k_scales


def _build_token_to_kv_pool(original, self, **kwargs):
    pool = original(self, **kwargs)
    layout = requested_layout(self)
    if layout is None:
        return pool
    from sgl_kvpool.srt.pool.row_pool import RowPool

    if not isinstance(pool, RowPool) or pool.kv_cache_layout is not layout:
        raise RuntimeError(
            f"--kv-cache-layout {layout} was requested, but SGLang built a {type(pool).__name__}; "
            "leave the argument out, and report the server's arguments"
        )
    arrangement = requested_arrangement(self)
    if pool.kv_cache_arrangement is not arrangement:
        raise RuntimeError(
            f"the requested arrangement is {arrangement}, but SGLang built a {pool.kv_cache_arrangement} "
            "pool; leave out --kv-cache-arrangement, and report the server's arguments"
        )
    disaggregation.remember(pool.row_pool)
    if not self.is_draft_worker:
        _publish_metrics(self.server_args, layout, arrangement)
    chosen = getattr(self.server_args, ARRANGEMENT.attribute) == AUTO
    rows = pool.row_pool
    logger.info(
        "sgl-kvpool: KV cache layout %s: %d bytes per token and layer, %d layers, %d tokens, %.2f GB, "
        "arrangement %s%s%s",
        layout,
        rows.row_format.row_bytes,
        rows.layer_num,
        rows.size,
        rows.get_kv_size_bytes() / _GB,
        arrangement,
        " (auto)" if chosen else "",
        " (draft model)" if self.is_draft_worker else "",
    )
    return pool


def _publish_metrics(server_args: Any, layout: MLAKVCacheLayout, arrangement: KVArrangement) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    view = resolving_view(server_args)
    if view.enable_metrics:
        metrics.publish(
            layout=layout.value,
            host_layout=host_tier_of(server_args).host_layout(layout).value
            if has_host_tier(view)
            else "none",
            arrangement=arrangement.value,
            backend=", ".join(dict.fromkeys(name for name in backends_in_use(view) if name)),
        )


_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"

#: Function of SGLang -> hook around it.
HOOKS: Mapping[str, Callable] = {
    f"{_CONFIGURATOR}._resolve_kv_pool_class": _resolve_kv_pool_class,
    f"{_CONFIGURATOR}._build_token_to_kv_pool": _build_token_to_kv_pool,
    "sglang.srt.utils.common.build_server_info": build_server_info,
}
