"""What ranks that schedule the same requests agree on: misses of the host tier, and who shares one."""

from typing import Any

import torch

from sgl_kvpool import metrics
from sgl_kvpool.srt.host.shared_tier import slots_digest
from sgl_kvpool.transfer.host_options import NODE


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
    return 1 if group is None else torch.distributed.get_world_size(group=group)


def sharing_ranks(options: Any) -> Any:
    """`NodeRanks` of this process where the ranks of a machine share a host tier; None where they do not."""
    if options.sharing != NODE:
        return None
    from sglang.srt.runtime_context import get_parallel

    from sgl_kvpool.srt.host.shared_segment import NodeRanks

    return NodeRanks.of(get_parallel().attn_tp_group.cpu_group)
