"""Hooks of the scheduler process: the pool's class, and the layout in the server info.

It also has the pool of models that mix MLA with linear attention, and the backend of their linear layers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

from sgl_kvpool import metrics
from sgl_kvpool.attention.readers import DSA_BACKEND, KVPOOL_BACKEND
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.sglang_plugin.hooks import disaggregation, weights
from sgl_kvpool.sglang_plugin.hooks.launching import layout_info
from sgl_kvpool.sglang_plugin.hooks.server_args import require_decided
from sgl_kvpool.sglang_plugin.models import is_dsa, is_hybrid, layers_with_rows, model_name
from sgl_kvpool.sglang_plugin.options import (
    ARRANGEMENT,
    AUTO,
    HOST_LAYOUT,
    LAYOUT,
    arrangement_of,
    host_tier_of,
    layout_of,
)
from sgl_kvpool.sglang_plugin.registry import around, fields, uses
from sgl_kvpool.sglang_plugin.rules.attention import backends_in_use, check_draft
from sgl_kvpool.sglang_plugin.rules.dsa import check_draft_backend

if TYPE_CHECKING:
    from sgl_kvpool.srt.pool.row_pool import RowPool

logger = logging.getLogger(__name__)

_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_POOLS = "sglang.srt.mem_cache.memory_pool"
_HYBRID = f"{_POOLS}.HybridLinearKVPool"

uses(
    f"{_POOLS}.MLATokenToKVPool.__init__",
    "pools",
    takes=(
        *("self", "size", "page_size", "dtype", "kv_lora_rank", "qk_rope_head_dim", "layer_num"),
        *("device", "enable_memory_saver", "start_layer", "end_layer", "use_dsa"),
    ),
)
uses(f"{_POOLS}.MLATokenToKVPool._write_loc_dcp_span", "pools")
uses(
    f"{_POOLS}.DSATokenToKVPool.__init__",
    "sparse attention",
    takes=("self", "size", "kv_cache_dim", "index_kpool"),
)
# A scheduler's counters appear among SGLang's metrics through the files of prometheus_client's multi-process
# mode.
uses("sglang.srt.utils.set_prometheus_multiproc_dir", "metrics")
fields("enable_metrics")

_GB = 1 << 30  # as in SGLang's own log lines


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


@around(f"{_CONFIGURATOR}._resolve_kv_pool_class", "pools")
def _resolve_kv_pool_class(original, self, *, kind, default):
    """Our class for pools of rows, with its options: target and draft pools take their class from here."""
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


def bound(
    configurator: Any, layout: MLAKVCacheLayout, pool_class: Callable[..., RowPool]
) -> Callable[..., RowPool]:
    """Our pool class, with the options of a KVCacheConfigurator's server; SGLang only calls it."""
    from sgl_kvpool.srt.pool.row_pool import PoolOptions

    options = PoolOptions(
        layout,
        _k_scales_of(configurator, layout),
        requested_arrangement(configurator),
        _readers(configurator),
        host_tier_of(configurator.server_args),
    )
    return partial(pool_class, options=options)


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

    if is_dsa(configurator.model_config):
        return (DSA_BACKEND,)
    # As in model_runner.resolve_draft_attention_backend, a draft's explicit backend serves all its phases.
    draft = get_spec().speculative_draft_attention_backend if configurator.is_draft_worker else None
    if draft is not None:
        return (draft,)
    return tuple(name for name in attention_backends() if name is not None)


def _k_scales_of(configurator: Any, layout: MLAKVCacheLayout) -> dict[int, float]:
    """k_scales of the model as it is loaded now, for the pool of a KVCacheConfigurator."""
    layers = layers_with_rows(configurator.model_config)
    if layers is not None and configurator.is_draft_worker:
        layers = (0,)  # a hybrid draft is one MLA layer, to which SGLang's builder of pools gives this number
    return _checked_k_scales(configurator.model, layout, _readers(configurator), layers)


def _checked_k_scales(
    model: Any, layout: MLAKVCacheLayout, readers: tuple[str, ...], with_rows: Collection[int] | None = None
) -> dict[int, float]:
    if not layout.uses_k_scale:
        return {}
    k_scales = collect_k_scales(model)
    if with_rows is not None:  # linear layers that are `RadixAttention` modules (lightning) were found too
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
    """k_scale of every model layer that has one, by layer id, where SGLang's loader sets it.

    The scale of other layers is 1.0. Refusal if two modules of a layer disagree.
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


@around(f"{_CONFIGURATOR}._build_token_to_kv_pool", "pools", reads=("sizes",))
def _build_token_to_kv_pool(original, self, **kwargs):
    """Check the pool that SGLang built: a builder that does not resolve the class would build another."""
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
    disaggregation.POOLS.add(pool.row_pool)
    weights.follow_k_scales(pool, partial(_k_scales_of, self, layout))
    if not self.is_draft_worker:
        _publish_metrics(self.server_args)
        _warn_of_prompts_that_wait(pool.row_pool, self.model_config.context_len)
    chosen = getattr(self.server_args, ARRANGEMENT.attribute) == AUTO
    rows = pool.row_pool
    logger.info(
        "sgl-kvpool: KV cache layout %s: %d bytes per token and layer, %d layers, %d tokens, %.2f GB, "
        "arrangement %s%s%s",
        layout,
        rows.row_format.row_bytes,
        rows.layer_num,
        rows.size * rows.slots_per_row,
        rows.get_kv_size_bytes() / _GB,
        arrangement,
        " (auto)" if chosen else "",
        " (draft model)" if self.is_draft_worker else "",
    )
    return pool


def _warn_of_prompts_that_wait(pool: Any, context_len: int) -> None:
    """Log which prompts SGLang accepts (7 tokens below its limits) and never schedules (issue 28530)."""
    tokens, page = pool.size * pool.slots_per_row, pool.page_size * pool.slots_per_row
    if tokens - page <= min(context_len, tokens) - 7:
        logger.warning(
            "sgl-kvpool: a prompt of %d tokens or more would wait for ever, and later requests behind it: "
            "the pool has %d, and SGLang reserves a page of %d; give --context-length %d",
            *(tokens - page, tokens, page, tokens - page),
        )


@around("sglang.srt.utils.common.build_server_info", "pools")
def _build_server_info(original, server_args, scheduler_info):
    """Add the layout in use to the description that SGLang's Rust server builds in a scheduler."""
    return {**original(server_args, scheduler_info), **layout_info(server_args)}


def _publish_metrics(server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    view, info = resolving_view(server_args), layout_info(server_args)
    if view.enable_metrics:
        metrics.publish(
            layout=info[LAYOUT.name],
            host_layout=info.get(HOST_LAYOUT.name, "none"),
            arrangement=info[ARRANGEMENT.name],
            backend=", ".join(dict.fromkeys(name for name in backends_in_use(view) if name)),
            dcp_size=view.dcp_size,
        )


# The class that the builder of pools finds by its global name and constructs.
uses("sglang.srt.mem_cache.kv_cache_configurator.HybridLinearKVPool", "hybrid models")
uses(
    f"{_HYBRID}.__init__",
    "hybrid models",
    takes=(
        *("self", "full_attention_layer_ids", "mamba_pool", "use_mla", "use_dsa", "full_kv_pool_class"),
        "full_kv_pool",
    ),
)
uses(f"{_HYBRID}._transfer_full_attention_id", "hybrid models", takes=("self", "layer_id"))
uses(f"{_HYBRID}._wait_for_layer", "hybrid models", takes=("self", "layer_id"))


@around(
    f"{_CONFIGURATOR}._build_hybrid_linear_kv_pool",
    "hybrid models",
    reads=(
        *("max_total_num_tokens", "req_to_token_pool", "mha_pool_class", "mla_pool_class"),
        "dsa_pool_class",
    ),
)
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


@around(
    "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
    "hybrid models",
    repairs="none reported",
)
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
