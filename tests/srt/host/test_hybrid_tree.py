"""SGLang's tree and controller over our rows and states: a request gets both of one prefix, or neither.

Some tests run with both of SGLang's tree cores: servers use the Rust core, and the Python core where Rust is
absent.
"""

import itertools

import numpy as np
import pytest
import torch
from host_tier import ARRANGEMENTS, LABELS, LAYOUTS, stride_bytes
from hybrid_tier import STATES, Request
from test_controller import Broken, torch_too

TREES = ["rust", "python"]


def prompt(length, first=0):
    return list(range(first, first + length))


def break_backups(tier, patched):
    """Make backups of one tier fail, with the engine and with torch."""
    channels = tier._channels.to_host
    for channel in channels:
        patched.setattr(channel, "engine", Broken(channel.plan))
    torch_too(channels, patched)


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
    model.check(prompt(4) + prompt(3, 500), 4)  # a prompt that diverges behind a prefix


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
    """Ring and Ling with MTP: SGLang lists a draft's hybrid pool, which has the target's states."""
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
    """Models with sparse attention, which SGLang serves with pages of 64 index keys: here, of 64 tokens."""
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
    from sgl_kvpool.layout import MLAKVCacheLayout
    from sgl_kvpool.transfer.conversion import RowConversion
    from sgl_kvpool.transfer.host_options import HostTierOptions

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
    model.evict(tokens=0, states=1)  # the state of the least recently used node, whose rows have a child
    model.check(short, 4)
    model.evict()
    model.check(longer, 9)


def test_a_state_that_comes_after_its_rows_is_backed_up_alone(hybrid_of):
    """Two prompts part in the middle of a node: the first half has rows on the host, but no state."""
    model = hybrid_of()
    model.put(prompt(8))
    model.put(prompt(4) + prompt(4, 200))
    used = model.tiers[0].size - model.tiers[0].available_size()
    model.put(prompt(4))
    assert model.tiers[0].size - model.tiers[0].available_size() == used
    model.evict()
    model.check(prompt(4) + prompt(3, 700), 4)


def test_one_transfer_of_states_for_the_node_and_the_request(hybrid_of):
    """The tree lists both in one operation, so that engines do not start a transfer for each."""
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


# -------------------------------------------------------------------- states locked by copies


def locked(model):
    """Fill the pool of states with prompts whose backups are not acknowledged; returns the prompts."""
    prompts = [prompt(4, 100 * at) for at in range(model.states.size)]
    for tokens in prompts:
        model.put(tokens, settle=False)
    assert model.requests.mamba_allocator.available_size() == 0
    assert model.cache.mamba_evictable_size() == 0
    return prompts


@pytest.mark.parametrize("tree", TREES)
def test_a_hit_waits_for_the_backups_that_lock_all_states(hybrid_of, tree):
    """The request needs a slot for its own copy of the state that it continues."""
    model = hybrid_of(tree=tree)
    prompts = locked(model)
    model.check(prompts[-1], 4)
    model.evict()
    for tokens in prompts:
        model.check(tokens, 4)


@pytest.mark.parametrize("tree", TREES)
def test_a_donation_waits_for_the_backups_that_lock_all_states(hybrid_of, tree):
    """A request that goes on gives its state to the tree, and needs another slot (SGLang's 36770)."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    model = hybrid_of(tree=tree)
    locked(model)
    slot = model.cache.components[ComponentType.MAMBA]._alloc_mamba_slot()
    assert len(slot) == 1


@pytest.mark.parametrize("tree", TREES)
def test_a_batch_waits_for_the_backups_that_lock_all_states(hybrid_of, tree):
    """New requests need slots too, here three at once: `alloc_req_slots` raises where they are missing."""
    from sglang.srt.mem_cache.allocation import ensure_mamba_capacity

    model = hybrid_of(tree=tree)
    locked(model)
    new = [Request(str(at)) for at in range(3)]
    for request in new:
        request.kv.mamba_ping_pong_track_buffer = []  # allocated before
    assert ensure_mamba_capacity(model.requests, new, model.cache)


@pytest.mark.parametrize("tree", TREES)
def test_a_hit_waits_for_the_loads_that_lock_all_states(hybrid_of, tree):
    model = hybrid_of(tree=tree, slots=4)
    first, second = prompt(4), prompt(4, 100)
    for tokens in (first, second):
        model.put(tokens)
    model.evict()
    for tokens in (first, second):
        request = Request()
        model.go_on(tokens, request, cow_mamba=True, req=request)  # a slot for the node, and one for itself
        model.requests.mamba_allocator.free(request.kv.mamba_pool_idx.unsqueeze(0))
    model.put(prompt(4, 200), settle=False)
    model.put(prompt(4, 300), settle=False)
    assert model.cache.mamba_evictable_size() == model.requests.mamba_allocator.available_size() == 0
    model.check(first, 4)


# -------------------------------------------------------------------- sizes


@pytest.mark.parametrize("host", ["same", "fp4"])
def test_gigabytes_are_split_by_the_bytes_of_the_host(hybrid_of, host):
    """Rows and states get equally many host slots per device slot; together they take the requested bytes."""
    from sgl_kvpool.transfer.host_options import HostTierOptions

    model = hybrid_of("bf16", sizes={"hicache_size": 1}, host_tier=HostTierOptions(layout=host))
    rows, states = model.tiers
    taken = rows.size * rows.size_per_token + states.size * states.size_per_token
    assert abs(taken - 1e9) < rows.size_per_token + states.size_per_token
    assert rows.size / 32 == pytest.approx(states.size / 6, rel=1e-3)
    assert rows.size_per_token == stride_bytes(2, 1, {"same": 1152, "fp4": 416}[host])


@pytest.mark.parametrize("drafts", [(), ("hybrid",), ("plain", "plain")])
@pytest.mark.parametrize("host", ["same", "fp4"])
@pytest.mark.parametrize("sparse", [False, True])
def test_gigabytes_are_for_index_keys_and_drafts_too(hybrid_of, kernels, sparse, host, drafts):
    """All pools together take the requested bytes. An index key has 128 one-byte values and a float32."""
    from sgl_kvpool.transfer.host_options import HostTierOptions

    model = hybrid_of(
        "bf16", page_size=64, sparse=sparse, drafts=drafts, sizes={"hicache_size": 1},
        host_tier=HostTierOptions(layout=host),
    )  # fmt: skip
    rows, states = model.tiers
    layers = 2 + len(drafts)
    token = stride_bytes(layers, 64, {"same": 1152, "fp4": 416}[host]) // 64 + layers * (132 if sparse else 0)
    slot = 3 * (3 * 96 * 2 + 2 * 16 * 16 * 4)
    assert abs(rows.size * token + states.size * slot - 1e9) < 64 * token + slot
    assert abs(rows.size / (32 * 64) - states.size / 6) < 1 / 32 + 1 / 6  # a page and a slot


@pytest.mark.parametrize("which", ["mla", "mamba"])
def test_too_little_memory_names_rows_and_states(hybrid_of, monkeypatch, which):
    """The error names both, whichever does not fit."""
    from importlib import import_module

    from sgl_kvpool.srt.host.memory import HostTierTooLarge

    module = import_module(f"sglang.srt.mem_cache.pool_host.{'base' if which == 'mla' else which}")
    monkeypatch.setattr(module, "host_memory_budget_bytes", lambda *_: 0)
    text = (
        r"needs 0\.\d+ GB for \d+ (tokens|states) .*--hicache-ratio.*"
        r"the tier was divided into \d+\.\d+ GB of rows and \d+\.\d+ GB of states of linear layers$"
    )
    with pytest.raises(HostTierTooLarge, match=text):
        hybrid_of()


def test_hybrids_whose_rows_are_sglangs_keep_its_host_pools(hybrid_of, monkeypatch):
    """They keep SGLang's pool of states and its split of a size."""
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
