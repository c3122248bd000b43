"""SGLang's tree and controller over our rows and states: a request gets both of one prefix, or neither.

Over both of SGLang's tree cores: the one in Rust is what servers have, the one in Python where it is absent.
"""

import itertools

import numpy as np
import pytest
import torch
from host_tier import ARRANGEMENTS, LABELS, LAYOUTS
from hybrid_tier import STATES, Request
from test_controller import Broken, broken, torch_too

TREES = ["rust", "python"]


def prompt(length, first=0):
    return list(range(first, first + length))


def break_backups(tier, patched):
    """Engine and torch, for backups of one of the tiers."""
    lanes = tier._lanes.to_host
    for lane in lanes:
        patched.setattr(lane, "engine", Broken(lane.plan))
    torch_too(lanes, patched)


# -------------------------------------------------------------------- there and back


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("layout", "arrangement"), list(itertools.product(LAYOUTS, ARRANGEMENTS)))
def test_prefixes_come_back_with_their_states(hybrid_of, layout, arrangement, tree):
    model = hybrid_of(layout, arrangement=arrangement, tree=tree)
    short, longer, other = prompt(4), prompt(9), prompt(4, 100)
    for tokens in (short, longer, other):
        model.put(tokens)
    assert [model.check(t) for t in (short, longer, other)] == [4, 9, 4]
    model.evict()
    for tokens in (longer, other, short):
        model.check(tokens, len(tokens))
    model.evict()
    model.check(prompt(4) + prompt(3, 500), 4)  # a prompt that goes another way behind a prefix


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("states", STATES)
def test_states_of_all_kinds_in_pages(hybrid_of, states, label):
    model = hybrid_of("fp8_block_scale", states, page_size=64, label=label)
    short, longer = prompt(128), prompt(256)
    model.put(short)
    model.put(longer)
    model.evict()
    model.check(longer + prompt(5, 900), 256)
    model.evict()
    model.check(prompt(192), 128)


@pytest.mark.parametrize("drafts", [("hybrid",), ("plain",), ("hybrid", "hybrid")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_packed_drafts_come_back_too(hybrid_of, layout, drafts):
    """Ring and Ling with MTP: SGLang lists the hybrid pool of a draft, whose states are the target's."""
    model = hybrid_of(layout, drafts=drafts, arrangement="token_major")
    assert model.tiers[0].layer_num == len(model.row_layers()) == 2 + len(drafts)
    short, longer = prompt(4), prompt(9)
    for tokens in (short, longer):
        model.put(tokens)
    model.evict()
    for tokens in (short, longer):
        model.check(tokens, len(tokens))


@pytest.mark.parametrize("drafts", [(), ("hybrid",), ("plain",)])
@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_index_keys_come_back_with_rows_and_states(hybrid_of, kernels, layout, label, drafts):
    """Models with sparse attention, which SGLang serves in pages of 64."""
    model = hybrid_of(layout, page_size=64, label=label, sparse=True, drafts=drafts)
    assert len(model.index_layers()) == len(model.row_layers()) == 2 + len(drafts)
    short, longer, other = prompt(128), prompt(256), prompt(64, 900)
    for tokens in (short, longer, other):
        model.put(tokens)
    model.evict()
    for tokens in (longer, other, short):
        model.check(tokens, len(tokens))
    model.evict()
    model.check(prompt(192), 128)
    assert kernels


def test_a_narrower_host_tier_changes_rows_and_no_state(hybrid_of):
    from sgl_kvpool.host.conversion import RowConversion
    from sgl_kvpool.host.labels import HostTierOptions
    from sgl_kvpool.layout import MLAKVCacheLayout

    model = hybrid_of("bf16", host_tier=HostTierOptions(layout="fp4"))
    tokens = prompt(6)
    model.put(tokens)
    before, state = model.row_bytes_of(tokens), model.state_of(tokens)
    model.evict()
    served = model.serve(tokens)
    assert served.tokens == 6
    assert np.array_equal(served.state, state)
    fmt = model.rows.row_format
    conversion = RowConversion(source=fmt, target=fmt.in_layout(MLAKVCacheLayout.FP4), k_scales=(1.0,))
    for was, now in zip(before, served.rows, strict=True):
        narrow = conversion.convert(torch.from_numpy(was), 0)
        assert np.array_equal(conversion.reversed().convert(narrow, 0).numpy(), now)
        assert not np.array_equal(was, now)


def test_states_alone_are_loaded_where_the_rows_never_left(hybrid_of):
    model = hybrid_of()
    short, longer = prompt(4), prompt(9)
    model.put(short)
    model.put(longer)
    model.evict(tokens=0, states=1)  # of the node that was used least recently; its rows have a child
    model.check(short, 4)
    model.evict()
    model.check(longer, 9)


def test_a_state_that_comes_after_its_rows_is_backed_up_alone(hybrid_of):
    """Two prompts part in the middle of a node: the first half has rows on the host, and no state."""
    model = hybrid_of()
    model.put(prompt(8))
    model.put(prompt(4) + prompt(4, 200))
    used = model.tiers[0].size - model.tiers[0].available_size()
    model.put(prompt(4))
    assert model.tiers[0].size - model.tiers[0].available_size() == used
    model.evict()
    model.check(prompt(4) + prompt(3, 700), 4)


def test_one_transfer_of_states_for_the_node_and_the_request(hybrid_of):
    """The tree asks for two, interleaved by layers; engines would begin anew with each."""
    from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams

    model = hybrid_of()
    model.put(prompt(4))
    model.evict()
    request = Request()
    match = model.cache.match_prefix(MatchPrefixParams(key=model.key(prompt(4)), cow_mamba=True, req=request))
    request.last_node = match.last_device_node
    model.cache.init_load_back(
        InitLoadBackParams(best_match_node=match.best_match_node, host_hit_length=4, req=request)
    )
    (operation,) = model.controller.load_queue
    (states,) = operation.pool_transfers
    assert len(states.host_indices) == 2
    assert len(set(states.host_indices.tolist())) == 1
    assert int(request.kv.mamba_pool_idx) in states.device_indices.tolist()
    assert len(set(states.device_indices.tolist())) == 2


# -------------------------------------------------------------------- sizes


@pytest.mark.parametrize("host", ["same", "fp4"])
def test_gigabytes_are_split_by_the_bytes_of_the_host(hybrid_of, host):
    """As many host slots per slot of the device, of rows and of states; together what was asked for."""
    from sgl_kvpool.host.labels import HostTierOptions

    model = hybrid_of("bf16", sizes={"hicache_size": 1}, host_tier=HostTierOptions(layout=host))
    rows, states = model.tiers
    taken = rows.size * rows.size_per_token + states.size * states.size_per_token
    assert abs(taken - 1e9) < rows.size_per_token + states.size_per_token
    assert rows.size / 32 == pytest.approx(states.size / 6, rel=1e-3)
    assert rows.size_per_token == 2 * {"same": 1152, "fp4": 416}[host]


@pytest.mark.parametrize("drafts", [(), ("hybrid",), ("plain", "plain")])
@pytest.mark.parametrize("host", ["same", "fp4"])
@pytest.mark.parametrize("sparse", [False, True])
def test_gigabytes_are_for_index_keys_and_drafts_too(hybrid_of, kernels, sparse, host, drafts):
    """All of it together is what was asked for. An index key has 128 values of a byte and a float32."""
    from sgl_kvpool.host.labels import HostTierOptions

    model = hybrid_of(
        "bf16", page_size=64, sparse=sparse, drafts=drafts, sizes={"hicache_size": 1},
        host_tier=HostTierOptions(layout=host),
    )  # fmt: skip
    rows, states = model.tiers
    layers = 2 + len(drafts)
    token = layers * ({"same": 1152, "fp4": 416}[host] + (132 if sparse else 0))
    slot = 3 * (3 * 96 * 2 + 2 * 16 * 16 * 4)
    assert abs(rows.size * token + states.size * slot - 1e9) < 64 * token + slot
    assert abs(rows.size / (32 * 64) - states.size / 6) < 1 / 32 + 1 / 6  # a page and a slot


@pytest.mark.parametrize("which", ["mla", "mamba"])
def test_too_little_memory_names_rows_and_states(hybrid_of, monkeypatch, which):
    """Whichever of them does not fit."""
    from importlib import import_module

    from sgl_kvpool.host.memory import HostTierTooLarge

    module = import_module(f"sglang.srt.mem_cache.pool_host.{'base' if which == 'mla' else which}")
    monkeypatch.setattr(module, "host_memory_budget_bytes", lambda *_: 0)
    text = (
        r"needs 0\.\d+ GB for \d+ (tokens|states) .*--hicache-ratio.*"
        r"it was to have \d+\.\d+ GB of rows and \d+\.\d+ GB of states of linear layers$"
    )
    with pytest.raises(HostTierTooLarge, match=text):
        hybrid_of()


def test_hybrids_whose_rows_are_sglangs_keep_its_host_pools(hybrid_of, monkeypatch):
    """SGLang's pool of states, and its split of a size."""
    from hybrid_tier import state_pool
    from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    hybrid_of()  # with our hooks
    seen = []

    class Stop(Exception):
        pass

    def stop(self, *args, **kwargs):
        seen.append((type(self).__name__, args[2]))
        raise Stop

    monkeypatch.setattr(hybrid_pool_assembler.MambaPoolHost, "__init__", stop)
    states = state_pool()
    stock = MLATokenToKVPool(
        8, 1, torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64, layer_num=2, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    (info,) = states.get_device_pool_infos()
    with pytest.raises(Stop):
        hybrid_pool_assembler.build_mamba_host_pool(states, info, host_size=1.5, layout="page_first")
    assert seen == [("MambaPoolHost", 1.5)]
    device = [pool.get_kv_size_bytes() for pool in (stock, states)]
    assert hybrid_pool_assembler._split_hicache_size(3, (stock, states)) == pytest.approx(
        tuple(3 * n / sum(device) for n in device)
    )


# -------------------------------------------------------------------- both or neither


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("which", ["rows", "states"])
def test_a_lost_backup_is_a_miss_of_both(hybrid_of, failures, monkeypatch, which, tree):
    model = hybrid_of(tree=tree)
    short, longer = prompt(4), prompt(9)
    model.put(short)
    with monkeypatch.context() as patched:
        break_backups(model.tiers[which == "states"], patched)
        model.put(longer)
    assert failures() == {"backup": 1, "backup_lost": 1}
    model.evict()
    model.check(longer, 0)
    assert failures()["load_pages"] == 1
    model.check(short, 4)
    # Now the short prefix is on the device. The longer one is still a miss, and the request goes on from the
    # short one: with that one's state, not with an empty one.
    model.check(longer, 4)
    free = model.requests.mamba_allocator.available_size()
    model.check(longer, 4)
    assert model.requests.mamba_allocator.available_size() == free
    # Computed again it is served from the device, until it leaves it.
    model.put(longer)
    model.check(longer, 9)
    model.evict()
    model.check(longer, 0)


@pytest.mark.parametrize("which", ["rows", "states"])
def test_a_lost_backup_is_a_miss_of_index_keys_too(hybrid_of, kernels, failures, monkeypatch, which):
    model = hybrid_of(page_size=64, sparse=True, drafts=("hybrid",))
    short, longer = prompt(64), prompt(192)
    model.put(short)
    with monkeypatch.context() as patched:
        break_backups(model.tiers[which == "states"], patched)
        model.put(longer)
    assert failures()["backup_lost"] == 1
    model.evict()
    before = [layer.copy() for layer in (*model.row_layers(), *model.index_layers())]
    model.check(longer, 0)
    assert all(map(np.array_equal, before, (*model.row_layers(), *model.index_layers())))
    model.check(short, 64)
    model.check(longer, 64)
    model.put(longer)
    model.check(longer, 192)


@pytest.mark.parametrize("which", [0, 1])
def test_host_slots_that_are_nobodys_are_a_miss_of_both(hybrid_of, failures, which):
    model = hybrid_of()
    model.put(prompt(4))
    model.put(prompt(9))
    model.evict()
    model.check(prompt(4), 4)
    model.tiers[which].slot_used[:] = False
    free = [model.cache.token_to_kv_pool_allocator.available_size(),
            model.requests.mamba_allocator.available_size()]  # fmt: skip
    model.check(prompt(9), 4)
    assert failures() == {"load_pages": 1}
    assert model.controller.load_queue == []
    assert free == [model.cache.token_to_kv_pool_allocator.available_size(),
                    model.requests.mamba_allocator.available_size()]  # fmt: skip


def test_no_device_slot_for_the_state_is_a_miss_of_the_rows(hybrid_of):
    """SGLang gives the rows' slots back; the request has the state of where it goes on from."""
    model = hybrid_of()
    model.put(prompt(4))
    model.put(prompt(9))
    model.evict()
    model.check(prompt(4), 4)
    (entry,) = [e for e in model.controller.mem_pool_host.entries if e.host_pool is model.tiers[1]]
    entry.device_alloc_fn, entry.device_evict_fn = (lambda count: None), None
    free = model.cache.token_to_kv_pool_allocator.available_size()
    model.check(prompt(9), 4)
    assert model.cache.token_to_kv_pool_allocator.available_size() == free


@pytest.mark.parametrize("given", [[5, 5], [0], [7]])
def test_device_slots_of_states_that_are_none(hybrid_of, failures, given):
    """Of SGLang's allocator: slot 0 takes writes of padded tokens, a slot twice would get two owners."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    model = hybrid_of()
    rows, states = model.tiers
    states_there = torch.tensor(given)
    taken = model.cache.token_to_kv_pool_allocator.alloc(4)
    free = [tier.available_size() for tier in model.tiers]
    backup = [PoolTransfer(name=PoolName.MAMBA, device_indices=states_there)]
    assert model.controller.write(taken, node_id=1, extra_pools=backup) is None
    assert failures() == {"backup_pages": 1}
    assert free == [tier.available_size() for tier in model.tiers]
    load = [
        PoolTransfer(name=PoolName.MAMBA, host_indices=states.alloc(len(given)), device_indices=states_there)
    ]
    assert model.controller.load(rows.alloc(4), node_id=1, extra_pools=load) is None
    assert failures() == {"backup_pages": 1, "load_pages": 1}
    assert (model.controller.load_queue, model.controller.write_queue) == ([], [])


def test_a_full_host_pool_of_states_backs_up_neither(hybrid_of):
    """SGLang evicts other states of the host first; if none can go, the rows are not backed up either."""
    model = hybrid_of(slots=8, tokens=64)
    rows, states = model.tiers
    taken = states.alloc(states.available_size())
    (entry,) = [e for e in model.controller.mem_pool_host.entries if e.host_pool is states]
    assert entry.host_evict_fn is not None
    free = rows.available_size()
    model.put(prompt(4))
    assert rows.available_size() == free
    model.evict()
    model.check(prompt(4), 0)
    states.free(taken)
    model.put(prompt(4))
    model.evict()
    model.check(prompt(4), 4)


def test_torch_carries_out_what_an_engine_could_not(hybrid_of, failures, caplog):
    model = hybrid_of("fp8")
    states = model.tiers[1]
    broken(states._lanes.to_host)
    broken(states._lanes.to_device)
    model.put(prompt(5))
    model.evict()
    model.check(prompt(5), 5)
    parts = len(states._view.group.layers)
    assert failures() == {"backup": 1, "load": parts}
    assert "broken on purpose" in caplog.text


def test_states_whose_load_fails_twice_stop_the_server(hybrid_of, monkeypatch, caplog):
    model = hybrid_of()
    model.put(prompt(4))
    model.evict()
    lanes = model.tiers[1]._lanes.to_device
    broken(lanes)
    torch_too(lanes, monkeypatch)
    with pytest.raises((OSError, AttributeError)):
        model.serve(prompt(4))
    assert "transfer of 2 pages to_device failed" in caplog.text


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_whatever_fails_in_whatever_order(hybrid_of, monkeypatch, page_size, tree, policy):
    """Prompts that share prefixes, pools that are too small, evictions on both sides, lost backups."""
    random = np.random.default_rng(page_size)
    model = hybrid_of(
        page_size=page_size, tokens=24, slots=7, tree=tree, sizes={"hicache_ratio": 1.2},
        arrangement="page_major", policy=policy,
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
                break_backups(model.tiers[random.integers(2)], patched)
            make_room(model, len(tokens))
            model.put(tokens)
        if random.random() < 0.5:
            model.evict(tokens=int(random.integers(0, 30)) * page_size, states=int(random.integers(0, 4)))
        for tokens in (prompts[random.integers(len(prompts))] for _ in range(3)):
            make_room(model, len(tokens))
            model.check(shorter[tuple(tokens)] or tokens)  # which is on the device then, with its state
            lengths.append(model.check(tokens))
            served += lengths[-1] > 0
    assert served > 20
    assert 0 in lengths
    model.cache.sanity_check()


def make_room(model, tokens):
    """As SGLang before it computes or loads: what does not fit is pushed out, and no more."""
    rows = tokens - model.cache.token_to_kv_pool_allocator.available_size()
    states = 3 - model.requests.mamba_allocator.available_size()
    if rows > 0 or states > 0:
        model.evict(max(rows, 0), max(states, 0))
