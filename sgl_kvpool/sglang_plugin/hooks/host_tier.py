"""Hooks of a scheduler with `--enable-hierarchical-cache`: our host pool, and transfers that may fail."""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sgl_kvpool import metrics
from sgl_kvpool.refusal import Refusal, Way
from sgl_kvpool.sglang_plugin.hooks import state_tier, weights
from sgl_kvpool.sglang_plugin.options import HOST_SHARING, config_of, record
from sgl_kvpool.sglang_plugin.registry import around, uses
from sgl_kvpool.srt.host import agreement, state_transfers, tier_bytes
from sgl_kvpool.srt.host.memory import require_room, warn_of_small_tier
from sgl_kvpool.srt.host.store_calls import wrap_calls
from sgl_kvpool.srt.host.tier_bytes import holds_our_rows
from sgl_kvpool.transfer.host_options import NODE, RANK
from sgl_kvpool.transfer.store_folders import FILE_STORES

logger = logging.getLogger(__name__)

#: Longest file name of the file systems that SGLang's stores of files are used on.
_NAME_BYTES = 255
#: Bytes of a file name besides the model's: a SHA-256 in hex, "_" and ".bin"; what tells pools apart, and
#: ranks, at most.
_KEY_BYTES, _POOL_BYTES, _RANK_BYTES = 64 + 1 + 4, 19, 27
#: Prefix of the format tag of rows in SGLang's own host pool, whose pages differ from ours.
_STOCK_TIER = "sglang-"

_ASSEMBLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler"
_HYBRID_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"

uses("sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.get_device_pool_infos", "host tier", takes=("self",))
uses("sglang.srt.mem_cache.pool_host.base.host_memory_budget_bytes", "host tier", takes=("requested_bytes",))
uses(
    "sglang.srt.mem_cache.pool_host.mla.MLATokenToKVPoolHost.__init__",
    "host tier",
    takes=(
        *("self", "buffer_info", "host_to_device_ratio", "host_size", "page_size", "layout"),
        *("pin_memory", "allocator_type", "override_kv_cache_dim", "draft_buffer_infos"),
        *("dcp_size", "dcp_rank"),
        *("device_capacity_tokens", "start_layer", "end_layer", "target_layer_num"),
        *("pool_label", "host_token_capacity"),
    ),
)
uses("sglang.srt.mem_cache.utils.get_storage_hash_str", "host tier", takes=("key", "prior_hash", "page_size"))


@around("sglang.srt.mem_cache.hicache_auto_size._estimate_hicache_bytes", "host tier")
def _estimate_hicache_bytes(original, params, draft_plan):
    """Bytes of the host pools at a ratio of 1, by which SGLang lowers the default ratio until they fit.

    SGLang counts the device's bytes. A narrower host layout has more tokens for the same bytes of rows, and
    index keys and a draft's own tier get a slot for each.
    """
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    if not tier_bytes.has_our_tier(getattr(pool, "full_kv_pool", pool)):
        return original(params, draft_plan)
    own_drafts = draft_plan is not None and draft_plan.mode == "sidecar"
    return tier_bytes.TierBytes.of(
        pool,
        getattr(params.req_to_token_pool, "mamba_pool", None),
        params.mtp_draft_device_pools,
        params.mtp_draft_mamba_pools,
        draft_plan.device_pools if own_drafts else (),
    ).at_ratio_one


@around(
    f"{_ASSEMBLER}.build_kv_host_pool",
    "host tier",
    reads=("page_size", "host_size", "mtp_draft_device_pools", "pool_label"),
)
def _build_kv_host_pool(original, *, kv_pool, **kwargs):
    """The host pool of a target, with the drafts that are packed with it."""
    from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool

    if not tier_bytes.has_our_tier(kv_pool):
        tier = original(kv_pool=kv_pool, **kwargs)
        _name_rows(tier, (kv_pool, *kwargs.get("mtp_draft_device_pools", ())))
        warn_of_small_tier(tier, tier_bytes.capacity(kv_pool))
        return tier
    from sglang.srt.mem_cache.pool_host.common import get_allocator_type
    from sglang.srt.runtime_context import get_memory, get_parallel, get_server_args

    from sgl_kvpool.srt.host.shared_segment import SharingRefused

    memory, host_size = get_memory(), kwargs.get("host_size")

    def build(node_ranks: Any) -> HierarchicalMLAHostPool:
        return HierarchicalMLAHostPool(
            kv_pool,
            memory.hicache_ratio,
            memory.hicache_size if host_size is None else host_size,
            kwargs["page_size"],
            memory.hicache_mem_layout,
            draft_pools=kwargs.get("mtp_draft_device_pools", ()),
            # A shared tier does not use the store's allocator. With "default", a store that needs memory of
            # its own allocator refuses this pool.
            allocator_type=get_allocator_type() if node_ranks is None else "default",
            pool_label=kwargs.get("pool_label", "kv"),
            node_ranks=node_ranks,
        )

    try:
        tier = build(agreement.sharing_ranks(kv_pool.host_tier))
    except SharingRefused as refused:  # on all ranks
        if not kv_pool.host_tier.may_unshare:
            raise
        if get_parallel().attn_tp_rank == 0:
            logger.warning("sgl-kvpool: each rank gets a host tier of its own: %s", refused)
        record(get_server_args(), host_tier=replace(kv_pool.host_tier, sharing=RANK))  # what is in use
        tier = build(None)
    state_tier.row_tier_built(tier)
    warn_of_small_tier(tier, tier_bytes.capacity(kv_pool))
    return tier


def _name_rows(tier: Any, pools: Sequence[Any]) -> None:
    """Name the rows of SGLang's own host pool in the keys of stores.

    SGLang's keys do not name the row format, and its `file` store accepts a longer file as a page: a server
    with shorter rows would read pages of other rows under the same model name. Rows in SGLang's own format
    get no tag, since servers without the plugin store the same bytes.
    """
    from sgl_kvpool.srt.pool.mla import LayoutMLATokenToKVPool

    target = pools[0]
    if isinstance(target, LayoutMLATokenToKVPool) and not target.kv_cache_layout.is_sglang_native:
        from sgl_kvpool.srt.host.storage_mixin import storage_format_tag

        tier.storage_format_tag = f"{_STOCK_TIER}{storage_format_tag(pools, tier.page_size)}"


@around("sglang.srt.managers.scheduler.Scheduler.get_init_info", "host tier")
def _get_init_info(original, self):
    """Report whether ranks share the host tier."""
    return {**original(self), HOST_SHARING.name: config_of(self.server_args).host_tier.sharing}


@around("sglang.srt.managers.data_parallel_controller.DataParallelController.get_init_info", "host tier")
def _get_init_info_of_replicas(original, self):
    """Pass on whether ranks share host tiers."""
    found = {info[HOST_SHARING.name] for info in self._scheduler_init_infos}
    return {**original(self), HOST_SHARING.name: RANK if RANK in found else NODE}


@around(
    f"{_ASSEMBLER}._build_mha_mla_host_pool",
    "host tier",
    reads=(
        *("host_to_device_ratio", "page_size", "layout", "allocator_type", "pool_label"),
        "host_token_capacity",
    ),
)
def _build_mha_mla_host_pool(original, *, pool, **kwargs):
    """The host pool of a draft that is not packed with its target."""
    from sglang.srt.runtime_context import get_server_args

    from sgl_kvpool.srt.host.rows import HierarchicalMLAHostPool

    if config_of(get_server_args()).host_tier.sharing == NODE:
        # The launcher chooses sharing only beside drafts that are packed. SGLang would give this pool as many
        # tokens as the shared tier has, in the memory of each rank.
        raise Refusal(
            f"SGLang does not pack this draft with its target, and its own host pool does not work with "
            f"{HOST_SHARING.flag} {NODE}",
            Way(f"start the server with {HOST_SHARING.flag} {RANK}", add=(f"{HOST_SHARING.flag}={RANK}",)),
        )
    if not tier_bytes.has_our_tier(pool):
        tokens = kwargs.get("host_token_capacity")
        if tokens is not None:
            require_room(tokens * tier_bytes.own_draft_bytes(pool), tokens)
        return original(pool=pool, **kwargs)
    return HierarchicalMLAHostPool(pool, host_size=0, with_checksum=False, **kwargs)


@around(f"{_CONTROLLER}.attach_storage_backend", "host tier", reads=("prefetch_threshold",))
def _attach_storage_backend(original, self, storage_backend, *args, model_name=None, **kwargs):
    """Attach a store, check the states that it moves, time its calls, and let keys name the weights.

    Before, refuse a model name that is too long for file names, make the folders of files, warn about those
    that other accounts can reach, and compile SGLang's hash function.
    """
    from sglang.srt.runtime_context import get_parallel

    store: Any = FILE_STORES.get(storage_backend)
    folders = store.folders(kwargs.get("storage_backend_extra_config")) if store else []
    pool = self.storage_host_pool
    tag = pool.storage_format_tag or ""
    if holds_our_rows(pool) or tag.startswith(_STOCK_TIER):
        name_bytes = _KEY_BYTES + len(os.fsencode(f"{model_name}-{tag}"))
        if folders and name_bytes <= _NAME_BYTES:
            sizes, pools = get_parallel(), getattr(self.mem_pool_host, "entries", ())
            has_shards = sizes.pp_size * sizes.attn_cp_size * sizes.attn_dcp_size > 1
            name_bytes += _POOL_BYTES * (len(pools) > 1)
            name_bytes += _RANK_BYTES * (has_shards and storage_backend == "file")  # NIXL names no such ranks
        if folders and name_bytes > _NAME_BYTES:
            raise Refusal(
                f"--hicache-storage-backend {storage_backend} names its files after the model, and "
                f"{model_name!r} makes names of {name_bytes} bytes, {_NAME_BYTES} at most",
                "give a shorter --served-model-name",
            )
    for folder in folders:
        store.make_private(folder)
        if (warning := store.warning(folder)) is not None:
            logger.warning("sgl-kvpool: %s", warning)
    weights.attach()
    if holds_our_rows(pool):
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        # SGLang compiles this function at its first call, which takes 20 s on two cores, once per
        # environment. If its prefetch thread made that call, every prompt meanwhile would wait and miss.
        get_storage_hash_str(list(range(self.page_size)), None, page_size=self.page_size)
    result = original(self, storage_backend, *args, model_name=model_name, **kwargs)
    wrap_calls(self.storage_backend, state_transfers.store_calls(self) if holds_our_rows(pool) else {})
    return result


@around(f"{_HYBRID_CONTROLLER}.load", "host tier")
def _load(
    original,
    self,
    host_indices,
    priority=None,
    node_id=-1,
    extra_pools=None,
    *,
    device_indices=None,
    **kwargs,
):
    """Queue a load if its slot lists are valid; None is a miss for SGLang, which computes the tokens again.

    Rows and states of a hybrid model are loaded together or not at all, on all ranks or on none. After this
    call the tree treats the tokens as loaded, so no later step can refuse.
    """
    pool = self.mem_pool_host.anchor_entry.host_pool
    arguments = (host_indices, priority, node_id, extra_pools)
    if not holds_our_rows(pool):
        return original(self, *arguments, device_indices=device_indices, **kwargs)
    problem = pool.host_indices_problem(host_indices) or state_transfers.host_problem(self, extra_pools)
    for entry in self.mem_pool_host.entries:  # drafts, which load the target's slots too
        if entry.host_pool is not pool and holds_our_rows(entry.host_pool):
            problem = problem or entry.host_pool.host_indices_problem(host_indices, allocated_here=False)
    if problem is None and device_indices is not None:
        problem = pool.device_indices_problem(device_indices)
    problem = problem or state_transfers.device_problem(self, extra_pools)
    if agreement.load_is_miss(self, pool, host_indices, problem):
        return None
    queued = len(self.load_queue)
    found = original(self, *arguments, device_indices=device_indices, **kwargs)
    if found is None:
        return None
    problem = pool.device_indices_problem(found) or state_transfers.device_problem(self, extra_pools)
    if problem is not None:
        problem += ", from the allocator of the device pool"
    # No rank checks slot lists on a GPU (`device_indices_problem`), so there is nothing to agree on.
    if found.device.type == "cpu" and agreement.load_is_miss(self, pool, host_indices, problem):
        # SGLang's allocator returned slots that do not form pages of the pool, or the same slot twice. No
        # rank frees them: a second owner of a slot would read the first one's rows, and all ranks must keep
        # equally many free slots.
        del self.load_queue[queued:]
        return None
    state_transfers.join_states(self, self.load_queue[-1])
    return found


@around(f"{_HYBRID_CONTROLLER}.write", "host tier")
def _write(original, self, device_indices, priority=None, node_id=-1, extra_pools=None, **kwargs):
    """Queue a backup if the slot lists of rows and states are valid; None leaves the node not backed up."""
    pool = self.mem_pool_host.anchor_entry.host_pool
    if holds_our_rows(pool):
        problem = pool.device_indices_problem(device_indices) or state_transfers.device_problem(
            self, extra_pools
        )
        # Ranks that share a tier allocate its pages alike, so no rank may refuse alone. Slot lists on a GPU
        # are not checked, so no rank finds a problem in them.
        agrees = pool.shared is not None and device_indices.device.type == "cpu"
        if not (agreement.all_ranks(self, problem is None) if agrees else problem is None):
            metrics.failed("backup_pages", problem or "on another rank")
            return None
    return original(self, device_indices, priority, node_id, extra_pools, **kwargs)


@around(f"{_HYBRID_CONTROLLER}._move_pool_indices", "host tier")
def _move_pool_indices(original, self, host_pool, host_indices, device_indices, *, write_back_jit):
    """Put slot lists on the devices that our engines need; SGLang's backends need both on one device."""
    from sgl_kvpool.srt.host.transfer_mixin import TransferMixin

    if not isinstance(host_pool, TransferMixin):
        return original(self, host_pool, host_indices, device_indices, write_back_jit=write_back_jit)
    return host_pool.indices_for_transfer(host_indices, device_indices)


@around(f"{_CONTROLLER}.move_indices", "host tier")
def _move_indices(original, self, host_indices, device_indices):
    """`_move_pool_indices` for controllers of a single pool, with which decode servers offload."""
    if not holds_our_rows(self.mem_pool_host):
        return original(self, host_indices, device_indices)
    return self.mem_pool_host.indices_for_transfer(host_indices, device_indices)
