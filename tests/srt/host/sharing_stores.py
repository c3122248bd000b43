"""Cases of sharing_ranks.py with a store behind the shared tier."""

import time

import torch.distributed as dist
from sharing_model import LONGER, SHORT
from test_hybrid_stores import begin_fetch, fetched, files, stored
from test_hybrid_tree import prompt


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
    lengths = model.returned(LONGER)
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
        lengths += model.returned(prompt(16, 1000 * number))
        time.sleep(0.2)
    model.evict()
    model.forget()
    model.settle()
    attached = [model.cache.detach_storage_backend(), model.cache.attach_storage_backend(
        "file", storage_backend_extra_config_json='{"prefetch_threshold": 1}', served_model_name="model"
    )]  # fmt: skip
    lengths.append(fetched(model, LONGER))
    model.controller.detach_storage_backend()
    model.evict()
    model.forget()
    leaked = empty - model.tier.available_size()
    return {"lengths": lengths, "held": held, "leaked": leaked, "done": [ok for ok, _ in attached]}


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
        lengths = [fetched(model, LONGER)]
        model.controller.detach_storage_backend()
        return {"lengths": lengths, "reads": len(set(reads)), "files": len(files(store, False))}

    return case
