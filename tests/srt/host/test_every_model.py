"""Whatever attention reads of a token comes back from the host, for every kind of model with a tier."""

import numpy as np
import pytest
from cases import crossed
from codec_oracle import LAYOUTS
from host_tier import LABELS
from model_kinds import KINDS
from test_hybrid_stores import fetched, stored
from test_hybrid_tree import TREES


def sizes_of(kind):
    """SGLang serves index keys in pages of 64 tokens only."""
    return [64] if KINDS[kind].sparse else [1, 64]


CASES = crossed([(kind, page_size) for kind in KINDS for page_size in sizes_of(kind)], TREES)
CASES = [(*case, tree) for case, tree in CASES]


def family(page_size):
    """A prefix of two pages, two suffixes of it, and another prompt."""
    prefix = list(range(2 * page_size))
    one, two = (prefix + list(range(at, at + page_size)) for at in (1000, 2000))
    return prefix, one, two, list(range(5000, 5000 + 2 * page_size))


@pytest.mark.parametrize(("kind", "page_size", "tree"), CASES)
def test_two_suffixes_of_a_prefix(model_of, kind, page_size, tree):
    """The tree splits the first prompt's node: on the device, and again where it is on the host only."""
    model = model_of(kind, page_size=page_size, tree=tree, pages=16)
    prefix, one, two, other = family(page_size)
    assert model.returned(one, two, other) == list(map(len, (one, two, other)))
    model.put(prefix)
    model.evict()
    assert model.check(prefix + other) == len(prefix)
    model.evict(page_size)  # the least recently used leaf alone
    assert [model.check(tokens) for tokens in (two, one, prefix)] == [len(two), len(one), len(prefix)]
    model.evict()
    deeper = one[: 2 * page_size] + list(range(7000, 7000 + page_size))
    model.put(deeper)  # computed again behind a prefix that is on the host
    model.evict()
    assert [model.check(tokens) for tokens in (deeper, one, two)] == [3 * page_size] * 3


@pytest.mark.parametrize(("kind", "page_size", "tree"), CASES)
def test_a_split_while_the_backup_runs(model_of, kind, page_size, tree):
    model = model_of(kind, page_size=page_size, tree=tree, pages=16)
    _, one, two, _ = family(page_size)
    model.put(one, two, settle=False)
    model.settle()
    model.evict()
    assert [model.check(tokens) for tokens in (two, one)] == [len(two), len(one)]


@pytest.mark.parametrize(("kind", "host"), crossed([*KINDS], ["fp8_block_scale", "fp4", "fp4_fp8_rope"]))
def test_narrower_hosts_return_the_round_trip(model_of, kind, host):
    model = model_of(kind, "bf16", host, 64, pages=16)
    _, one, two, _ = family(64)
    assert model.returned(one, two) == [len(one), len(two)]


@pytest.mark.parametrize(("kind", "page_size", "tree"), CASES)
def test_any_order_of_prompts_and_evictions(model_of, kind, page_size, tree):
    """A random walk: whatever is found is right."""
    seed = CASES.index((kind, page_size, tree))
    # Copies of keys and values of heads are replaced (`kernels`) for one label only.
    label = LABELS[0 if KINDS[kind].own == "heads" else seed // 2 % 2]
    model = model_of(
        kind, LAYOUTS[seed % len(LAYOUTS)], page_size=page_size, tree=tree, ratio=4.0, pages=16, slots=8,
        label=label, hicache_write_policy=["write_through", "write_back"][seed % 3 % 2],
    )  # fmt: skip
    generator = np.random.default_rng(seed)
    prefix, one, two, other = family(page_size)
    known, found = [prefix, one, two, other, one + other, two + prefix], 0
    for _ in range(24):
        tokens = known[generator.integers(len(known))]
        if generator.integers(2):
            model.evict(int(generator.integers(1, 8)) * page_size, int(generator.integers(3)))
        length = model.check(tokens)
        found += length
        if length < len(tokens):
            model.evict(16 * page_size, 8)
            model.put(tokens)
    assert found


@pytest.mark.parametrize("kind", KINDS)
def test_a_restarted_server_reads_everything_from_the_store(model_of, tmp_path, kind):
    _, one, two, _ = family(64)
    stored(model_of(kind, page_size=64, pages=16, store=tmp_path), one, two)
    again = model_of(kind, page_size=64, pages=16, store=tmp_path)
    for tokens in (two, one):
        assert fetched(again, tokens) == len(tokens)
    if KINDS[kind].own == "dense":  # SGLang's stores compute addresses of such pages from its own sizes
        draft = again.host_pools[-1]
        assert {path.stat().st_size for path in tmp_path.glob("*.draft_*")} == {draft.page_bytes}
