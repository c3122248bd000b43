"""SGLang's transfers of states: checked before a load or a backup, joined, and verified in a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sgl_kvpool import metrics
from sgl_kvpool.srt.host.page_format import failure_kind
from sgl_kvpool.srt.host.tier_bytes import holds_our_rows

if TYPE_CHECKING:
    from sgl_kvpool.srt.host.states import HierarchicalStatePoolHost


def state_tier(controller: Any) -> HierarchicalStatePoolHost | None:
    """Our host pool of states of a controller: the one of our pools that does not hold rows.

    The class is not imported, since its module needs SGLang's pool of states: models without states get here
    too.
    """
    from sgl_kvpool.srt.host.transfer_mixin import TransferMixin

    # A decode server that offloads has a single pool, not a group.
    pools = (entry.host_pool for entry in getattr(controller.mem_pool_host, "entries", ()))
    return next(
        (pool for pool in pools if isinstance(pool, TransferMixin) and not holds_our_rows(pool)), None
    )


def _of_states(controller: Any, transfers: Sequence[Any] | None) -> tuple[Any, list[Any]]:
    """Our host pool of states, if there is one, and the transfers that move its states."""
    tier, entries = state_tier(controller), getattr(controller.mem_pool_host, "entry_map", {})
    if tier is None:
        return None, []
    return tier, [t for t in transfers or () if entries[t.name].host_pool is tier]


def host_problem(controller: Any, transfers: Sequence[Any] | None) -> str | None:
    """Why the states of a load cannot be loaded; None if they can, or if the load has no states."""
    tier, ours = _of_states(controller, transfers)
    for transfer in ours:
        # A node's state is loaded into its own slot and into the request's: one host slot, in two transfers.
        if (problem := tier.host_indices_problem(transfer.host_indices)) is not None:
            return f"states: {problem}"
    return None


def device_problem(controller: Any, transfers: Sequence[Any] | None) -> str | None:
    """Why device slots of states are invalid or listed twice; None if they are valid or not known yet."""
    tier, ours = _of_states(controller, transfers)
    given = [t.device_indices for t in ours if t.device_indices is not None]
    problem = tier.device_indices_problem(torch.cat(given)) if given else None
    return None if problem is None else f"states: {problem}"


def join_states(controller: Any, operation: Any) -> None:
    """Join a load's transfers of states into one, so that engines go through its layers once.

    SGLang does the same where it joins loads. Its tree keeps the original transfers.
    """
    _, several = _of_states(controller, operation.pool_transfers)
    if len(several) < 2:
        return
    joined = replace(
        several[0],
        host_indices=torch.cat([t.host_indices for t in several]),
        device_indices=torch.cat([t.device_indices for t in several]),
    )
    others = [t for t in operation.pool_transfers if all(t is not one for one in several)]
    operation.pool_transfers = [*others, joined]


def store_calls(controller: Any) -> dict[str, Callable]:
    """Method of a store -> wrapper that checks the states which it reads or writes; see `wrap_calls`."""
    tier = state_tier(controller)
    return {} if tier is None else {method: partial(check, tier) for method, check in _STATE_CALLS.items()}


def _split_transfers(original: Callable, transfers: Sequence[Any], extra_info: Any) -> tuple:
    """Run the transfers that hold no states; return their results, and the transfers that do."""
    from sglang.srt.mem_cache.hicache_storage import PoolName

    ours = [t for t in transfers if t.name == PoolName.MAMBA and t.host_indices is not None]
    others = [t for t in transfers if all(t is not one for one in ours)]
    return (original(others, extra_info) if others else {}), ours


def _get_states(tier, original, transfers, extra_info=None):
    """Whether each state could be read. SGLang uses the rows of a prefix only together with its state."""
    results, ours = _split_transfers(original, transfers, extra_info)
    for transfer in ours:
        keys = transfer.keys or []
        try:
            with tier.stored_under(_keys_by_slot(transfer)):
                results |= original([transfer], extra_info)
        except Exception as error:  # any exception of a store makes this state a miss
            metrics.failed(failure_kind(error), f"state {', '.join(keys)} of the store", error=error)
            results[transfer.name] = [False] * len(keys)
            continue
        if not all(results[transfer.name]):
            metrics.failed("page_read", f"state {', '.join(keys)} of the store")
            continue
        # Stores that copy have verified the state already; it is hashed once more, in SGLang's thread for
        # stores. SGLang passes one state, of the last page of a prefix; if it passed several and one were
        # damaged, all would be misses.
        with tier.stored_under(_keys_by_slot(transfer)):
            damaged = tier.first_damaged(transfer.host_indices)
        if damaged is not None:
            metrics.failed("page_checksum", f"state {keys[damaged[0]]} of the store: {damaged[1]}")
            results[transfer.name] = [False] * len(keys)
    return results


def _keys_by_slot(transfer: Any) -> dict[int, str]:
    """Key of each host slot; ValueError unless there is one per slot, where SGLang's stores move nothing."""
    return dict(zip(transfer.host_indices.tolist(), transfer.keys or [], strict=True))


def _set_states(tier, original, transfers, extra_info=None):
    """Store states that were not lost in their backup; rows without states are stored and never matched."""
    results, ours = _split_transfers(original, transfers, extra_info)
    for transfer in ours:
        keys = transfer.keys or []
        none = [False] * len(keys)
        if tier.pages_before_a_lost_one(transfer.host_indices) < len(keys):
            metrics.failed("page_write", f"{len(keys)} states, which were lost in their backup")
            results[transfer.name] = none
            continue
        try:
            with tier.stored_under(_keys_by_slot(transfer)):
                # Stores without copies read the checksum with the slot; others get one with their copy.
                tier.write_checksums(transfer.host_indices)
                results |= original([transfer], extra_info)
        except Exception as error:  # the rows may still be stored
            metrics.failed("page_write", f"{len(keys)} states", error=error)
            results[transfer.name] = none
            continue
        if not all(results[transfer.name]):
            metrics.failed("page_write", f"{len(keys)} states, of which the store refused one")
    return results


_STATE_CALLS = {"batch_get_v2": _get_states, "batch_set_v2": _set_states}
