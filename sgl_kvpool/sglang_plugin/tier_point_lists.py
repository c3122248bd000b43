"""Hook points of host tiers and of transfers to other servers; see :mod:`.point_lists`."""

from __future__ import annotations

from sgl_kvpool.sglang_plugin.hook_points import HookPoint

__all__ = ["DISAGGREGATION", "DISAGGREGATION_ON_CPU", "HOST_TIER", "STATE_TIER"]

_HICACHE = "sglang.srt.mem_cache.hybrid_cache"
_HOST_POOL = "sglang.srt.mem_cache.pool_host.mla.MLATokenToKVPoolHost"

#: Hook points of a host tier.
HOST_TIER = (
    HookPoint(
        f"{_HICACHE}.hybrid_pool_assembler.build_kv_host_pool",
        ("kv_pool", "page_size", "host_size", "mtp_draft_device_pools", "pool_label"),
    ),
    HookPoint(
        f"{_HICACHE}.hybrid_pool_assembler._build_mha_mla_host_pool",
        (
            *("pool", "host_to_device_ratio", "page_size", "layout", "allocator_type", "pool_label"),
            "host_token_capacity",
        ),
    ),
    HookPoint(
        "sglang.srt.managers.cache_controller.HiCacheController.attach_storage_backend",
        ("self", "storage_backend", "prefetch_threshold", "model_name"),
    ),
    HookPoint(
        f"{_HICACHE}.hybrid_cache_controller.HybridCacheController.load",
        ("self", "host_indices", "priority", "node_id", "extra_pools", "device_indices"),
    ),
    HookPoint(
        f"{_HICACHE}.hybrid_cache_controller.HybridCacheController.write",
        ("self", "device_indices", "priority", "node_id", "extra_pools"),
    ),
    HookPoint(
        f"{_HICACHE}.hybrid_cache_controller.HybridCacheController._move_pool_indices",
        ("self", "host_pool", "host_indices", "device_indices", "write_back_jit"),
    ),
    HookPoint(
        "sglang.srt.managers.cache_controller.HiCacheController.move_indices",
        ("self", "host_indices", "device_indices"),
    ),
    HookPoint(
        "sglang.srt.managers.cache_controller.HiCacheController._generic_page_get",
        ("self", "operation", "hash_values", "host_indices", "extra_info"),
    ),
    HookPoint(
        "sglang.srt.managers.cache_controller.HiCacheController._generic_page_set",
        ("self", "hash_values", "host_indices", "extra_info"),
    ),
    HookPoint(
        "sglang.srt.managers.cache_controller.HiCacheController._page_get_zero_copy",
        ("self", "operation", "hash_values", "host_indices", "extra_info"),
    ),
    HookPoint(
        "sglang.srt.managers.cache_controller.HiCacheController._page_set_zero_copy",
        ("self", "hash_values", "host_indices", "extra_info"),
    ),
    # `hooks.ranks` reduces over the process groups that this method is given.
    HookPoint(
        f"{_HICACHE}.hybrid_cache_controller.HybridCacheController.__init__",
        ("self", "tp_group", "attn_cp_group", "attn_tp_group", "pp_group"),
        hooked=False,
    ),
    HookPoint("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.check_hicache_events", ("self",)),
    HookPoint(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._all_reduce",
        ("self", "data", "tp_reduce_op"),
    ),
    HookPoint("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.flush_pending_backups", ("self",)),
    HookPoint(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.attach_storage_backend",
        ("self", "storage_backend", "hicache_write_policy"),
    ),
    HookPoint(
        "sglang.srt.mem_cache.pool_host.base.host_memory_budget_bytes", ("requested_bytes",), hooked=False
    ),
    HookPoint(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._all_reduce_attn_groups",
        ("self", "tensor", "op"),
        hooked=False,
    ),
    HookPoint(
        f"{_HOST_POOL}.__init__",
        (
            *("self", "buffer_info", "host_to_device_ratio", "host_size", "page_size", "layout"),
            *("pin_memory", "allocator_type", "override_kv_cache_dim", "draft_buffer_infos"),
            *("device_capacity_tokens", "start_layer", "end_layer", "target_layer_num"),
            *("pool_label", "host_token_capacity"),
        ),
        hooked=False,
    ),
    HookPoint(
        f"{_HOST_POOL}.load_to_device_per_layer",
        ("self", "device_pool", "host_indices", "device_indices", "layer_id", "io_backend", "is_draft"),
        hooked=False,
    ),
    HookPoint(
        f"{_HOST_POOL}.backup_from_device_all_layer",
        ("self", "device_pool", "host_indices", "device_indices", "io_backend"),
        hooked=False,
    ),
    *(
        HookPoint(f"{_HOST_POOL}.{name}", ("self", *parameters), hooked=False)
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
            "is_stride_page_aligned": ("page_size_bytes",),
            "set_from_flat_data_page": ("index", "data_page"),
        }.items()
    ),
    HookPoint(
        "sglang.srt.mem_cache.utils.get_storage_hash_str", ("key", "prior_hash", "page_size"), hooked=False
    ),
)

_STATES = "sglang.srt.mem_cache.pool_host.mamba.MambaPoolHost"
_STORE = "sglang.srt.mem_cache.hicache_storage.HiCacheStorage"

#: Hook points of a host tier for the states of a hybrid model.
STATE_TIER = (
    HookPoint(
        f"{_HICACHE}.hybrid_pool_assembler.build_hybrid_mamba_stack",
        ("params", "decls", "mamba_pool"),
    ),
    HookPoint(f"{_HICACHE}.hybrid_pool_assembler._split_hicache_size", ("hicache_size", "kv_pools")),
    HookPoint(
        f"{_HICACHE}.hybrid_pool_assembler.build_mamba_host_pool",
        ("mamba_pool", "pool_info", "host_size", "layout", "mtp_draft_device_pools"),
    ),
    HookPoint(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.init_load_back",
        ("self", "params"),
    ),
    HookPoint(
        "sglang.srt.mem_cache.unified_cache.components.mamba.MambaComponent.finalize_match_result_in_cache",
        ("self", "params", "result"),
        hooked=False,
    ),
    HookPoint(
        f"{_STATES}.__init__",
        (
            *("self", "buffer_info", "host_to_device_ratio", "host_size", "device_capacity", "pin_memory"),
            *("allocator_type", "layout", "mtp_draft_buffer_infos"),
        ),
        hooked=False,
    ),
    *(
        HookPoint(f"{_STATES}.{name}", ("self", *parameters), hooked=False)
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
    HookPoint(
        f"{_STATES}.load_to_device_per_layer",
        ("self", "device_pool", "host_indices", "device_indices", "layer_id", "io_backend", "is_draft"),
        hooked=False,
    ),
    HookPoint(
        f"{_STATES}.backup_from_device_all_layer",
        ("self", "device_pool", "host_indices", "device_indices", "io_backend"),
        hooked=False,
    ),
    # Methods of the attached store, which may be of any class.
    HookPoint(f"{_STORE}.batch_get_v2", ("self", "transfers", "extra_info"), hooked=False),
    HookPoint(f"{_STORE}.batch_set_v2", ("self", "transfers", "extra_info"), hooked=False),
)

#: Hook points of `--disaggregation-mode`.
DISAGGREGATION = (
    HookPoint(
        "sglang.srt.disaggregation.common.conn.CommonKVManager.__init__",
        ("self", "args", "disaggregation_mode", "server_args", "is_mla_backend"),
    ),
    HookPoint(
        "sglang.srt.disaggregation.common.conn.CommonKVManager.try_ensure_parallel_info",
        ("self", "bootstrap_addr"),
    ),
    HookPoint(
        "sglang.srt.disaggregation.decode.DecodePreallocQueue._ensure_prefill_info", ("self", "addr_to_reqs")
    ),
    HookPoint(
        "sglang.srt.disaggregation.common.conn.CommonKVManager.record_failure",
        ("self", "bootstrap_room", "failure_reason"),
        hooked=False,
    ),
    HookPoint("sglang.srt.disaggregation.common.conn.CommonKVReceiver.abort", ("self",), hooked=False),
    HookPoint(
        "sglang.srt.disaggregation.common.conn.CommonKVReceiver._send_abort_notification",
        ("self", "force_arm"),
        hooked=False,
    ),
    HookPoint(
        "sglang.srt.disaggregation.common.conn.CommonKVReceiver._get_bootstrap_info_from_server",
        ("self", "prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"),
        hooked=False,
    ),
    HookPoint(
        "sglang.srt.disaggregation.common.conn.PrefillServerInfo.__annotations__",
        hooked=False,
        members=("attn_cp_size", "attn_tp_size", "dp_size", "kv_cache_dtype", "pp_size"),
    ),
    HookPoint(
        "sglang.srt.disaggregation.base.conn.KVArgs.__annotations__",
        hooked=False,
        members=("kv_cache_dtype_str", "kv_data_ptrs", "kv_item_lens", "num_draft_entries"),
    ),
)

#: Hook points of prefill and decode servers on a CPU, by transfer backend.
DISAGGREGATION_ON_CPU = {
    "mooncake": (
        HookPoint(
            "sglang.srt.disaggregation.mooncake.conn.MooncakeKVSender.supports_host_tensor_indices",
            hooked=False,
        ),
    ),
    "nixl": (
        HookPoint(
            "sglang.srt.disaggregation.nixl.conn._normalize_kv_mem_kinds",
            ("kinds", "expected_len"),
            hooked=False,
        ),
    ),
}
