"""Hooks of a host tier for hybrid models: a prefix has both its rows and its states there, or neither."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from sgl_kvpool.sglang_plugin.registry import around, uses
from sgl_kvpool.srt.host.memory import HostTierTooLarge
from sgl_kvpool.srt.host.state_transfers import state_tier
from sgl_kvpool.srt.host.tier_bytes import TierBytes, has_our_tier, rows_declared

_GROUP = "host tier of hybrid models"
_ASSEMBLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler"
_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_STORE = "sglang.srt.mem_cache.hicache_storage.HiCacheStorage"

uses(f"{_TREE}.writing_check", _GROUP, takes=("self", "write_back"))
uses(f"{_TREE}.loading_check", _GROUP, takes=("self", "finish_count"))
uses(
    "sglang.srt.mem_cache.unified_cache.components.mamba.MambaComponent.finalize_match_result_in_cache",
    _GROUP,
    takes=("self", "params", "result"),
)
# Methods of the attached store, which may be of any class.
uses(f"{_STORE}.batch_get_v2", _GROUP, takes=("self", "transfers", "extra_info"))
uses(f"{_STORE}.batch_set_v2", _GROUP, takes=("self", "transfers", "extra_info"))
uses(
    "sglang.srt.mem_cache.pool_host.mamba.MambaPoolHost.__init__",
    _GROUP,
    takes=(
        *("self", "buffer_info", "host_to_device_ratio", "host_size", "device_capacity", "pin_memory"),
        *("allocator_type", "layout", "mtp_draft_buffer_infos"),
    ),
)


@dataclass
class _Stack:
    """A hybrid model's host tier while SGLang builds it around our rows."""

    tier_bytes: TierBytes
    options: Any
    #: Host pool of the rows, once it is built.
    row_tier: Any = None


_building: ContextVar[_Stack | None] = ContextVar("sgl_kvpool_hybrid_tier", default=None)


@around(f"{_ASSEMBLER}.build_hybrid_mamba_stack", _GROUP)
def _build_hybrid_mamba_stack(original, *, params, decls, mamba_pool, **kwargs):
    """Record the rows and states of the host pools that SGLang builds next, to split `--hicache-size`."""

    arguments = {"params": params, "decls": decls, "mamba_pool": mamba_pool, **kwargs}
    rows = rows_declared(decls)
    if not has_our_tier(rows):
        return original(**arguments)
    from sglang.srt.runtime_context import get_memory

    tier_bytes = TierBytes.of(rows, mamba_pool, params.mtp_draft_device_pools, params.mtp_draft_mamba_pools)
    token = _building.set(_Stack(tier_bytes, rows.host_tier))
    try:
        return original(**arguments)
    except HostTierTooLarge as error:
        memory = get_memory()
        row_gb, state_gb = tier_bytes.planned_gb(memory.hicache_ratio, memory.hicache_size)
        raise HostTierTooLarge(
            f"{error}. For this hybrid model the tier was divided into {row_gb:.2f} GB of rows and "
            f"{state_gb:.2f} GB of states of linear layers"
        ) from error
    finally:
        _building.reset(token)


@around(f"{_ASSEMBLER}._split_hicache_size", _GROUP)
def _split_hicache_size(original, hicache_size, kv_pools):
    """Split by bytes on the host; SGLang splits by bytes on the device, where rows may be wider."""
    stack = _building.get()
    return original(hicache_size, kv_pools) if stack is None else stack.tier_bytes.split(hicache_size)


def row_tier_built(tier: Any) -> None:
    """Record that the tier of the rows was built; the tiers of states built next belong to it."""
    stack = _building.get()
    if stack is not None:
        stack.row_tier = tier


@around(
    f"{_ASSEMBLER}.build_mamba_host_pool", _GROUP, reads=("host_size", "layout", "mtp_draft_device_pools")
)
def _build_mamba_host_pool(original, mamba_pool, pool_info, **kwargs):
    """Build our host pool of states if the host pool of the rows is ours."""
    stack = _building.get()
    if stack is None:
        return original(mamba_pool, pool_info, **kwargs)
    from sglang.srt.mem_cache.pool_host.common import get_allocator_type
    from sglang.srt.runtime_context import get_memory

    from sgl_kvpool.srt.host.states import HierarchicalStatePoolHost

    memory = get_memory()
    tier = HierarchicalStatePoolHost(
        mamba_pool,
        memory.hicache_ratio,
        kwargs["host_size"],
        kwargs["layout"],
        draft_pools=kwargs.get("mtp_draft_device_pools", ()),
        options=stack.options,
        allocator_type=get_allocator_type(),
    )
    # SGLang names stored pages, also those of states, by the tag of the rows only.
    stack.row_tier.storage_format_tag += f"-{tier.storage_format_tag}"
    return tier


@around(f"{_TREE}.init_load_back", _GROUP, repairs="#30986 mended a part")
def _init_load_back(original, self, params):
    """After a load that was a miss, give the request the state of the prefix from which it continues.

    Its rows are then those of the longest prefix on the device. SGLang has looked up a state at the longest
    prefix of all, which was on the host, so the request would start from an empty state.
    """
    found = original(self, params)
    controller, request = self.cache_controller, params.req
    if found is None or controller is None or state_tier(controller) is None:
        return found
    loaded, node = found
    if loaded or request.kv.holds_mamba or request.kv.mamba_cow_src_index is not None:
        return found
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    self.components[ComponentType.MAMBA].finalize_match_result_in_cache(
        MatchPrefixParams(key=None, cow_mamba=True, req=request),
        self.tree_core.empty_match_result._replace(best_match_node=node, last_device_node=node),
    )
    return found


@around(f"{_TREE}.evict_for_alloc", _GROUP, repairs="#36770, #40128, open")
def _evict_for_alloc(original, self, params, **kwargs):
    """Where too few states can be evicted, wait for the copies that lock states, then evict again.

    SGLang's admission does not count locked states, and it ends the scheduler where a slot is missing ("Can
    not alloc mamba cache"). Every rank evicts at the same point of its schedule (`rank_consensus`), so after
    the wait all ranks have finished the same copies.
    """
    if not params.mamba_num or self.cache_controller is None or self.buffer_pipeline is not None:
        return original(self, params, **kwargs)
    slots = self.req_to_token_pool.mamba_allocator
    wanted = slots.available_size() + params.mamba_num
    found = original(self, params, **kwargs)
    missing = wanted - slots.available_size()
    if missing > 0:
        self.writing_check(write_back=True)
        self.loading_check(finish_count=len(self.cache_controller.ack_load_queue))
        again = original(self, replace(params, num_tokens=0, mamba_num=missing), **kwargs)
        found.num_tokens_evicted += again.num_tokens_evicted
        found.mamba_num_evicted += again.mamba_num_evicted
    return found
