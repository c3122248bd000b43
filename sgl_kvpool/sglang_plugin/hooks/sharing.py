"""Hooks of ranks that share a host tier: no copy is submitted before they agree which rank owns which page.

The ranks compare a digest in the all-reduce that SGLang's tree runs in every step, where SGLang compares a
digest of its own. So backups are submitted after that all-reduce; SGLang submits them before it, and after a
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from sgl_kvpool.sglang_plugin import hook_points
from sgl_kvpool.sglang_plugin.hooks.stores import is_ours
from sgl_kvpool.sglang_plugin.rules.host_sharing import write_policy_problem
from sgl_kvpool.transfer.host_options import NODE

__all__ = ["install", "sharing_ranks"]


def install() -> None:
    """Apply the hooks."""
    hook_points.wrap_all(HOOKS)


def sharing_ranks(options: Any) -> Any:
    """`NodeRanks` of this process where the ranks of a machine share a host tier; None where they do not.

    Parameters
    ----------
    options : HostTierOptions
    """
    if options.sharing != NODE:
        return None
    from sglang.srt.runtime_context import get_parallel

    from sgl_kvpool.srt.host.node_ranks import NodeRanks

    return NodeRanks.of(get_parallel().attn_tp_group.cpu_group)


def _shared_tier(tree: Any) -> Any:
    """`SharedTier` of a tree's rows; None if each rank has its own tier, or if the tier is SGLang's."""
    controller = tree.cache_controller
    if controller is None or tree.linker is not None:
        return None
    pool = controller.mem_pool_host.anchor_entry.host_pool
    return pool.shared if is_ours(pool) else None


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


def _all_reduce(original, self, data, tp_reduce_op):
    """Add the digest to the first all-reduce of a step, which takes the minimum of finished transfers."""
    shared = _shared_tier(self)
    if shared is None or not shared.has_to_compare:
        return original(self, data, tp_reduce_op)
    return shared.compare_in(data, partial(original, self, tp_reduce_op=tp_reduce_op))


def _flush_pending_backups(original, self):
    """Submit queued backups if the ranks have agreed in this step; otherwise the backups stay queued."""
    shared = _shared_tier(self)
    return original(self) if shared is None or shared.may_submit else None


def _attach_storage_backend(original, self, *args, hicache_write_policy=None, **kwargs):
    """Refuse write_back: a request to attach a store may name a write policy, even if a store is attached."""
    if _shared_tier(self) is not None:
        problem = write_policy_problem(hicache_write_policy)
        if problem is not None:
            return False, problem
    return original(self, *args, hicache_write_policy=hicache_write_policy, **kwargs)


_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"

#: Function of SGLang -> hook around it.
HOOKS: Mapping[str, Callable] = {
    f"{_TREE}.check_hicache_events": _check_hicache_events,
    f"{_TREE}._all_reduce": _all_reduce,
    f"{_TREE}.flush_pending_backups": _flush_pending_backups,
    f"{_TREE}.attach_storage_backend": _attach_storage_backend,
}
