"""Ranks that schedule the same requests agree on host tier misses: a miss on one is a miss on all.

Ranks that share a tier also agree which rank owns which page, before a copy is submitted. They compare a
digest in the all-reduce that SGLang's tree runs in every step, where SGLang compares a digest of its own. So
backups are submitted after that all-reduce; SGLang submits them before it, and after a batch.
"""

from functools import partial
from typing import Any

from sgl_kvpool import metrics
from sgl_kvpool.sglang_plugin.hooks import uncached
from sgl_kvpool.sglang_plugin.hooks.stores import holds_our_rows
from sgl_kvpool.sglang_plugin.registry import around, uses
from sgl_kvpool.sglang_plugin.rules.host_sharing import write_policy_problem
from sgl_kvpool.srt.host.shared_tier import slots_digest
from sgl_kvpool.transfer.host_options import NODE

_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"

# The groups over which the ranks reduce.
uses(
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController.__init__",
    "host tier",
    takes=("self", "tp_group", "attn_cp_group", "attn_tp_group", "pp_group"),
)
uses(f"{_TREE}._all_reduce_attn_groups", "host tier", takes=("self", "tensor", "op"))


def load_is_miss(controller: Any, pool: Any, host_indices: Any, problem: str | None) -> bool:
    """Whether a load is a miss on any rank, which makes it a miss on all ranks; count the miss.

    Ranks that share a tier compare the slot lists too; if these differ, the tier ends on all ranks.

    A page may be lost in its backup on one rank only. If it were a miss there and a load on the others, the
    ranks would compute batches of different lengths from then on. So every rank calls this at every load,
    with the `problem` because of which it cannot load, if any. All ranks make the same loads: their trees
    match and evict alike, which SGLang relies on and can check (`rank_consensus` of `init_load_back`).

    RuntimeError for a miss with pipeline stages. Stages do not wait for each other when they schedule, so
    earlier stages already treat the tokens as loaded.
    """
    digest = 0 if pool.shared is None else slots_digest(host_indices.cpu().numpy())
    good, least, negative = _all_reduce_min(controller, int(problem is None), digest, -digest)
    if least != -negative:
        pool.shared.end_at_load(host_indices.cpu().numpy())
    elif good:
        return False
    if problem is None:
        metrics.failed("load_elsewhere", "see the log of that rank")
    else:
        metrics.failed("load_pages", problem)
    if _size(controller.pp_group) > 1:
        raise RuntimeError(
            f"a load from the host tier of sgl-kvpool is impossible ({problem or 'on another rank'}), and "
            "pipeline stages cannot agree on a miss; start the server again"
        )
    return True


def all_ranks(controller: Any, good: bool) -> bool:
    """Whether a condition is true on every rank that shares this tree."""
    return bool(*_all_reduce_min(controller, int(good)))


def _all_reduce_min(controller: Any, *values: int) -> list[int]:
    """The minimum of each value over the process groups in which SGLang's tree agrees on transfers.

    These are the gloo groups of `UnifiedRadixCache._all_reduce_attn_groups`: the ranks that schedule the same
    requests; with DP attention, other ranks have other requests. SGLang reduces over them in every step, on
    this thread.
    """
    import torch

    groups = [group for group in (controller.attn_cp_group, controller.attn_tp_group) if _size(group) > 1]
    if not groups and _size(controller.tp_group) > 1:
        groups = [controller.tp_group]
    if not groups:
        return list(values)
    least = torch.tensor(values, dtype=torch.int64)
    for group in groups:
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group)
    return least.tolist()


def _size(group: Any) -> int:
    import torch

    return 1 if group is None else torch.distributed.get_world_size(group=group)


def sharing_ranks(options: Any) -> Any:
    """`NodeRanks` of this process where the ranks of a machine share a host tier; None where they do not."""
    if options.sharing != NODE:
        return None
    from sglang.srt.runtime_context import get_parallel

    from sgl_kvpool.srt.host.shared_segment import NodeRanks

    return NodeRanks.of(get_parallel().attn_tp_group.cpu_group)


def _shared_tier(tree: Any) -> Any:
    """`SharedTier` of a tree's rows; None if each rank has its own tier, or if the tier is SGLang's."""
    controller = tree.cache_controller
    if controller is None or tree.linker is not None:
        return None
    pool = controller.mem_pool_host.anchor_entry.host_pool
    return pool.shared if holds_our_rows(pool) else None


@around(f"{_TREE}.check_hicache_events", "host tier")
def _check_hicache_events(original, self):
    """Submit backups once the ranks agree; SGLang calls this on every rank in every step."""
    shared = _shared_tier(self)
    if shared is None:
        return original(self)
    shared.begin_step()
    found = original(self)
    self.flush_pending_backups()
    shared.end_step()
    return found


@around(f"{_TREE}._all_reduce", "host tier")
def _all_reduce(original, self, data, tp_reduce_op):
    """Add the digest to the first all-reduce of a step, which takes the minimum of finished transfers."""
    shared = _shared_tier(self)
    if shared is None or not shared.has_to_compare:
        return original(self, data, tp_reduce_op)
    return shared.compare_in(data, partial(original, self, tp_reduce_op=tp_reduce_op))


@around(f"{_TREE}.flush_pending_backups", "host tier")
def _flush_pending_backups(original, self):
    """Submit queued backups if the ranks have agreed in this step; otherwise the backups stay queued."""
    shared = _shared_tier(self)
    return original(self) if shared is None or shared.may_submit else None


@around(f"{_TREE}.attach_storage_backend", "host tier", reads=("storage_backend",))
def _attach_storage_backend(original, self, *args, hicache_write_policy=None, **kwargs):
    """Refuse write_back: a request to attach a store may name a write policy, even if a store is attached."""
    if _shared_tier(self) is not None and (problem := write_policy_problem(hicache_write_policy)):
        return False, problem
    had_store = self.enable_storage
    found = original(self, *args, hicache_write_policy=hicache_write_policy, **kwargs)
    if found[0] and not had_store:
        uncached.STORED[self] = set()
    return found
