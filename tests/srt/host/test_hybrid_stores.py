"""SGLang's `file` store under rows and states: a prefix is read with its state, or computed again."""

import os
from array import array
from functools import partial
from pathlib import Path

import pytest
from host_tier import until
from test_controller import broken
from test_hybrid_tree import prompt


def begin_fetch(model, tokens):
    """Ask the store as the scheduler does for a waiting request; returns the request's handle."""
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

    found = model.match(tokens)
    have = found.device_prefix_len
    handle = CacheRequestHandle("r", 0)
    model.cache.prefetch_from_storage(
        handle, found.last_host_node, array("q", tokens[have:]),
        model.cache.get_last_hash_value(found.last_host_node), matched_prefix_tokens=tokens[:have],
    )  # fmt: skip
    return handle


def fetch(model, tokens):
    """Fetch a prompt from the store, and wait until the fetch ends."""
    handle = begin_fetch(model, tokens)
    until(lambda: model.settle() or not model.cache.has_ongoing_prefetch(handle))
    model.cache.pop_prefetch_loaded_tokens(handle)
    for _ in range(3):
        model.settle()


def fetched(model, tokens):
    """Length of the prefix that a request continues after a fetch."""
    fetch(model, tokens)
    return model.check(tokens)


def stored(model, *prompts):
    """Compute prompts, and wait until their backups to the store end."""
    model.put(*prompts)
    until(lambda: model.settle() or not model.cache.ongoing_backup)
    model.controller.detach_storage_backend()


def files(store, states):
    """Files of states, or of rows, the oldest first."""
    found = [Path(store, name) for name in os.listdir(store) if name.endswith(".bin")]
    return sorted((f for f in found if (".mamba" in f.name) == states), key=lambda f: f.stat().st_mtime_ns)


@pytest.mark.parametrize("tree", ["rust", "python"])
@pytest.mark.parametrize(("layout", "kind"), [("fp4", "kda"), ("bf16", "odd"), ("fp8", "three-convs")])
def test_a_restarted_server_finds_prefixes(model_of, store, layout, kind, tree):
    short, longer = prompt(8), prompt(16)
    stored(model_of("hybrid", layout, states=kind, page_size=4, store=store, tree=tree), short, longer)
    assert (len(files(store, True)), len(files(store, False))) == (2, 4)
    again = model_of(
        "hybrid", layout, states=kind, page_size=4, store=store, arrangement="token_major", tree=tree
    )
    again.check(longer, 0)
    assert fetched(again, longer) == 16
    third = model_of("hybrid", layout, states=kind, page_size=4, store=store, tree=tree)
    assert fetched(third, prompt(12)) == 8  # the store has rows of 12 tokens, a state of 8


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path, place=0.5):
    raw = bytearray(path.read_bytes())
    raw[int(place * len(raw))] ^= 1
    path.write_bytes(raw)


def of_another_key(path):
    (other,) = [f for f in files(path.parent, True) if f != path]
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize(
    ("change", "of_states", "kind"),
    [
        *((cut, True, "page_read"), (flip, True, "page_checksum"), (of_another_key, True, "page_checksum")),
        (flip, False, "page_checksum"),
    ],
)
def test_a_damaged_state_or_row_is_a_miss_of_its_prefix(model_of, store, failures, change, of_states, kind):
    short, longer = prompt(8), prompt(16)
    stored(model_of("hybrid", page_size=4, store=store), short, longer)
    change(files(store, of_states)[-1])
    again = model_of("hybrid", page_size=4, store=store)
    assert fetched(again, longer) == 0
    assert failures() == {kind: 1}
    tiers = [tier.available_size() for tier in again.tiers]
    assert tiers == [tier.size for tier in again.tiers]
    fetch(again, short)
    again.check(longer, 8)


@pytest.mark.parametrize("which", ["rows", "states"])
def test_what_was_lost_in_its_backup_is_not_stored(model_of, store, failures, monkeypatch, which):
    short, longer = prompt(8), prompt(16)
    model = model_of("hybrid", page_size=4, store=store)
    model.put(short)
    with monkeypatch.context() as patched:
        broken(model.tiers[which == "states"]._channels.to_host, patched)
        stored(model, longer)
    assert failures() == {"backup": 1, "backup_lost": 1, "page_write": 1}
    assert len(files(store, True)) == (2 if which == "rows" else 1)
    assert len(files(store, False)) == (2 if which == "rows" else 4)
    assert fetched(model_of("hybrid", page_size=4, store=store), longer) == 8


def test_a_state_that_cannot_be_written(model_of, store, failures):
    """Its rows are stored without the state, and never matched at that length."""
    model = model_of("hybrid", page_size=4, store=store)

    def full(key, value=None, *args):
        if key.endswith(".mamba"):
            raise OSError(28, "No space left on device")
        return write(key, value, *args)

    write, model.controller.storage_backend.set = model.controller.storage_backend.set, full
    stored(model, prompt(8))
    assert failures() == {"page_write": 1}
    assert (len(files(store, True)), len(files(store, False))) == (0, 2)
    assert fetched(model_of("hybrid", page_size=4, store=store), prompt(8)) == 0


@pytest.mark.parametrize(("part", "layout"), [("_conv_", "fp4"), ("_temporal", "bf16")])
def test_a_damaged_file_of_nixl_is_a_miss_of_its_state(model_of, store, failures, part, layout):
    """NIXL keeps each part of a state in its own file; one checksum covers all parts."""
    pytest.importorskip("nixl._api", reason="needs nixl and nixl-cu13")
    short, longer = prompt(8), prompt(16)

    def parts():
        return {Path(base, name) for base, _, names in os.walk(store) for name in names if part in name}

    server = partial(model_of, "hybrid", layout, page_size=4, store=store, backend="nixl")
    stored(server(), short)
    of_short = parts()
    stored(server(), longer)
    (of_longer,) = parts() - of_short
    assert len(of_short) == 1
    assert fetched(server(), longer) == 16
    assert failures() == {}
    flip(of_longer)
    third = server()
    assert fetched(third, longer) == 0
    assert failures() == {"page_checksum": 1}
    fetch(third, short)
    third.check(longer, 8)
