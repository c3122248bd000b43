"""What sgl-kvpool touches of SGLang, as a list; :mod:`.seams` looks whether it holds.

`docs/hooks.md` says what each hook does and why.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvpool.attention.readers import KVPOOL_BACKEND
from sgl_kvpool.attention.topk_transform import DECODE_MODES, EXTEND_MODES, IDLE_MODES
from sgl_kvpool.sglang_plugin.attention_rules import BACKEND_FEATURES, SPECULATIVE_FIELDS
from sgl_kvpool.sglang_plugin.refusals import FEATURES

__all__ = [
    "ATTENTION",
    "DISAGGREGATION",
    "HOST_TIER",
    "LAUNCHER",
    "SCHEDULER",
    "SERVER_ARGS",
    "SPARSE_ATTENTION",
    "STATE_TIER",
    "STEPS",
    "Seam",
]


@dataclass(frozen=True)
class Seam:
    """One thing of SGLang that sgl-kvpool uses.

    Attributes
    ----------
    target : str
        Dotted path.
    parameters : tuple of str
        Names the callable must take, in this order though not without others between; empty for what is
        not called by us with arguments.
    hooked : bool
        True if we wrap it, so that it must be found wrapped afterwards.
    members : tuple of str
        Names a collection must contain.
    added : tuple of str
        Names that we put into a collection, so that it must contain them afterwards.
    """

    target: str
    parameters: tuple[str, ...] = ()
    hooked: bool = True
    members: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


_ARGS = "sglang.srt.server_args.ServerArgs"
_KVC = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_SIZES = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"
_POOL = "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool"
_HOOK = "sglang.srt.arg_groups"

#: Steps of SGLang's argument resolution that we wrap, in the order in which they run.
STEPS = (
    "handle_deprecated_dp_attention",
    "handle_model_specific_adjustments",
    "handle_attention_backend_compatibility",
    "validate_deepep_v2_dispatch_token_budget",
)

#: Fields of ServerArgs that are read.
FIELDS = (
    *("kv_cache_dtype", "attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    *("device", "cuda_graph_config"),
    *("enable_hierarchical_cache", "hicache_mem_layout", "hicache_io_backend", "page_size"),
    *("hicache_ratio", "hicache_size", "hicache_storage_backend", "enable_metrics"),
    "disaggregation_decode_enable_offload_kvcache",
    *SPECULATIVE_FIELDS,
    *(feature.field for feature in BACKEND_FEATURES),
    *(feature.field for feature in FEATURES),
    *("dsa_prefill_backend", "dsa_decode_backend", "enable_mixed_chunk", "enable_hisparse"),
    "mamba_radix_cache_strategy",
)

#: Used in every process that loads plugins.
SERVER_ARGS = (
    Seam(f"{_ARGS}.add_cli_args", ("parser",)),
    Seam(f"{_ARGS}.from_cli_args", ("args",)),
    Seam(f"{_ARGS}._NS_BY_FIELD", hooked=False, members=FIELDS),
    Seam("sglang.srt.plugins.load_plugins"),
    Seam(f"{_HOOK}.resolution_hooks._OVERRIDABLE_HOOKS", hooked=False, members=STEPS),
    Seam(
        "sglang.srt.plugins.hook_registry.HookRegistry._apply_target",
        ("target", "hooks"),
        hooked=False,
    ),
    Seam(f"{_HOOK}.resolution_hooks.register_resolution_hook", ("name",), hooked=False),
    Seam(f"{_HOOK}.overrides.declare_resolution", ("server_args", "source"), hooked=False),
    Seam(f"{_HOOK}.overrides.resolving_view", ("server_args",), hooked=False),
    Seam(f"{_HOOK}.overrides.attention_backends_of", ("cfg",), hooked=False),
    Seam(f"{_HOOK}.overrides.model_config_of", ("server_args",), hooked=False),
    Seam(f"{_HOOK}.choices.add_attention_backend_choices", hooked=False),
    Seam("sglang.srt.configs.model_config.is_deepseek_dsa", ("config",), hooked=False),
    Seam("sglang.srt.configs.model_config.get_dsa_index_kpool", ("config",), hooked=False),
    Seam("sglang.srt.configs.model_config.get_dsa_index_kpool_compress", ("config",), hooked=False),
    Seam("sglang.srt.configs.hybrid_arch.mambaish_config", ("model_config",), hooked=False),
)

#: Used in the process that launches a server which was asked for a layout.
LAUNCHER = (
    Seam(
        "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes",
        ("server_args", "port_args", "run_scheduler_process_func"),
    ),
    Seam("sglang.srt.entrypoints.engine.Engine.get_server_info", ("self",)),
    Seam("sglang.srt.utils.common.build_server_info", ("server_args", "scheduler_info")),
)

_HICACHE = "sglang.srt.mem_cache.hybrid_cache"
_HOST_POOL = "sglang.srt.mem_cache.pool_host.mla.MLATokenToKVPoolHost"

#: Used in schedulers with a host tier; those that are hooked in this order.
HOST_TIER = (
    Seam(
        f"{_HICACHE}.hybrid_pool_assembler.build_kv_host_pool",
        ("kv_pool", "page_size", "host_size", "mtp_draft_device_pools", "pool_label"),
    ),
    Seam(
        f"{_HICACHE}.hybrid_pool_assembler._build_mha_mla_host_pool",
        (
            *("pool", "host_to_device_ratio", "page_size", "layout", "allocator_type", "pool_label"),
            "host_token_capacity",
        ),
    ),
    Seam(
        "sglang.srt.managers.cache_controller.HiCacheController.attach_storage_backend",
        ("self", "storage_backend", "prefetch_threshold", "model_name"),
    ),
    Seam(
        f"{_HICACHE}.hybrid_cache_controller.HybridCacheController.load",
        ("self", "host_indices", "priority", "node_id", "extra_pools", "device_indices"),
    ),
    Seam(
        f"{_HICACHE}.hybrid_cache_controller.HybridCacheController.write",
        ("self", "device_indices", "priority", "node_id", "extra_pools"),
    ),
    Seam(
        f"{_HICACHE}.hybrid_cache_controller.HybridCacheController._move_pool_indices",
        ("self", "host_pool", "host_indices", "device_indices", "write_back_jit"),
    ),
    Seam(
        "sglang.srt.managers.cache_controller.HiCacheController.move_indices",
        ("self", "host_indices", "device_indices"),
    ),
    Seam(
        "sglang.srt.managers.cache_controller.HiCacheController._generic_page_get",
        ("self", "operation", "hash_values", "host_indices", "extra_info"),
    ),
    Seam(
        "sglang.srt.managers.cache_controller.HiCacheController._generic_page_set",
        ("self", "hash_values", "host_indices", "extra_info"),
    ),
    Seam(
        "sglang.srt.managers.cache_controller.HiCacheController._page_set_zero_copy",
        ("self", "hash_values", "host_indices", "extra_info"),
    ),
    Seam(
        f"{_HOST_POOL}.__init__",
        (
            *("self", "buffer_info", "host_to_device_ratio", "host_size", "page_size", "layout"),
            *("pin_memory", "allocator_type", "override_kv_cache_dim", "draft_buffer_infos"),
            *("device_capacity_tokens", "start_layer", "end_layer", "target_layer_num"),
            *("pool_label", "host_token_capacity"),
        ),
        hooked=False,
    ),
    Seam(
        f"{_HOST_POOL}.load_to_device_per_layer",
        ("self", "device_pool", "host_indices", "device_indices", "layer_id", "io_backend", "is_draft"),
        hooked=False,
    ),
    Seam(
        f"{_HOST_POOL}.backup_from_device_all_layer",
        ("self", "device_pool", "host_indices", "device_indices", "io_backend"),
        hooked=False,
    ),
    *(
        Seam(f"{_HOST_POOL}.{name}", ("self", *parameters), hooked=False)
        for name, parameters in {
            "_allocate_host_buffer": (),
            "_initialize_transfer_views": (),
            "_init_write_back_staging_buffers": (),
            "alloc": ("need_size",),
            "clear": (),
            "get_contiguous_buf_infos": (),
            "get_data_page": ("index", "flat"),
            "get_dummy_flat_data_page": (),
            "get_page_buffer_meta": ("indices",),
            "get_size_per_token": (),
            "init_kv_buffer": (),
            "set_from_flat_data_page": ("index", "data_page"),
        }.items()
    ),
    Seam("sglang.srt.mem_cache.pool_host.base.HICACHE_HOST_MEMORY_RESERVE_BYTES", hooked=False),
    Seam(
        "sglang.srt.mem_cache.pool_host.common._CUDA_HOST_REGISTERED_RANGES_ATTR",
        hooked=False,
    ),
    Seam("sglang.srt.mem_cache.pool_host.common.get_allocator_type", hooked=False),
    Seam("sglang.srt.mem_cache.utils.get_storage_hash_str", ("key", "prior_hash", "page_size"), hooked=False),
    Seam("sglang.srt.runtime_context.get_memory", hooked=False),
)

_STATES = "sglang.srt.mem_cache.pool_host.mamba.MambaPoolHost"
_STORE = "sglang.srt.mem_cache.hicache_storage.HiCacheStorage"

#: Used in schedulers with a host tier of a hybrid model; those that are hooked in this order.
STATE_TIER = (
    Seam(
        f"{_HICACHE}.hybrid_pool_assembler.build_hybrid_mamba_stack",
        ("params", "decls", "mamba_pool"),
    ),
    Seam(f"{_HICACHE}.hybrid_pool_assembler._split_hicache_size", ("hicache_size", "kv_pools")),
    Seam(
        f"{_HICACHE}.hybrid_pool_assembler.build_mamba_host_pool",
        ("mamba_pool", "pool_info", "host_size", "layout", "mtp_draft_device_pools"),
    ),
    Seam(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.init_load_back",
        ("self", "params"),
    ),
    Seam(
        "sglang.srt.mem_cache.unified_cache.components.mamba.MambaComponent.finalize_match_result_in_cache",
        ("self", "params", "result"),
        hooked=False,
    ),
    Seam(
        f"{_STATES}.__init__",
        (
            *("self", "buffer_info", "host_to_device_ratio", "host_size", "device_capacity", "pin_memory"),
            *("allocator_type", "layout", "mtp_draft_buffer_infos"),
        ),
        hooked=False,
    ),
    *(
        Seam(f"{_STATES}.{name}", ("self", *parameters), hooked=False)
        for name, parameters in {
            "_configure_npu_mamba_io": (),
            "_init_write_back_staging_buffers": (),
            "alloc": ("need_size",),
            "clear": (),
            "free": ("indices",),
            "get_data_page": ("index", "flat"),
            "get_dummy_flat_data_page": (),
            "get_hybrid_pool_buffer": (),
            "get_page_buffer_meta": ("indices",),
            "get_size_per_token": (),
            "init_kv_buffer": (),
            "is_stride_page_aligned": ("page_size_bytes",),
            "set_from_flat_data_page": ("index", "data_page"),
        }.items()
    ),
    Seam(
        f"{_STATES}.load_to_device_per_layer",
        ("self", "device_pool", "host_indices", "device_indices", "layer_id", "io_backend", "is_draft"),
        hooked=False,
    ),
    Seam(
        f"{_STATES}.backup_from_device_all_layer",
        ("self", "device_pool", "host_indices", "device_indices", "io_backend"),
        hooked=False,
    ),
    # Of the store that is attached, which may be of any class.
    Seam(f"{_STORE}.batch_get_v2", ("self", "transfers", "extra_info"), hooked=False),
    Seam(f"{_STORE}.batch_set_v2", ("self", "transfers", "extra_info"), hooked=False),
)

#: Used in schedulers for `--disaggregation-mode`; those that are hooked in this order.
DISAGGREGATION = (
    Seam(
        "sglang.srt.disaggregation.common.conn.CommonKVManager.__init__",
        ("self", "args", "disaggregation_mode", "server_args", "is_mla_backend"),
    ),
    Seam(
        "sglang.srt.disaggregation.common.conn.CommonKVManager.try_ensure_parallel_info",
        ("self", "bootstrap_addr"),
    ),
    Seam(
        "sglang.srt.disaggregation.base.conn.KVArgs.__annotations__",
        hooked=False,
        members=("kv_cache_dtype_str", "kv_data_ptrs", "kv_item_lens", "num_draft_entries"),
    ),
    Seam("sglang.srt.runtime_context.get_parallel", hooked=False),
)

_DEEPSEEK = "sglang.srt.models.deepseek_common"
_DRAFTS = "sglang.srt.speculative.draft_utils.DraftBackendFactory"

#: Used in schedulers for attention.
ATTENTION = (
    Seam(
        f"{_DRAFTS}._create_backend",
        ("self", "backend_name", "backend_map", "error_template", "stamps_children"),
    ),
    Seam(
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
        ("runner", "full_attn_backend"),
    ),
    Seam(f"{_DRAFTS}.create_decode_backend", ("self",), hooked=False),
    Seam(f"{_DRAFTS}.create_draft_extend_backend", ("self",), hooked=False),
    Seam(
        "sglang.srt.layers.attention.attention_registry.register_attention_backend",
        ("name",),
        hooked=False,
    ),
    Seam(
        "sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS",
        hooked=False,
        added=(KVPOOL_BACKEND,),
    ),
    Seam(
        f"{_DEEPSEEK}.attention_backend_handler.AttentionBackendRegistry.register",
        ("backend_name", "handler_func"),
        hooked=False,
    ),
    Seam(
        f"{_DEEPSEEK}.attention_backend_handler.AttentionBackendRegistry._handlers",
        hooked=False,
        members=("flashinfer",),
        added=(KVPOOL_BACKEND,),
    ),
    Seam(
        f"{_DEEPSEEK}.attention_backend_handler._handle_attention_backend",
        ("attn", "forward_batch", "backend_name"),
        hooked=False,
    ),
    Seam(
        f"{_DEEPSEEK}.attention_backend_handler.MHA_ONE_SHOT_SUPPORTED_BACKENDS",
        hooked=False,
        members=("flashinfer",),
    ),
    Seam(
        f"{_DEEPSEEK}.utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS",
        hooked=False,
        members=("flashinfer",),
        added=(KVPOOL_BACKEND,),
    ),
    Seam(
        "sglang.srt.arg_groups.choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS",
        hooked=False,
        members=("flashinfer",),
        added=(KVPOOL_BACKEND,),
    ),
)

_DSA = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"

#: Used in schedulers for models with sparse attention; those that are hooked in this order.
SPARSE_ATTENTION = (
    Seam(f"{_DSA}.__init__", ("self", "model_runner")),
    Seam(f"{_DSA}.set_dsa_prefill_impl", ("self", "forward_batch")),
    Seam(f"{_DSA}.get_topk_transform_method", ("self", "forward_mode")),
    Seam(
        f"{_DSA}._forward_flashmla_sparse",
        (
            *("self", "q_all", "kv_cache", "v_head_dim", "page_table_1", "sm_scale", "topk_length"),
            "attn_sink",
        ),
    ),
    Seam(
        "sglang.kernels.ops.attention.dsa.dequant_k_cache.dequantize_k_cache_paged_dsa",
        ("quant_k_cache", "page_table_1_flattened"),
    ),
    Seam(
        "sglang.srt.layers.attention.dsa.dsa_topk_backend.TopkTransformMethod.__members__",
        hooked=False,
        members=("PAGED", "RAGGED"),
    ),
    # `IntEnum` members by their names, which the table knows.
    Seam(
        "sglang.srt.model_executor.forward_batch_info.ForwardMode.__members__",
        hooked=False,
        members=(*EXTEND_MODES, *DECODE_MODES, *IDLE_MODES),
    ),
    Seam("sglang.srt.model_executor.forward_context.get_token_to_kv_pool", hooked=False),
    Seam("sglang.srt.configs.model_config.get_dsa_index_topk", ("config",), hooked=False),
    Seam("sglang.srt.runtime_context.get_buffer", ("name", "factory"), hooked=False),
)

_HYBRID_POOL = "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool"
_DSA_POOL = "sglang.srt.mem_cache.memory_pool.DSATokenToKVPool"

#: Used in the scheduler processes of such a server.
SCHEDULER = (
    Seam(f"{_KVC}._resolve_kv_pool_class", ("self", "kind", "default")),
    Seam(
        f"{_KVC}._build_hybrid_linear_kv_pool",
        (
            *("self", "max_total_num_tokens", "req_to_token_pool", "mha_pool_class", "mla_pool_class"),
            "dsa_pool_class",
        ),
    ),
    # What that one constructs, by its global name.
    Seam("sglang.srt.mem_cache.kv_cache_configurator.HybridLinearKVPool", hooked=False),
    Seam(
        f"{_HYBRID_POOL}.__init__",
        (
            *("self", "full_attention_layer_ids", "mamba_pool", "use_mla", "use_dsa", "full_kv_pool_class"),
            "full_kv_pool",
        ),
        hooked=False,
    ),
    Seam(
        f"{_HYBRID_POOL}.set_kv_buffer",
        ("self", "layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale", "dcp_kv_mask"),
        hooked=False,
    ),
    Seam(f"{_HYBRID_POOL}._transfer_full_attention_id", ("self", "layer_id"), hooked=False),
    Seam(f"{_HYBRID_POOL}._transfer_id_context", ("self", "layer"), hooked=False),
    Seam(f"{_HYBRID_POOL}._wait_for_layer", ("self", "layer_id"), hooked=False),
    Seam(f"{_KVC}._build_token_to_kv_pool", ("self", "sizes")),
    Seam(f"{_SIZES}._compute_cell_size", ("self", "kvc", "num_layers")),
    Seam(f"{_SIZES}.__init__", ("self", "kvc")),
    # SGLang's Rust server describes itself from inside a scheduler.
    Seam("sglang.srt.utils.common.build_server_info", ("server_args", "scheduler_info")),
    Seam(
        "sglang.srt.mem_cache.kv_cache_configurator.calculate_mla_kv_cache_dim",
        ("model_config", "kv_cache_dtype"),
        hooked=False,
    ),
    Seam("sglang.srt.runtime_context.attention_backends", hooked=False),
    Seam("sglang.srt.runtime_context.get_spec", hooked=False),
    Seam(
        f"{_POOL}.__init__",
        (
            *("self", "size", "page_size", "dtype", "kv_lora_rank", "qk_rope_head_dim", "layer_num"),
            *("device", "enable_memory_saver", "start_layer", "end_layer", "use_dsa"),
        ),
        hooked=False,
    ),
    Seam(f"{_POOL}._create_buffers", ("self",), hooked=False),
    Seam(
        f"{_POOL}.set_kv_buffer",
        ("self", "layer", "loc_info", "cache_k", "cache_v", "layer_id_override"),
        hooked=False,
    ),
    Seam(
        f"{_POOL}.set_mla_kv_buffer",
        ("self", "layer", "loc_info", "cache_k_nope", "cache_k_rope", "layer_id_override"),
        hooked=False,
    ),
    Seam(f"{_POOL}.get_mla_kv_buffer", ("self", "layer", "loc", "dst_dtype"), hooked=False),
    *HOST_TIER,
    *STATE_TIER,
    *DISAGGREGATION,
    *ATTENTION,
    *SPARSE_ATTENTION,
    Seam(f"{_DSA_POOL}.__init__", ("self", "size", "kv_cache_dim", "index_kpool"), hooked=False),
    Seam("sglang.srt.mem_cache.memory_pool.KVWriteLoc.for_batch", ("forward_batch",), hooked=False),
    Seam(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward_extend",
        ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
        hooked=False,
    ),
)
