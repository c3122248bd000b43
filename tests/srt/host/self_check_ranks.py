"""One of three processes whose ranks share a host tier and check it: see sharing_ranks.py."""

import numpy as np
import sharing_ranks
import torch.distributed as dist
from host_tier import page_memory
from pools import fill, memory
from rank_processes import go_through
from sharing_ranks import RANKS, Rank


def everything(model):
    """Bytes of the pool and of the host tier, and the number of free slots of both."""
    tier, allocator = model.tier, model.controller.mem_pool_device_allocator
    parts = [part.tobytes() for part in memory(model.pool)]
    return parts, page_memory(tier).tobytes(), tier.available_size(), allocator.available_size()


def check(ranks, model):
    """The result of the self-check on this rank, and whether pool and tier are unchanged."""
    from sgl_kvpool.sglang_plugin.hooks.ranks import all_ranks
    from sgl_kvpool.srt.self_check import Difference, check_tier

    # Ranks read the same bytes from the shared tier, so their pools must hold the same rows, as in a server.
    fill(model.pool)
    if ranks.rank == 0:
        page_memory(model.tier)[...] = 0xEE
    dist.barrier()
    before = everything(model)
    try:
        found = check_tier(model.controller, lambda good: all_ranks(model.controller, good))
    except Difference as difference:
        found = str(difference)
    dist.barrier()
    return {"found": found, "same": everything(model) == before, "digest": model.tier.shared.log.digest}


def passes(layout, arrangement, host="same", page_size=4):
    return lambda ranks: check(ranks, ranks.model(layout, arrangement, host, page_size))


def other_byte(broken):
    """One rank changes a byte of each page that it stores; all ranks load from the one copy."""

    def case(ranks):
        model = ranks.model()
        if ranks.rank == broken:
            for channel in model.tier._channels.to_host:
                run = channel.run

                def changed(transfer, *rest, _run=run):
                    _run(transfer, *rest)
                    page_memory(model.tier)[np.asarray(transfer.host_pages), 3] ^= 1

                ranks.patch.setattr(channel, "run", changed)
        return check(ranks, model)

    return case


def not_loaded(broken):
    """One rank omits a layer of its load."""

    def case(ranks):
        model = ranks.model()
        if ranks.rank == broken:
            load = model.tier.load_to_device_per_layer

            def without(pool, host, device, layer_id, *more, **named):
                if layer_id:
                    load(pool, host, device, layer_id, *more, **named)

            ranks.patch.setattr(model.tier, "load_to_device_per_layer", without)
        return check(ranks, model)

    return case


CASES = {
    "fp4": passes("fp4", "layer_major"),
    "narrower": passes("bf16", "page_major", "fp4"),
    "pages-of-1": passes("fp8", "token_major", page_size=1),
    **{f"stored-{rank}": other_byte(rank) for rank in range(RANKS)},
    **{f"loaded-{rank}": not_loaded(rank) for rank in range(RANKS)},
}


def main():
    from sgl_kvpool.sglang_plugin.hooks import ranks as agreement
    from sgl_kvpool.srt.host.shared_segment import NodeRanks

    agreement.sharing_ranks = lambda options: NodeRanks.of(dist.group.WORLD)
    # `Rank.run` looks cases up in sharing_ranks.
    sharing_ranks.CASES = CASES
    go_through(Rank, CASES)


if __name__ == "__main__":
    main()
