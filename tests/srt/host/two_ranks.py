"""Cases of two ranks (rank_processes.py), with SGLang's tree, controller and store in each.

Faults happen on rank 1 only.
"""

import pytest
import rank_processes
import torch.distributed as dist
from model_kinds import KINDS, pool_of, publish_server, request_pool
from pools import DSA_PAGE
from test_controller import broken
from test_hybrid_stores import fetched, files, flip, stored
from test_hybrid_tree import prompt
from tree_model import build

PAGE_SIZE, TOKENS = DSA_PAGE, 32 * DSA_PAGE
SHORT, LONGER = prompt(2 * PAGE_SIZE), prompt(4 * PAGE_SIZE)
RANKS = 2
#: Models of ranks that hold other rows of the same requests.
SHARDS = {"shards": "dense", "sparse-shards": "DSA"}


class Rank(rank_processes.Rank):
    def __init__(self, rank, folder):
        super().__init__(rank, folder, RANKS)
        both, alone = self.all, self.alone
        names = ("tp_cache_group", "attn_tp_cache_group", "attn_cp_cache_group", "pp_cache_group")
        #: Process groups that SGLang passes to a tree (`kv_cache_builder.py:402`).
        self.groups = {
            # --tp-size 2
            "tensor": dict(zip(names, (both, both, alone, alone), strict=True)),
            # --tp-size 2 --attn-cp-size 2
            "context": dict(zip(names, (both, alone, both, alone), strict=True)),
            # --tp-size 2 --dp-size 2 --enable-dp-attention: other requests on each
            "data": dict(zip(names, (alone, alone, alone, alone), strict=True)),
            # --tp-size 2 --dcp-size 2: other rows of the same requests on each
            **{one: dict(zip(names, (both, both, alone, alone), strict=True)) for one in SHARDS},
            # --pp-size 2
            "pipeline": {
                **dict(zip(names, (alone, alone, alone, both), strict=True)), "pp_rank": rank, "pp_size": 2,
            },
            # A tree that gets no attention groups.
            "tensor-alone": {"tp_cache_group": both},
        }  # fmt: skip

    def model(self, groups="tensor", store=None):
        sizes = {"pp_size": 2} if groups == "pipeline" else {"tp_size": 2}
        if groups in SHARDS:
            sizes["dcp_size"] = 2
        args = publish_server(
            self.patch, rank=self.rank, page_size=PAGE_SIZE, store=store, hicache_ratio=2.0, **sizes
        )
        kind = KINDS[SHARDS.get(groups, "hybrid")]
        requests = request_pool(context=TOKENS) if kind.hybrid else None
        pool = pool_of(kind, "fp4", PAGE_SIZE, TOKENS // PAGE_SIZE, requests)
        return build(args, self.groups[groups], pool, requests)

    def lose(self, which, model, tokens):
        """Compute a prompt whose backup fails twice on rank 1: of its rows, or of its state."""
        with pytest.MonkeyPatch.context() as patched:
            if self.rank == 1:
                tier = model.tiers[1] if which == "states" else model.tier
                broken(tier._channels.to_host, patched)
            model.put(tokens)

    def result_of(self, case):
        found = list(CASES[case](self))
        model = found[-1][0]
        return {
            "lengths": [length for _, length in found],
            "free": [*(pool.available_size() for pool in model.host_pools), *model.free()],
            "queued": len(model.controller.load_queue),
        }


# For each prompt, a case yields the model and the length found; `Model.check` compares the bytes.


def nothing(ranks):
    model = ranks.model()
    model.put(SHORT, LONGER)
    model.evict()
    yield model, model.check(LONGER)
    yield model, model.check(SHORT)


def lost(which, groups="tensor"):
    def case(ranks):
        model = ranks.model(groups)
        model.put(SHORT)
        ranks.lose(which, model, LONGER)
        model.evict()
        yield model, model.check(LONGER)
        yield model, model.check(SHORT)
        yield model, model.check(LONGER)
        model.put(LONGER)  # computed again
        yield model, model.check(LONGER)

    return case


def lost_in_the_second_stage(ranks):
    model = ranks.model("pipeline")
    ranks.lose("rows", model, LONGER)
    model.evict()
    try:
        found = model.check(LONGER)
    except RuntimeError as error:
        found = str(error)
        for _ in range(2):  # receive what the first stage still sends about its load
            model.cache._sync_hicache_ready_counts()
    yield model, found


def free_host_pages(ranks):
    model = ranks.model()
    model.put(SHORT, LONGER)
    model.evict()
    used = model.tiers[0].slot_used.clone()
    if ranks.rank == 1:
        model.tiers[0].slot_used[:] = False
    yield model, model.check(LONGER)
    model.tiers[0].slot_used[:] = used
    yield model, model.check(LONGER)


def unreadable(which, place=0.5):
    def case(ranks):
        """Two servers, one after the other; one rank of the second cannot read a page of the store."""
        store, groups = ranks.folder / f"store-{which}-{place}", which if which in SHARDS else "tensor"
        stored(ranks.model(groups, store), SHORT, LONGER)
        dist.barrier()
        model = ranks.model(groups, store)
        if ranks.rank == 1:
            damage_what_rank_1_reads(model.controller.storage_backend, store, which, place)
        yield model, fetched(model, LONGER)
        yield model, fetched(model, SHORT)
        model.controller.detach_storage_backend()
        yield model, *model.returned(LONGER)  # computed again

    return case


def damage_what_rank_1_reads(backend, store, which, place):
    """Damage rank 1's file of the longer prompt's end, or make its reads of a shared row file fail."""
    if which != "rows":
        own = "_dcp1_2" if which in SHARDS else "_1_2"
        flip([file for file in files(store, which == "states") if own in file.name][-1], place)
        return
    bad = files(store, False)[2].name.partition("_")[0]
    get = backend.get

    def failing(key, *args, **kwargs):
        if key == bad:
            raise OSError(5, "unreadable on purpose")
        return get(key, *args, **kwargs)

    backend.get = failing


LOST_ROWS = ("context", "data", "tensor-alone", *SHARDS)
CASES = {
    "nothing": nothing,
    **{f"lost-{which}": lost(which) for which in ("rows", "states")},
    **{f"lost-rows-{groups}": lost("rows", groups) for groups in LOST_ROWS},
    "free-host-pages": free_host_pages,
    **{f"unreadable-{which}": unreadable(which) for which in ("rows", "states", *SHARDS)},
    "unreadable-index-keys": unreadable("sparse-shards", 0.9),  # which lie behind the rows
    "lost-in-the-second-stage": lost_in_the_second_stage,
}


if __name__ == "__main__":
    rank_processes.go_through(Rank, CASES)
