"""One of three processes whose ranks share a host tier: SGLang's tree, controller and store in each.

`python sharing_ranks.py RANK FOLDER CASE ...`, with pytest's path, goes through cases together with the other
ranks, over gloo, and writes the results. A rank that waits for others in vain ends after a minute.
"""

import os
import time
from types import SimpleNamespace

import numpy as np
import pytest
import rank_processes
import torch.distributed as dist
from codec_oracle import ROW_BYTES, narrower
from host_tier import page_memory
from pools import fill, memory
from test_hybrid_stores import begin_fetch, fetch, files, stored
from test_hybrid_tree import break_backups, prompt
from tree_model import KINDS, Request, build, heads_pool, pool_of, publish_server

from sgl_kvpool.transfer.host_options import HostTierOptions

RANKS, PAGE_SIZE, TOKENS = 3, 4, 128
SHORT, LONGER, OTHER = prompt(8), prompt(28), prompt(20, 500)
#: Seeds and number of steps of the mixtures.
SEEDS, STEPS = range(3), 150
#: Seconds that a slow rank adds to each transfer.
SLOW = 0.2


class Rank(rank_processes.Rank):
    def __init__(self, rank, folder):
        super().__init__(rank, folder, RANKS)
        #: Process groups that SGLang passes to a tree (`kv_cache_builder.py:402`), with --tp-size 3.
        self.groups = {
            "tp_cache_group": self.all, "attn_tp_cache_group": self.all,
            "attn_cp_cache_group": self.alone, "pp_cache_group": self.alone,
        }  # fmt: skip

    def model(
        self,
        layout="fp4",
        arrangement="layer_major",
        host="same",
        page_size=PAGE_SIZE,
        store=None,
        ratio=1.0,
        drafts=0,
    ):
        args = publish_server(
            self.patch, rank=self.rank, page_size=page_size, store=store, shared="node", hicache_ratio=ratio,
            tp_size=RANKS,
        )  # fmt: skip
        given = KINDS["dense"], layout, page_size, TOKENS // page_size
        options = {"host_tier": HostTierOptions(host, sharing="node")}
        # Drafts keep layer_major, whatever the target's arrangement.
        packed = tuple(pool_of(*given, draft="dense", **options) for _ in range(drafts))
        return build(args, self.groups, pool_of(*given, arrangement=arrangement, **options), packed=packed)

    def result_of(self, case):
        return CASES[case](self)

    def is_slow_at(self, model, direction):
        """Delay this rank's transfers in one direction."""
        for channel in getattr(model.tier._channels, direction):
            run = channel.run

            def slow(*args, _run=run, **kwargs):
                time.sleep(SLOW)
                _run(*args, **kwargs)

            self.patch.setattr(channel, "run", slow)

    def counts_stored_pages(self, model):
        """Lists, for the target and each draft, that collect the host pages of this rank's backups."""
        kept = []
        for channel in model.tier._channels.to_host:
            run, own = channel.run, []
            kept.append(own)

            def counted(transfer, *rest, _run=run, _own=own):
                _own.extend(int(page) for page in transfer.host_pages)
                _run(transfer, *rest)

            self.patch.setattr(channel, "run", counted)
        return kept


def there_and_back(layout, arrangement, host="same", page_size=PAGE_SIZE, drafts=0):
    def case(ranks):
        model = ranks.model(layout, arrangement, host, page_size, drafts=drafts)
        kept = ranks.counts_stored_pages(model)
        lengths = []
        for tokens in (SHORT, LONGER, OTHER):
            model.put(tokens)
        for tokens in (SHORT, LONGER, OTHER):
            lengths.append(model.check(tokens))
        model.evict()
        for tokens in (OTHER, LONGER, SHORT):
            lengths.append(model.check(tokens))
        return {"lengths": lengths, "kept": kept, "tokens": model.tier.size, "alone": model.pool.size}

    return case


def slow(rank, direction):
    """One rank is slow while the others go on as far as the agreements let them."""

    def case(ranks):
        model = ranks.model()
        if ranks.rank == rank:
            ranks.is_slow_at(model, direction)
        lengths = []
        for number in range(4):
            tokens = prompt(28, 100 * number)
            model.put(tokens)
            model.evict()
            lengths.append(model.check(tokens))
        return {"lengths": lengths}

    return case


def lost(rank, drafts=0):
    """One rank cannot store pages or, with drafts, only the drafts' layers of the pages."""

    def case(ranks):
        model = ranks.model(drafts=drafts)
        channels = model.tier._channels.to_host[1 if drafts else 0 :]
        broken = SimpleNamespace(_channels=SimpleNamespace(to_host=channels))
        model.put(SHORT)
        with pytest.MonkeyPatch.context() as patched:
            if ranks.rank == rank:
                break_backups(broken, patched)
            model.put(LONGER)
        model.evict()
        lengths = [model.check(LONGER), model.check(SHORT)]
        model.put(LONGER)  # computed again
        lengths.append(model.check(LONGER))
        # The pages go to another prompt, and all ranks store it.
        model.evict()
        model.forget()
        model.put(OTHER)
        model.evict()
        lengths.append(model.check(OTHER))
        return {"lengths": lengths}

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
        model.put(LONGER)
        model.put(OTHER)
        model.evict()
        lengths = [model.check(tokens) for tokens in (OTHER, LONGER, SHORT)]
        return {"lengths": lengths, "kept": kept, "detail": ranks.details.get("tier_disagreement")}

    return case


def other_list(rank):
    """One rank is about to load different pages, all of them valid, because its tree differs."""

    def case(ranks):
        model = ranks.model()
        model.put(LONGER)
        model.put(OTHER)
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


def write_back_later(ranks):
    """A request to attach a store, which may name another write policy."""
    model = ranks.model()
    store = ranks.folder / "store-later"
    ranks.patch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(store))
    attach = model.cache.attach_storage_backend
    asked = {"served_model_name": "model", "hicache_write_policy": "write_back"}
    answers = [attach("file", **asked)]
    attached = [attach("file", served_model_name="model", hicache_write_policy="write_through")]
    answers.append(attach("file", **asked))
    policy = model.controller.write_policy
    model.put(LONGER)
    model.evict()
    lengths = [model.check(LONGER)]
    detached = [model.cache.detach_storage_backend()]
    return {
        "lengths": lengths, "refused": answers, "done": [ok for ok, _ in attached + detached],
        "policy": policy,
    }  # fmt: skip


def aborted(ranks):
    """A request is aborted while the first rank reads the store for it; its pages go to other requests."""
    store = ranks.folder / "store-aborted"
    stored(ranks.model(store=store), LONGER)
    dist.barrier()
    model = ranks.model(store=store, ratio=0.25)
    backend, empty = model.controller.storage_backend, model.tier.available_size()
    read = backend.batch_get

    def slow(*args, **kwargs):
        pages = read(*args, **kwargs)
        time.sleep(1)
        return pages

    backend.batch_get = slow
    handle = begin_fetch(model, LONGER)
    while model.cache.ongoing_prefetch[handle].host_indices is None:
        model.settle()
    held = empty - model.tier.available_size()
    model.cache.release_aborted_request(handle)
    lengths = []
    for number in range(1, 9):
        tokens = prompt(16, 1000 * number)
        model.put(tokens)
        model.evict()
        lengths.append(model.check(tokens))
        time.sleep(0.2)
    model.evict()
    model.forget()
    model.settle()
    attached = [model.cache.detach_storage_backend(), model.cache.attach_storage_backend(
        "file", storage_backend_extra_config_json='{"prefetch_threshold": 1}', served_model_name="model"
    )]  # fmt: skip
    fetch(model, LONGER)
    lengths.append(model.check(LONGER))
    model.controller.detach_storage_backend()
    model.evict()
    model.forget()
    leaked = empty - model.tier.available_size()
    return {"lengths": lengths, "held": held, "leaked": leaked, "done": [ok for ok, _ in attached]}


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


def from_store(rank, drafts=0):
    """Two servers, one after the other; in the second, only each machine's first rank reads the store.

    `rank` cannot read one of the pages.
    """

    def case(ranks):
        store = ranks.folder / f"store-{rank}-{drafts}"
        stored(ranks.model(store=store, drafts=drafts), SHORT, LONGER)
        dist.barrier()
        model = ranks.model(store=store, drafts=drafts)
        backend, reads = model.controller.storage_backend, []
        get, bad = backend.get, files(store, False)[4].name.partition("_")[0]

        def counted(key, *args, **kwargs):
            reads.append(key)
            if ranks.rank == rank and key == bad:
                raise OSError(5, "unreadable on purpose")
            return get(key, *args, **kwargs)

        backend.get = counted
        fetch(model, LONGER)
        lengths = [model.check(LONGER)]
        model.controller.detach_storage_backend()
        return {"lengths": lengths, "reads": len(set(reads)), "files": len(files(store, False))}

    return case


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
                        break_backups(model.tier, patched)
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


def no_mapping(patch):
    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    for call in ("ftruncate", "open"):  # of the first rank, of the others
        patch.setattr(os, call, refuse)


def own_draft(ranks):
    """SGLang is about to give a draft its own host pool."""
    from sglang.srt.mem_cache.kv_cache_builder import maybe_register_hicache_draft
    from sglang.srt.speculative.base_spec_worker import HiCacheDraftMode, HiCacheDraftPlan

    model = ranks.model()
    draft = heads_pool(size=model.pool.size, page_size=PAGE_SIZE)
    plan = HiCacheDraftPlan(mode=HiCacheDraftMode.SIDECAR, device_pools=(draft,))
    with pytest.raises(ValueError, match="draft") as refused:
        maybe_register_hicache_draft(tree_cache=model.cache, draft_plan=plan)
    model.put(LONGER)
    model.evict()
    return {"lengths": [model.check(LONGER)], "error": str(refused.value), "pools": len(model.host_pools)}


def self_checked(layout="fp4", arrangement="layer_major", host="same", page_size=PAGE_SIZE, broken=None):
    """The check of the tier at start; the rank `broken` omits a layer of its load."""

    def case(ranks):
        from sgl_kvpool.sglang_plugin.hooks.ranks import all_ranks
        from sgl_kvpool.srt.self_check import Difference, check_tier

        model = ranks.model(layout, arrangement, host, page_size)
        load = model.tier.load_to_device_per_layer

        def without(pool, host, device, layer_id, *more, **named):
            if layer_id:
                load(pool, host, device, layer_id, *more, **named)

        if ranks.rank == broken:
            ranks.patch.setattr(model.tier, "load_to_device_per_layer", without)
        # Ranks read the same bytes from the shared tier, so their pools hold the same rows, as in a server.
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

    return case


def everything(model):
    """Bytes of the pool and of the host tier, and the number of free slots of both."""
    free = model.tier.available_size(), model.controller.mem_pool_device_allocator.available_size()
    return [part.tobytes() for part in (*memory(model.pool), page_memory(model.tier))], free


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
    "machines-unmapped": on_machines(without_memory(2, no_mapping)),
    "checked": self_checked(),
    "checked-narrower": self_checked("bf16", "page_major", "fp4"),
    "checked-pages-of-1": self_checked("fp8", "token_major", page_size=1),
    "checked-loaded": self_checked(broken=2),
}  # fmt: skip


def main():
    from sgl_kvpool.sglang_plugin.hooks import ranks as agreement
    from sgl_kvpool.srt.host.shared_segment import NodeRanks

    # The attention-TP group of a server, which a process without a model does not have.
    agreement.sharing_ranks = lambda options: NodeRanks.of(dist.group.WORLD)
    rank_processes.go_through(Rank, CASES)


if __name__ == "__main__":
    main()
