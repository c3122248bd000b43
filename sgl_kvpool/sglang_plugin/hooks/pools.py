"""Hooks of the scheduler process: the pool's class, and the layout in the server info.

It also has the pool of models that mix MLA with linear attention, and the backend of their linear layers.
"""

import logging
from functools import partial
from typing import Any

from sgl_kvpool import metrics
from sgl_kvpool.refusal import Refusal, leave_out
from sgl_kvpool.sglang_plugin.hooks.launching import layout_info
from sgl_kvpool.sglang_plugin.options import ARRANGEMENT, AUTO, ERROR_SAMPLE, HOST_LAYOUT, LAYOUT, config_of
from sgl_kvpool.sglang_plugin.pool_request import PoolRequest
from sgl_kvpool.sglang_plugin.registry import around, installs, uses
from sgl_kvpool.sglang_plugin.server import Server
from sgl_kvpool.srt import peers
from sgl_kvpool.srt.pool.k_scales import follow_k_scales

logger = logging.getLogger(__name__)

_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_POOLS = "sglang.srt.mem_cache.memory_pool"
_HYBRID = f"{_POOLS}.HybridLinearKVPool"

uses(
    f"{_POOLS}.MLATokenToKVPool.__init__",
    "pools",
    takes=(
        *("self", "size", "page_size", "dtype", "kv_lora_rank", "qk_rope_head_dim", "layer_num"),
        *("device", "enable_memory_saver", "start_layer", "end_layer", "use_dsa", "dcp_replicated"),
    ),
)
uses(f"{_POOLS}.MLATokenToKVPool._write_loc_dcp_span", "pools")
uses(f"{_CONFIGURATOR}.loc_space_scale", "pools")
uses(
    f"{_POOLS}.DSATokenToKVPool.__init__",
    "sparse attention",
    takes=("self", "size", "kv_cache_dim", "index_kpool"),
)
# A scheduler's counters appear among SGLang's metrics through the files of prometheus_client's multi-process
# mode.
uses("sglang.srt.utils.set_prometheus_multiproc_dir", "metrics")

_GB = 1 << 30  # as in SGLang's own log lines


@around(f"{_CONFIGURATOR}._resolve_kv_pool_class", "pools")
def _resolve_kv_pool_class(original, self, *, kind, default):
    """Our class for pools of rows, with its options: target and draft pools take their class from here."""
    pool_class, request = original(self, kind=kind, default=default), PoolRequest(self)
    # SGLang resolves the class of every kind, for any model, and constructs one of them.
    if not request.has_rows or kind != ("dsa" if request.is_dsa else "mla"):
        return pool_class
    if pool_class is not default:
        raise Refusal(
            f"this platform brings its own MLA pool ({pool_class.__name__}), which cannot store "
            f"{LAYOUT.flag} {request.layout}",
            leave_out(LAYOUT.flag, text="leave the argument out"),
        )
    request.check_draft()
    if request.is_hybrid:
        return pool_class  # our hybrid pool replaces this class of its inner pool
    ours: Any
    if request.is_dsa:
        from sgl_kvpool.srt.pool.dsa import LayoutDSATokenToKVPool as ours
    else:
        from sgl_kvpool.srt.pool.mla import LayoutMLATokenToKVPool as ours
    # SGLang says only for sparse attention that a draft's pool has the rows of all ranks.
    replicated = {} if request.is_dsa else {"dcp_replicated": self.loc_space_scale > 1}
    return partial(ours, options=request.options(), **replicated)  # SGLang only calls it


@around(f"{_CONFIGURATOR}._build_token_to_kv_pool", "pools", reads=("sizes",))
def _build_token_to_kv_pool(original, self, **kwargs):
    """Check the pool that SGLang built: a builder that does not resolve the class would build another."""
    pool = original(self, **kwargs)
    request = PoolRequest(self)
    if not request.has_rows:
        return pool
    from sgl_kvpool.srt.pool.row_pool import RowPool

    layout, arrangement = request.layout, request.arrangement
    if not isinstance(pool, RowPool) or pool.kv_cache_layout is not layout:
        raise RuntimeError(
            f"--kv-cache-layout {layout} was requested, but SGLang built a {type(pool).__name__}; "
            "leave the argument out, and report the server's arguments"
        )
    if pool.kv_cache_arrangement is not arrangement:
        raise RuntimeError(
            f"the requested arrangement is {arrangement}, but SGLang built a {pool.kv_cache_arrangement} "
            "pool; leave out --kv-cache-arrangement, and report the server's arguments"
        )
    peers.POOLS.add(pool.row_pool)
    follow_k_scales(pool, request.k_scales)
    if not self.is_draft_worker:
        _publish_metrics(self.server_args)
        _warn_of_prompts_that_wait(pool.row_pool, self.model_config.context_len)
    chosen = request.config.requests(ARRANGEMENT) == AUTO
    rows = pool.row_pool
    logger.info(
        "sgl-kvpool: KV cache layout %s: %d bytes per token and layer, %d layers, %d tokens, %.2f GB, "
        "arrangement %s%s%s",
        layout,
        rows.row_format.row_bytes,
        rows.layer_num,
        rows.size * rows.dcp_size,
        rows.get_kv_size_bytes() / _GB,
        arrangement,
        " (auto)" if chosen else "",
        " (draft model)" if self.is_draft_worker else "",
    )
    return pool


def _warn_of_prompts_that_wait(pool: Any, context_len: int) -> None:
    """Log which prompts SGLang accepts (7 tokens below its limits) and never schedules (issue 28530)."""
    tokens, page = pool.size * pool.dcp_size, pool.page_size * pool.dcp_size
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
    server, info = Server(server_args), layout_info(server_args)
    if server.view.enable_metrics:
        metrics.publish(
            layout=info[LAYOUT.name],
            host_layout=info.get(HOST_LAYOUT.name, "none"),
            arrangement=info[ARRANGEMENT.name],
            backend=", ".join(dict.fromkeys(name for name in server.backends if name)),
            dcp_size=server.view.dcp_size,
        )


@around("sglang.srt.model_executor.model_runner.ModelRunner.forward", "error samples")
def _forward(original, self, forward_batch, *args, **kwargs):
    """Compare tokens of every n-th prefill of the target with their stored rows."""
    from sgl_kvpool.srt.attention.decode_verify import has_fixed_query_length
    from sgl_kvpool.srt.pool.error_sample import ErrorSample

    pool = self.token_to_kv_pool.row_pool
    is_prefill = not (self.is_draft_worker or has_fixed_query_length(forward_batch.forward_mode))
    if not (is_prefill and pool.layer_num):  # a stage of a hybrid model may have none of the pool's layers
        return original(self, forward_batch, *args, **kwargs)
    if pool.error_sample is None:
        every = int(config_of(self.server_args).requests(ERROR_SAMPLE))
        pool.error_sample = ErrorSample(self.token_to_kv_pool, every)
    pool.error_sample.begin()
    output = original(self, forward_batch, *args, **kwargs)
    pool.error_sample.end("replayed" if output.can_run_graph else "eager")
    return output


@installs("canary")
def _register_with_canary() -> None:
    from sgl_kvpool.srt.pool import canary

    canary.register()


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
    request = PoolRequest(self)
    if not request.has_rows:
        return original(self, **kwargs)
    from sglang.srt.mem_cache import kv_cache_configurator

    from sgl_kvpool.srt.pool.hybrid import LayoutHybridLinearKVPool

    stock = kv_cache_configurator.HybridLinearKVPool
    kv_cache_configurator.HybridLinearKVPool = partial(LayoutHybridLinearKVPool, options=request.options())
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
