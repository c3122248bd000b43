"""Ranks that schedule the same requests agree on host tier misses: a miss on one is a miss on all.

Ranks that share a tier also agree which rank owns which page, before a copy is submitted. They compare a
digest in the all-reduce that SGLang's tree runs in every step, where SGLang compares a digest of its own. So
backups are submitted after that all-reduce; SGLang submits them before it, and after a batch.
"""

from functools import partial
from typing import Any

from sgl_kvpool.sglang_plugin.hooks import uncached
from sgl_kvpool.sglang_plugin.registry import around, uses
from sgl_kvpool.sglang_plugin.rules.host_sharing import write_policy_problem
from sgl_kvpool.srt.host.tier_bytes import holds_our_rows

_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"

# The groups over which `srt.host.agreement` reduces.
uses(
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController.__init__",
    "host tier",
    takes=("self", "tp_group", "attn_cp_group", "attn_tp_group", "pp_group"),
)
uses(f"{_TREE}._all_reduce_attn_groups", "host tier", takes=("self", "tensor", "op"))


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
