"""SGLang's tree and controller over our rows and states: a request gets both of one prefix, or neither.

Some tests run with both of SGLang's tree cores: servers use the Rust core, and the Python core where Rust is
absent.
"""

import pytest
from host_tier import stride_bytes
from tree_model import Request

TREES = ["rust", "python"]


def prompt(length, first=0):
    return list(range(first, first + length))


# -------------------------------------------------------------------- there and back


def test_states_alone_are_loaded_where_the_rows_never_left(model_of):
    model = model_of("hybrid")
    short, longer = prompt(4), prompt(9)
    model.put(short, longer)
    model.evict(tokens=0, states=1)  # the state of the least recently used node, whose rows have a child
    model.check(short, 4)
    model.evict()
    model.check(longer, 9)


def test_a_state_that_comes_after_its_rows_is_backed_up_alone(model_of):
    """Two prompts part in the middle of a node: the first half has rows on the host, but no state."""
    model = model_of("hybrid")
    model.put(prompt(8), prompt(4) + prompt(4, 200))
    used = model.tiers[0].size - model.tiers[0].available_size()
    model.put(prompt(4))
    assert model.tiers[0].size - model.tiers[0].available_size() == used
    model.evict()
    model.check(prompt(4) + prompt(3, 700), 4)


# -------------------------------------------------------------------- states locked by copies


def locked(model):
    """Fill the pool of states with prompts whose backups are not acknowledged; returns the prompts."""
    prompts = [prompt(4, 100 * at) for at in range(model.requests.mamba_pool.size)]
    model.put(*prompts, settle=False)
    assert model.requests.mamba_allocator.available_size() == 0
    assert model.cache.mamba_evictable_size() == 0
    return prompts


@pytest.mark.parametrize("tree", TREES)
def test_a_hit_waits_for_the_backups_that_lock_all_states(model_of, tree):
    """The request needs a slot for its own copy of the state that it continues."""
    model = model_of("hybrid", tree=tree)
    prompts = locked(model)
    model.check(prompts[-1], 4)
    model.evict()
    for tokens in prompts:
        model.check(tokens, 4)


@pytest.mark.parametrize("tree", TREES)
def test_a_hit_waits_for_the_loads_that_lock_all_states(model_of, tree):
    model = model_of("hybrid", tree=tree, slots=4)
    first, second = prompt(4), prompt(4, 100)
    model.put(first, second)
    model.evict()
    for tokens in (first, second):
        request = Request()
        model.go_on(tokens, request)  # a slot for the node, and one for itself
        model.requests.mamba_allocator.free(request.kv.mamba_pool_idx.unsqueeze(0))
    model.put(prompt(4, 200), prompt(4, 300), settle=False)
    assert model.cache.mamba_evictable_size() == model.requests.mamba_allocator.available_size() == 0
    model.check(first, 4)


# -------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("kind", "drafts", "host"),
    [("hybrid", ", packed draft", "fp4"), ("hybrid DSA", ", plain packed draft", "same")],
)
def test_gigabytes_are_split_by_the_bytes_of_the_host(model_of, kind, host, drafts):
    """Rows and states get equally many host slots per device slot; all pools together take the bytes.

    An index key has 128 one-byte values and a float32.
    """
    model = model_of(kind + drafts, "bf16", host, 64, hicache_size=0.01)
    rows, states = model.tiers
    layers, index = 2 + bool(drafts), 132 if kind == "hybrid DSA" else 0
    token = stride_bytes(layers, 64, {"same": 1152, "fp4": 416}[host]) // 64 + layers * index
    slot = 3 * (3 * 96 * 2 + 2 * 16 * 16 * 4)
    assert abs(rows.size * token + states.size * slot - 1e7) < 64 * token + slot
    assert abs(rows.size / (32 * 64) - states.size / 6) < 1 / 32 + 1 / 6  # a page and a slot


@pytest.mark.parametrize("which", ["mla", "mamba"])
def test_too_little_memory_names_rows_and_states(model_of, monkeypatch, which):
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
        model_of("hybrid")
