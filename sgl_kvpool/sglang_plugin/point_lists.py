"""Hook points of arguments, pools and attention, as lists for the hook groups of :mod:`.hook_groups`.

An import of our modules needs no line, unless its parameters or members have to be checked: :mod:`.imports`
reads the imports from the source. `docs/hooks.md` says what each hook does and why.
"""

from __future__ import annotations

from sgl_kvpool.attention.readers import KVPOOL_BACKEND
from sgl_kvpool.attention.topk_transform import DECODE_MODES, EXTEND_MODES, IDLE_MODES
from sgl_kvpool.sglang_plugin.hook_points import HookPoint
from sgl_kvpool.sglang_plugin.rules.arguments import NUMBERS
from sgl_kvpool.sglang_plugin.rules.attention import SPECULATIVE_FIELDS
from sgl_kvpool.sglang_plugin.rules.features import BACKEND_FEATURES, LAYOUT_FEATURES

__all__ = [
    "ARGUMENTS",
    "ATTENTION",
    "HYBRID",
    "LAUNCHER",
    "METRICS",
    "MODEL_RULES",
    "POOLS",
    "SPARSE_ATTENTION",
    "SPECULATIVE",
    "STEPS",
]


_ARGS = "sglang.srt.server_args.ServerArgs"
_KVC = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_SIZES = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"
_POOL = "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool"
_HOOK = "sglang.srt.arg_groups"

#: Steps of SGLang's argument resolution that `hooks.server_args` wraps.
STEPS = (
    "handle_deprecated_dp_attention",
    "handle_model_specific_adjustments",
    "handle_attention_backend_compatibility",
    "validate_deepep_v2_dispatch_token_budget",
)

#: Fields of ServerArgs that the plugin reads.
FIELDS = (
    *("kv_cache_dtype", "attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    *("device", "cuda_graph_config"),
    *("enable_hierarchical_cache", "hicache_mem_layout", "hicache_io_backend", "page_size"),
    *("hicache_ratio", "hicache_size", "hicache_storage_backend", "enable_metrics"),
    *("hicache_storage_backend_extra_config", "hicache_write_policy", "hicache_host_memory_mode"),
    *("disaggregation_decode_enable_offload_kvcache", "disaggregation_transfer_backend", "attn_dp_size"),
    *SPECULATIVE_FIELDS,
    *(feature.field for feature in BACKEND_FEATURES),
    *(feature.field for feature in LAYOUT_FEATURES),
    *("dsa_prefill_backend", "dsa_decode_backend", "enable_mixed_chunk", "enable_hisparse"),
    *("mamba_radix_cache_strategy", "mamba_track_interval", "pp_size"),
    *("enable_linear_replayssm", "enable_linear_replayssm_spec"),
    *(number.field for number in NUMBERS),
    "ep_join_mode",
)

#: Hook points of every process that loads plugins.
ARGUMENTS = (
    HookPoint(f"{_ARGS}.add_cli_args", ("parser",)),
    HookPoint(f"{_ARGS}.from_cli_args", ("args",)),
    HookPoint(f"{_ARGS}._NS_BY_FIELD", hooked=False, members=FIELDS),
    HookPoint("sglang.srt.plugins.load_plugins"),
    HookPoint(f"{_HOOK}.resolution_hooks._OVERRIDABLE_HOOKS", hooked=False, members=STEPS),
    HookPoint(
        "sglang.srt.plugins.hook_registry.HookRegistry._apply_target",
        ("target", "hooks"),
        hooked=False,
    ),
    HookPoint(f"{_HOOK}.resolution_hooks.register_resolution_hook", ("name",), hooked=False),
    HookPoint(f"{_HOOK}.overrides.declare_resolution", ("server_args", "source"), hooked=False),
    HookPoint(f"{_HOOK}.overrides.resolving_view", ("server_args",), hooked=False),
    HookPoint(f"{_HOOK}.overrides.attention_backends_of", ("cfg",), hooked=False),
    HookPoint(f"{_HOOK}.overrides.model_config_of", ("server_args",), hooked=False),
    HookPoint(f"{_HOOK}.choices.add_attention_backend_choices", hooked=False),
    HookPoint(f"{_HOOK}.overrides.supports_mamba_cache_extra_buffer", ("view", "hf_config"), hooked=False),
)

#: Hook points of the rules for models.
MODEL_RULES = (
    HookPoint("sglang.srt.configs.model_config.is_deepseek_dsa", ("config",), hooked=False),
    HookPoint("sglang.srt.configs.model_config.get_dsa_index_kpool", ("config",), hooked=False),
    HookPoint("sglang.srt.configs.model_config.get_dsa_index_kpool_compress", ("config",), hooked=False),
    HookPoint(
        "sglang.srt.distributed.utils.get_pp_indices",
        ("num_hidden_layers", "pp_rank", "pp_size"),
        hooked=False,
    ),
    HookPoint("sglang.srt.configs.hybrid_arch.mambaish_config", ("model_config",), hooked=False),
)

#: Hook points of the process that launches a server with a layout.
LAUNCHER = (
    HookPoint(
        "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes",
        ("server_args", "port_args", "run_scheduler_process_func"),
    ),
    HookPoint("sglang.srt.entrypoints.engine.Engine.get_server_info", ("self",)),
    HookPoint(
        "sglang.srt.entrypoints.engine.SchedulerInitResult.__dataclass_fields__",
        hooked=False,
        members=("wait_for_ready",),
    ),
    HookPoint("sglang.srt.runtime_context.num_dp_ranks_of", ("cfg",), hooked=False),
    HookPoint("sglang.srt.utils.common.build_server_info", ("server_args", "scheduler_info")),
)

_DEEPSEEK = "sglang.srt.models.deepseek_common"

#: Hook points of the backend `kvpool_mla`, on a CPU and on CUDA.
ATTENTION = (
    HookPoint(
        "sglang.srt.layers.attention.attention_registry.register_attention_backend",
        ("name",),
        hooked=False,
    ),
    HookPoint(
        "sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS",
        hooked=False,
        added=(KVPOOL_BACKEND,),
    ),
    HookPoint(
        f"{_DEEPSEEK}.attention_backend_handler.AttentionBackendRegistry.register",
        ("backend_name", "handler_func"),
        hooked=False,
    ),
    HookPoint(
        f"{_DEEPSEEK}.attention_backend_handler.AttentionBackendRegistry._handlers",
        hooked=False,
        members=("flashinfer",),
        added=(KVPOOL_BACKEND,),
    ),
    HookPoint(
        f"{_DEEPSEEK}.attention_backend_handler._handle_attention_backend",
        ("attn", "forward_batch", "backend_name"),
        hooked=False,
    ),
    HookPoint(
        f"{_DEEPSEEK}.attention_backend_handler._dispatch_mla_subtype",
        ("attn", "forward_batch"),
        hooked=False,
    ),
    HookPoint(
        f"{_DEEPSEEK}.attention_backend_handler.MHA_ONE_SHOT_SUPPORTED_BACKENDS",
        hooked=False,
        members=("flashinfer",),
    ),
    HookPoint(
        f"{_DEEPSEEK}.utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS",
        hooked=False,
        members=("flashinfer",),
        added=(KVPOOL_BACKEND,),
    ),
    HookPoint(
        "sglang.srt.arg_groups.choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS",
        hooked=False,
        members=("flashinfer",),
        added=(KVPOOL_BACKEND,),
    ),
    HookPoint("sglang.srt.mem_cache.memory_pool.KVWriteLoc.for_batch", ("forward_batch",), hooked=False),
    HookPoint(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward_extend",
        ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
        hooked=False,
    ),
)

_DRAFTS = "sglang.srt.speculative.draft_utils.DraftBackendFactory"

#: Hook points of the attention backends of draft models.
SPECULATIVE = (
    HookPoint(
        f"{_DRAFTS}._create_backend",
        ("self", "backend_name", "backend_map", "error_template", "stamps_children"),
    ),
    HookPoint(f"{_DRAFTS}.create_decode_backend", ("self",), hooked=False),
    HookPoint(f"{_DRAFTS}.create_draft_extend_backend", ("self",), hooked=False),
)

_DSA = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"

#: Hook points of models with sparse attention (DSA).
SPARSE_ATTENTION = (
    HookPoint(f"{_DSA}.__init__", ("self", "model_runner")),
    HookPoint(f"{_DSA}.set_dsa_prefill_impl", ("self", "forward_batch")),
    HookPoint(f"{_DSA}.get_topk_transform_method", ("self", "forward_mode")),
    HookPoint(
        f"{_DSA}._forward_flashmla_sparse",
        (
            *("self", "q_all", "kv_cache", "v_head_dim", "page_table_1", "sm_scale", "topk_length"),
            "attn_sink",
        ),
    ),
    HookPoint(
        "sglang.kernels.ops.attention.dsa.dequant_k_cache.dequantize_k_cache_paged_dsa",
        ("quant_k_cache", "page_table_1_flattened"),
    ),
    HookPoint(
        "sglang.srt.layers.attention.dsa.dsa_topk_backend.TopkTransformMethod.__members__",
        hooked=False,
        members=("PAGED", "RAGGED"),
    ),
    # Members of the `IntEnum` by the names that the table of top-k transforms uses.
    HookPoint(
        "sglang.srt.model_executor.forward_batch_info.ForwardMode.__members__",
        hooked=False,
        members=(*EXTEND_MODES, *DECODE_MODES, *IDLE_MODES),
    ),
    HookPoint("sglang.srt.configs.model_config.get_dsa_index_topk", ("config",), hooked=False),
    HookPoint("sglang.srt.runtime_context.get_buffer", ("name", "factory"), hooked=False),
    HookPoint(
        "sglang.srt.mem_cache.memory_pool.DSATokenToKVPool.__init__",
        ("self", "size", "kv_cache_dim", "index_kpool"),
        hooked=False,
    ),
)

#: Hook points of the pools of every layout, and of their budget.
POOLS = (
    HookPoint("sglang.srt.managers.scheduler.Scheduler.__init__", ("self", "server_args", "port_args")),
    HookPoint(f"{_KVC}._resolve_kv_pool_class", ("self", "kind", "default")),
    HookPoint(f"{_KVC}._build_token_to_kv_pool", ("self", "sizes")),
    HookPoint(f"{_SIZES}._compute_cell_size", ("self", "kvc", "num_layers")),
    HookPoint(f"{_SIZES}.__init__", ("self", "kvc")),
    # SGLang's Rust server describes itself from inside a scheduler.
    HookPoint("sglang.srt.utils.common.build_server_info", ("server_args", "scheduler_info")),
    HookPoint(
        "sglang.srt.mem_cache.kv_cache_configurator.calculate_mla_kv_cache_dim",
        ("model_config", "kv_cache_dtype"),
        hooked=False,
    ),
    HookPoint(
        f"{_POOL}.__init__",
        (
            *("self", "size", "page_size", "dtype", "kv_lora_rank", "qk_rope_head_dim", "layer_num"),
            *("device", "enable_memory_saver", "start_layer", "end_layer", "use_dsa"),
        ),
        hooked=False,
    ),
    HookPoint(f"{_POOL}._create_buffers", ("self",), hooked=False),
    HookPoint(
        f"{_POOL}.set_kv_buffer",
        ("self", "layer", "loc_info", "cache_k", "cache_v", "layer_id_override"),
        hooked=False,
    ),
    HookPoint(
        f"{_POOL}.set_mla_kv_buffer",
        ("self", "layer", "loc_info", "cache_k_nope", "cache_k_rope", "layer_id_override"),
        hooked=False,
    ),
    HookPoint(f"{_POOL}.get_mla_kv_buffer", ("self", "layer", "loc", "dst_dtype"), hooked=False),
)

_HYBRID_POOL = "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool"

#: Hook points of models that mix MLA with linear attention.
HYBRID = (
    HookPoint(
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
        ("runner", "full_attn_backend"),
    ),
    HookPoint(
        f"{_KVC}._build_hybrid_linear_kv_pool",
        (
            *("self", "max_total_num_tokens", "req_to_token_pool", "mha_pool_class", "mla_pool_class"),
            "dsa_pool_class",
        ),
    ),
    # The class that this builder finds by its global name and constructs.
    HookPoint("sglang.srt.mem_cache.kv_cache_configurator.HybridLinearKVPool", hooked=False),
    HookPoint(
        f"{_HYBRID_POOL}.__init__",
        (
            *("self", "full_attention_layer_ids", "mamba_pool", "use_mla", "use_dsa", "full_kv_pool_class"),
            "full_kv_pool",
        ),
        hooked=False,
    ),
    HookPoint(
        f"{_HYBRID_POOL}.set_kv_buffer",
        ("self", "layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale", "dcp_kv_mask"),
        hooked=False,
    ),
    HookPoint(f"{_HYBRID_POOL}._transfer_full_attention_id", ("self", "layer_id"), hooked=False),
    HookPoint(
        f"{_HYBRID_POOL}.set_mla_kv_buffer",
        ("self", "layer", "loc_info", "cache_k_nope", "cache_k_rope"),
        hooked=False,
    ),
    HookPoint(f"{_HYBRID_POOL}.get_mla_kv_buffer", ("self", "layer", "loc", "dst_dtype"), hooked=False),
    HookPoint(f"{_HYBRID_POOL}._wait_for_layer", ("self", "layer_id"), hooked=False),
)

#: Hook points of `--enable-metrics`: a scheduler's counters appear among SGLang's metrics through the files
#: of prometheus_client's multi-process mode.
METRICS = (HookPoint("sglang.srt.utils.set_prometheus_multiproc_dir", hooked=False),)
