"""Cases of sharing_ranks.py at the start of a server: its memory, its draft, its self-check."""

import os

import pytest
import torch.distributed as dist
from host_tier import page_memory
from model_kinds import heads_pool
from pools import fill, memory
from sharing_model import LONGER, PAGE_SIZE


def without_memory(rank, fault):
    """One rank cannot have its part of the tier."""

    def case(ranks):
        if ranks.rank == rank:
            fault(ranks.patch)
        with pytest.raises(ValueError) as refused:  # tests compare the text
            ranks.model()
        return {"error": str(refused.value)}

    return case


def small_budget(patch):
    from sglang.srt.mem_cache.pool_host import base

    patch.setattr(base, "host_memory_budget_bytes", lambda _: 1000)


def empty(patch):
    """The kernel provides no memory for this rank's part."""
    from sgl_kvpool.srt.host.shared_segment import SharedSegment

    error = OSError(14, "Bad address")
    patch.setattr(SharedSegment, "_fault_in", lambda *_: error)


def no_mapping(patch, calls=("ftruncate", "open"), code=12):
    """The system refuses calls: of the first rank, of the others."""

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    for call in calls:
        patch.setattr(os, call, refuse)


def alone(rank, call):
    """`auto` chose sharing, and the system refuses a call of one rank."""

    def case(ranks):
        from sgl_kvpool.sglang_plugin.hooks import host_tier

        said = []
        ranks.patch.setattr(host_tier.logger, "warning", lambda text, *args: said.append(text % args))
        if ranks.rank == rank:
            no_mapping(ranks.patch, [call], 1)
        model = ranks.model(chosen=True)
        lengths = model.returned(LONGER)
        own = model.tier.shared is None and model.tier.size == model.pool.size + PAGE_SIZE
        return {"lengths": lengths, "own": own, "said": said}

    return case


def own_draft(ranks):
    """SGLang is about to give a draft its own host pool."""
    from sglang.srt.mem_cache.kv_cache_builder import maybe_register_hicache_draft
    from sglang.srt.speculative.base_spec_worker import HiCacheDraftMode, HiCacheDraftPlan

    model = ranks.model()
    draft = heads_pool(size=model.pool.size, page_size=PAGE_SIZE)
    plan = HiCacheDraftPlan(mode=HiCacheDraftMode.SIDECAR, device_pools=(draft,))
    with pytest.raises(ValueError, match="draft") as refused:
        maybe_register_hicache_draft(tree_cache=model.cache, draft_plan=plan)
    lengths = model.returned(LONGER)
    return {"lengths": lengths, "error": str(refused.value), "pools": len(model.host_pools)}


def checked_loaded(ranks):
    """The check of the tier at start, of which the last rank omits a layer of its load."""
    from sgl_kvpool.srt.host.agreement import all_ranks
    from sgl_kvpool.srt.self_check import Difference, check_tier

    model = ranks.model()
    load = model.tier.load_to_device_per_layer

    def without(pool, host, device, layer_id, *more, **named):
        if layer_id:
            load(pool, host, device, layer_id, *more, **named)

    if ranks.rank == 2:
        ranks.patch.setattr(model.tier, "load_to_device_per_layer", without)
    # Ranks read the same bytes from the shared tier, so their pools hold the same rows, as in a server.
    fill(model.pool)
    if ranks.rank == 0:
        page_memory(model.tier)[...] = 0xEE
    dist.barrier()
    before = everything(model)
    with pytest.raises(Difference) as difference:
        check_tier(model.controller, lambda good: all_ranks(model.controller, good))
    dist.barrier()
    return {"found": str(difference.value), "same": everything(model) == before}


def everything(model):
    """Bytes of the pool and of the host tier, and the number of free slots of both."""
    free = model.tier.available_size(), model.controller.mem_pool_device_allocator.available_size()
    return [part.tobytes() for part in (*memory(model.pool), page_memory(model.tier))], free
