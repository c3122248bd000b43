"""Backups or loads that fail: a request gets rows and states, or rows and a draft's rows, or neither."""

import numpy as np
import pytest
import torch
from cases import crossed
from test_controller import broken
from test_hybrid_tree import TREES, prompt


def test_a_draft_whose_backup_was_lost_is_a_miss(model_of, failures, monkeypatch):
    """A draft with a tier of its own follows the target's slots."""
    model = model_of("dense, own draft")
    with monkeypatch.context() as patched:
        broken(model.host_pools[-1]._channels.to_host, patched)
        model.put(prompt(4))
    model.evict()
    model.check(prompt(4), 0)
    assert failures() == {"backup": 1, "backup_lost": 1, "load_pages": 1}


@pytest.mark.parametrize("which", [0, 1])
def test_freed_host_slots_are_a_miss_of_rows_and_states(model_of, failures, which):
    model = model_of("hybrid")
    model.put(prompt(4), prompt(9))
    model.evict()
    model.check(prompt(4), 4)
    model.tiers[which].slot_used[:] = False
    free = model.free()
    model.check(prompt(9), 4)
    assert failures() == {"load_pages": 1}
    assert model.controller.load_queue == []
    assert free == model.free()


@pytest.mark.parametrize("given", [[5, 5], [0], [7]])
def test_invalid_device_slots_of_states_are_refused(model_of, failures, given):
    """Lists of SGLang's allocator: slot 0 takes writes of padded tokens, a repeated slot has two owners."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    model = model_of("hybrid")
    rows, states = model.tiers
    states_there = torch.tensor(given)
    taken = model.cache.token_to_kv_pool_allocator.alloc(4)
    free = [tier.available_size() for tier in model.tiers]
    backup = [PoolTransfer(name=PoolName.MAMBA, device_indices=states_there)]
    assert model.controller.write(taken, node_id=1, extra_pools=backup) is None
    assert failures() == {"backup_pages": 1}
    assert free == [tier.available_size() for tier in model.tiers]
    (load,) = backup
    load.host_indices = states.alloc(len(given))
    assert model.controller.load(rows.alloc(4), node_id=1, extra_pools=[load]) is None
    assert failures() == {"backup_pages": 1, "load_pages": 1}
    assert (model.controller.load_queue, model.controller.write_queue) == ([], [])


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize(("tree", "page_size"), crossed(TREES, [1, 4]))
def test_whatever_fails_in_whatever_order(model_of, monkeypatch, page_size, tree, policy):
    """Prompts that share prefixes, pools that are too small, evictions on both sides, lost backups."""
    random = np.random.default_rng(page_size)
    model = model_of(
        "hybrid", page_size=page_size, pages=24, slots=7, tree=tree, ratio=1.2, arrangement="page_major",
        hicache_write_policy=policy,
    )  # fmt: skip
    prompts, shorter, lengths, served = [], {}, [], 0
    for _ in range(70):
        if prompts and random.random() < 0.5:
            base = prompts[random.integers(len(prompts))]
            if random.random() < 0.5:
                base = base[: page_size * random.integers(1, len(base) // page_size + 1)]
        else:
            base = []
        more = [int(t) for t in random.integers(0, 1 << 20, page_size * random.integers(1, 5))]
        tokens = [*base, *more][: 12 * page_size]
        prompts.append(tokens)
        shorter[tuple(tokens)] = base
        model.check(tokens)
        with monkeypatch.context() as patched:
            if random.random() < 0.3:
                broken(model.tiers[random.integers(2)]._channels.to_host, patched)
            make_room(model, len(tokens))
            model.put(tokens)
        if random.random() < 0.5:
            model.evict(tokens=int(random.integers(0, 30)) * page_size, states=int(random.integers(0, 4)))
        for tokens in (prompts[random.integers(len(prompts))] for _ in range(3)):
            make_room(model, len(tokens))
            model.check(shorter[tuple(tokens)] or tokens)  # now on the device, with its state
            lengths.append(model.check(tokens))
            served += lengths[-1] > 0
    assert served > 20
    assert 0 in lengths
    model.cache.sanity_check()


def make_room(model, tokens):
    """Evict only what does not fit, as SGLang does before it computes or loads."""
    rows = tokens - model.cache.token_to_kv_pool_allocator.available_size()
    states = 3 - model.requests.mamba_allocator.available_size()
    if rows > 0 or states > 0:
        model.evict(max(rows, 0), max(states, 0))
