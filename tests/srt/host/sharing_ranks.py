"""Cases of three ranks (rank_processes.py) that share a host tier: SGLang's tree, controller and store."""

from functools import partial
from itertools import chain

import numpy as np
import pytest
import rank_processes
import torch.distributed as dist
from codec_oracle import ROW_BYTES, narrower
from sharing_model import LONGER, OTHER, PAGE_SIZE, RANKS, SHORT, Rank
from sharing_starts import alone, checked_loaded, empty, no_mapping, own_draft, small_budget, without_memory
from sharing_stores import aborted, from_store, write_back_later
from test_controller import broken
from test_hybrid_tree import prompt
from tree_model import Request

#: Seeds and number of steps of the mixtures.
SEEDS, STEPS = range(3), 150


def there_and_back(layout, arrangement, host="same", page_size=PAGE_SIZE, drafts=0):
    def case(ranks):
        model = ranks.model(layout, arrangement, host, page_size, drafts=drafts)
        kept = ranks.counts_stored_pages(model)
        model.put(SHORT, LONGER, OTHER)
        lengths = [model.check(tokens) for tokens in (SHORT, LONGER, OTHER)]
        model.evict()
        lengths += [model.check(tokens) for tokens in (OTHER, LONGER, SHORT)]
        return {"lengths": lengths, "kept": kept, "tokens": model.tier.size, "alone": model.pool.size}

    return case


def slow(rank, direction):
    """One rank is slow while the others go on as far as the agreements let them."""

    def case(ranks):
        model = ranks.model()
        if ranks.rank == rank:
            ranks.is_slow_at(model, direction)
        return {"lengths": [*chain.from_iterable(model.returned(prompt(28, 100 * n)) for n in range(4))]}

    return case


def lost(rank, drafts=0):
    """One rank cannot store pages or, with drafts, only the drafts' layers of the pages."""

    def case(ranks):
        model = ranks.model(drafts=drafts)
        model.put(SHORT)
        with pytest.MonkeyPatch.context() as patched:
            if ranks.rank == rank:
                broken(model.tier._channels.to_host[1 if drafts else 0 :], patched)
            model.put(LONGER)
        model.evict()
        lengths = [model.check(LONGER), model.check(SHORT)]
        model.put(LONGER)  # computed again
        lengths.append(model.check(LONGER))
        # The pages go to another prompt, and all ranks store it.
        model.evict()
        model.forget()
        return {"lengths": lengths + model.returned(OTHER)}

    return case


def refused_backup(rank):
    """One rank finds bad device slots in a list that all ranks are to store."""

    def case(ranks):
        model = ranks.model()
        with pytest.MonkeyPatch.context() as patched:
            if ranks.rank == rank:
                patched.setattr(model.tier, "device_indices_problem", lambda slots: "bad on purpose")
            model.put(LONGER)
        model.put(OTHER)
        model.evict()
        return {"lengths": [model.check(LONGER), model.check(OTHER)], "free": model.tier.available_size()}

    return case


def moved(rank):
    """One rank's allocator returns different pages."""

    def case(ranks):
        model = ranks.model()
        model.put(SHORT)
        if ranks.rank == rank:
            model.tier.alloc(PAGE_SIZE)
        kept = ranks.counts_stored_pages(model)
        model.put(LONGER, OTHER)
        model.evict()
        lengths = [model.check(tokens) for tokens in (OTHER, LONGER, SHORT)]
        return {"lengths": lengths, "kept": kept, "detail": ranks.details.get("tier_disagreement")}

    return case


def other_list(rank):
    """One rank is about to load different pages, all of them valid, because its tree differs."""

    def case(ranks):
        model = ranks.model()
        model.put(LONGER, OTHER)
        model.evict()
        load = model.controller.load

        def astray(host_indices, **rest):
            return load(host_indices=host_indices.roll(PAGE_SIZE), **rest)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(model.cache, "ready_to_load_host_cache", lambda: 0)
            queued = model.go_on(OTHER, Request())
        with pytest.MonkeyPatch.context() as patched:
            if ranks.rank == rank:
                patched.setattr(model.controller, "load", astray)
            lengths = [len(queued), model.check(LONGER)]
        # Queued before the disagreement and started after the tier ended.
        model.verify(OTHER, queued)
        model.evict()
        lengths.append(model.check(OTHER))
        return {"lengths": lengths, "detail": ranks.details.get("tier_disagreement")}

    return case


def on_machines(case):
    """Runs a case with the last rank on a machine of its own."""

    def run(ranks):
        from sgl_kvpool.srt.host import shared_segment

        ranks.patch.setattr(shared_segment, "_machine", lambda: ("machine", ranks.rank // 2))
        return case(ranks)

    return run


def flushed(ranks):
    """SGLang's /flush_cache clears tree and tier."""
    model = ranks.model()
    model.put(LONGER)
    model.cache.reset()
    model.put(OTHER)
    model.evict()
    return {"lengths": [model.check(LONGER), model.check(OTHER)]}


def mixture(seed):
    """Many prompts in a small host tier with occasional faults, in the same order on every rank."""

    def case(ranks):
        model = ranks.model("fp4", "token_major", ratio=0.25)
        generator = np.random.default_rng(seed)
        prompts = [prompt(PAGE_SIZE * int(n), 1000 * int(k)) for n in range(2, 9) for k in (1, 2, 3, 4)]
        lengths, asked, empty = [], [], model.tier.available_size()
        for _ in range(STEPS):
            tokens = prompts[generator.integers(len(prompts))]
            what, who = generator.integers(10), generator.integers(RANKS)
            allocator = model.cache.token_to_kv_pool_allocator
            if what < 5:
                if allocator.available_size() < len(tokens):
                    model.evict()
                with pytest.MonkeyPatch.context() as patched:
                    if what == 0 and ranks.rank == who:
                        broken(model.tier._channels.to_host, patched)
                    model.put(tokens)
            elif what < 9:
                model.evict()
                lengths.append(model.check(tokens))
                asked.append(len(tokens))
            elif generator.integers(10) == 0:
                model.cache.reset()
        model.evict()
        model.forget()
        return {"lengths": lengths, "asked": asked, "leaked": empty - model.tier.available_size()}

    return case


#: Where rows lie decides which bytes a rank copies, not what they are: a layout per arrangement, and one with
#: rows that are narrower on the host.
PLACED = {"layer_major": "fp8", "token_major": "fp8_block_scale", "page_major": "fp4"}
WIDE, NARROW = "bf16", min(narrower("bf16"), key=ROW_BYTES.get)
CASES = {
    **{arrangement: there_and_back(layout, arrangement) for arrangement, layout in PLACED.items()},
    "narrower": there_and_back(WIDE, "token_major", NARROW),
    **{f"pages-of-{size}": there_and_back("fp4", "page_major", page_size=size) for size in (1, 2)},
    **{f"slow-{rank}-{direction}": slow(rank, direction)
       for rank in (0, 2) for direction in ("to_host", "to_device")},
    "draft": there_and_back("fp8", "token_major", drafts=1),
    "draft-narrower": there_and_back(WIDE, "layer_major", NARROW, drafts=1),
    "two-drafts": there_and_back("fp4", "page_major", drafts=2),
    **{f"lost-{rank}": lost(rank) for rank in range(RANKS)},
    **{f"lost-draft-{rank}": lost(rank, drafts=1) for rank in range(RANKS)},
    **{f"refused-{rank}": refused_backup(rank) for rank in range(RANKS)},
    **{f"moved-{rank}": moved(rank) for rank in range(RANKS)},
    "flushed": flushed,
    **{f"other-list-{rank}": other_list(rank) for rank in (0, 2)},
    "write-back-later": write_back_later,
    "aborted": aborted,
    "machines": on_machines(there_and_back("fp4", "page_major")),
    "machines-store": on_machines(from_store(None)),
    "machines-moved": on_machines(moved(2)),
    **{f"mixture-{seed}": mixture(seed) for seed in SEEDS},
    **{f"store-{rank}": from_store(rank) for rank in (0, 2)},
    "store-draft": from_store(None, drafts=1),
    "own-draft": own_draft,
    **{f"no-memory-{rank}": without_memory(rank, small_budget) for rank in (0, 2)},
    **{f"unmapped-{rank}": without_memory(rank, no_mapping) for rank in (0, 2)},
    "empty-2": without_memory(2, empty),
    "alone-0": alone(0, "memfd_create"),
    "alone-2": alone(2, "open"),
    "machines-alone": on_machines(alone(2, "memfd_create")),
    "machines-unmapped": on_machines(without_memory(2, no_mapping)),
    "checked-loaded": checked_loaded,
}  # fmt: skip


def main():
    from sgl_kvpool.srt.host import agreement
    from sgl_kvpool.srt.host.shared_segment import NodeRanks

    # The attention-TP group of a server, which a process without a model does not have.
    agreement.sharing_ranks = lambda options: NodeRanks.of(dist.group.WORLD)
    rank_processes.go_through(partial(Rank, CASES), CASES)


if __name__ == "__main__":
    main()
