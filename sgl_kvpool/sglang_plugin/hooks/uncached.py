"""Hooks of a host tier: pages that are not backed up are counted, and a new store gets the older pages.

Also, the events of a host tier go on while a server is paused.
"""

from typing import Any
from weakref import WeakKeyDictionary

from sgl_kvpool import metrics
from sgl_kvpool.sglang_plugin.registry import around, uses

#: Nodes of a tree that were given to the store since it was attached at run time; absent for other trees.
#: The pages that the tier has when a store is attached are not in the store.
STORED: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()
#: Most nodes in such a set, 10 MB. A node that is forgotten is given to the store again, which has its pages.
_MOST_STORED = 1 << 17

_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

uses(f"{_TREE}.is_backuped", "host tier", takes=("self", "node_id"))
uses(f"{_SCHEDULER}._process_hicache_events", "host tier", takes=("self", "should_retry_storage_prefetch"))


@around(f"{_TREE}._execute_kv_backup", "host tier")
def _execute_kv_backup(original, self, node_id, device_value, comp_xfers, sidecar_xfers):
    """Count the pages of a node that is not backed up for want of room in the tier."""
    found = original(self, node_id, device_value, comp_xfers, sidecar_xfers)
    if found is not None:
        return found
    tokens, pools = len(device_value), self.cache_controller.mem_pool_host
    room, most = pools.available_size(), pools.logical_size
    pages = -(-tokens // self.page_size)
    if tokens > most:
        metrics.uncached("prompt_too_long", pages, f"{tokens} tokens, and the tier has {most}")
    elif tokens > room:
        metrics.uncached("tier_full", pages, f"{tokens} tokens of a prompt, {room} of {most} are free")
    elif comp_xfers:  # states; rows and index keys were refused by `HybridCacheController.write`, a failure
        metrics.uncached("tier_full", pages, f"the state of {tokens} tokens of a prompt")
    return None


@around(f"{_TREE}.write_backup_storage", "host tier", repairs="since #35269; none reported")
def _write_backup_storage(original, self, node_id):
    """Before a node's pages, store those of its prefix that were backed up before the store was attached.

    Without them the store could not be searched up to the node: SGLang stores a node once, when its backup
    has ended.
    """
    stored = STORED.get(self)
    if stored is not None:
        if len(stored) > _MOST_STORED:
            stored.clear()
        (path,) = self.tree_core.collect_path_info([node_id])
        older = [node.node_id for node in path[:-1] if node.node_id not in stored]
        if older:
            # SGLang stores these when their backups have ended.
            pending = {one for w in self.ongoing_write_through.values() for one in w.publish_node_ids}
            for one in older:
                if one not in pending and self.is_backuped(one):
                    original(self, one)
        stored.update(older, (node_id,))
    return original(self, node_id)


@around(f"{_SCHEDULER}._record_scheduler_state_for_paused_engine", "host tier", repairs="none reported")
def _record_scheduler_state_for_paused_engine(original, self):
    """Also process the tier's events, for which SGLang's loop has no turn while the server is paused.

    Backups and calls of a store that had not ended would keep the server from being idle, and /flush_cache
    failing, until it continues. All ranks of a tree come here in the same turn of their loops; the loop of
    pipeline stages does not pause.
    """
    self._process_hicache_events(should_retry_storage_prefetch=False)
    return original(self)
