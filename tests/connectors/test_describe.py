"""`describe` on SGLang's real pools of each kind, compared with the pools' own tensors.

A3, A5, B1 and D5 are items of the vLLM checklist of tests/connectors.
"""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from cases import copy_pages, crossed
from real_pools import LAYOUTS, POOLS, as_bytes, dsa, fill, leaf_tensors, mha, mla, ours, ours_dsa, swa

from sgl_kvpool.connectors.pools import describe

pytestmark = pytest.mark.usefixtures("published")


@pytest.fixture(params=POOLS)
def pool(request, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1" if request.param == "mha-hnd" else "0")
    return POOLS[request.param]()


def test_a3_d5_every_layer_of_every_kind_is_there_and_is_the_pools_own_bytes(pool):
    """A3, D5: all parts of all layers, int8, in the pool's storage, byte for byte."""
    tensors = leaf_tensors(pool)
    fill(tensors)
    caches = describe(pool)
    found = {(g.name, r.layer_id, r.part): (g, r) for g in caches.groups for r in g.layers}
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        group, reference = found[key]
        view = caches.view(group, reference.runs)
        assert view.dtype == torch.int8
        assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert np.array_equal(as_bytes(view), as_bytes(tensor)), key
    assert len(caches.tensors) == len(tensors)


def test_page_counts_and_names(pool):
    kind = type(pool).__name__
    for of_sglang in ("DSATokenToKVPool", "HybridLinearKVPool"):
        kind = of_sglang if of_sglang in kind else kind
    caches = describe(pool)
    found = {g.name: (g.num_pages, g.page_size_tokens) for g in caches.groups}
    states = {"state": (7, None)}
    expected = {
        "DSATokenToKVPool": {"kv": (3, 64)},
        "SWAKVPool": {"full": (4, 4), "window": (3, 4)},
        "HybridLinearKVPool": {"kv": (4, 4), **states},
        "MambaPool": states,
    }.get(kind, {"kv": (4, 4)} if getattr(pool, "page_size", 4) == 4 else {"kv": (12, 1)})
    assert found == expected


def test_a5_a_page_moves_whole_and_alone(pool):
    """A5: copy page 1 of each group to its page 2; every other byte stays."""
    tensors = leaf_tensors(pool)
    caches = describe(pool)
    for group in caches.groups:
        fill(tensors)
        expected = {key: as_bytes(tensor).copy() for key, tensor in tensors.items()}
        for key, raw in expected.items():
            if key[0] == group.name:
                pages = raw.reshape(group.num_pages, -1)  # a view
                assert not np.array_equal(pages[2], pages[1])
                pages[2] = pages[1]
        copy_pages(caches, caches, group.name, [1], [2])
        for key, tensor in tensors.items():
            assert np.array_equal(as_bytes(tensor), expected[key]), key


# -------------------------------------------------------------------- our arranged pools


@pytest.mark.parametrize("arrangement", ["token_major", "page_major"])
@pytest.mark.parametrize(("layout", "page_size"), crossed(LAYOUTS, [1, 2, 61, 64]))
def test_arranged_pools_are_one_tensor_and_a_page_is_one_run(layout, arrangement, page_size):
    pool = ours(layout, arrangement, page_size=page_size, pages=5)
    caches = describe(pool)
    (tensor,) = caches.tensors
    row = pool.row_format.row_bytes
    assert tuple(tensor.shape) == (5, 3 * page_size * row)
    group = caches.group("kv")
    (run,) = group.references
    assert (run.offset_bytes, run.run_bytes, run.run_count) == (0, 3 * page_size * row, 1)
    assert [r.layer_id for r in group.layers] == [5, 6, 7]
    slots = torch.arange(5 * page_size)
    for layer_id in (5, 6, 7):
        rows = pool.get_row_buffer(layer_id).squeeze(1)
        rows[pool.slot_to_row(slots)] = (slots % 251).to(torch.uint8)[:, None] + layer_id
    for layer in group.layers:
        moved = caches.view(group, layer.runs).reshape(5 * page_size, row).view(torch.uint8)
        expected = (np.arange(5 * page_size) % 251).astype(np.uint8) + np.uint8(layer.layer_id)
        assert np.array_equal(moved.numpy(), np.repeat(expected[:, None], row, axis=1))


# -------------------------------------------------------------------- explicit geometry


def test_b1_sizes_that_could_be_taken_for_each_other(monkeypatch):
    """B1: layers, heads and tokens per page from 1 to 3, 2 or 3 pages: many sizes are equal."""
    for layers, pages, heads, page_size in itertools.product((1, 2, 3), (2, 3), (1, 2, 3), (1, 2, 3)):
        for hnd in ("0", "1"):
            monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", hnd)
            size = (pages - 1) * page_size
            pool = mha(page_size, size, heads=heads, dim=2, v_dim=2, layers=layers)
            fill(leaf_tensors(pool))
            caches = describe(pool)
            group = caches.group("kv")
            assert group.num_pages == pages
            assert [tuple(t.shape) for t in caches.tensors] == [(pages, page_size * heads * 4)] * 2 * layers
            assert all(("by head" in r.content) == (hnd == "1") for r in group.layers)
            for layer in range(layers):
                for part, buffers in (("k", pool.k_buffer), ("v", pool.v_buffer)):
                    view = caches.view(group, group.layer(5 + layer, part).runs)
                    assert np.array_equal(as_bytes(view), as_bytes(buffers[layer]))


@pytest.mark.parametrize(("page", "pages"), [(4, 6), (8, 3), (12, 2), (24, 1)])
def test_pages_fold_where_they_divide(page, pages):
    arranged = [partial(ours, "fp4", arrangement) for arrangement in ("token_major", "page_major")]
    for make in (mha, mla, *arranged):
        pool = make(page_size=4, size=20)
        plain, folded = describe(pool), describe(pool, page)
        group = folded.group("kv")
        assert (group.num_pages, group.page_size_tokens) == (pages, page)
        for reference in plain.group("kv").layers:
            other = group.layer(reference.layer_id, reference.part)
            whole = plain.view(plain.group("kv"), reference.runs)
            # Both views have the tokens in one order, so their bytes can be compared page by page.
            whole.copy_(torch.from_numpy(np.arange(whole.numel()) * 7 % 127).view(whole.shape))
            view = folded.view(group, other.runs)
            assert np.array_equal(view.reshape(pages, -1).numpy(), whole.reshape(pages, -1).numpy())
        assert sum(r.size_bytes for r in group.references) == group.bytes_per_page


@pytest.mark.parametrize("make", [dsa, partial(ours_dsa, "fp8_block_scale")])
def test_index_pages_fold_into_pages(make):
    """The indexer's kernels use pages of 64 tokens, whatever the view's page size is."""
    pool = make(size=64 * 5)
    caches = describe(pool, 128)
    group = caches.group("kv")
    assert group.num_pages == 3
    assert group.layer(4, "indexer").runs.size_bytes == 2 * 8448
    assert group.layer(4, "kv").runs.size_bytes == 128 * 656
    with pytest.raises(KeyError):
        group.layer(3, "indexer")  # reuses the top-k of the layer before it


def test_index_keys_in_other_pages_or_with_tails_are_not_described():
    kpool = {"page_size": 256, "size": 512, "index_kpool": 4}
    group = describe(ours_dsa("bf16", **kpool)).group("kv")
    assert group.layer(4, "indexer").runs.size_bytes == 8448  # one page of 256 tokens
    with pytest.raises(TypeError, match="compressed index keys keeps a tail per request"):
        describe(ours_dsa("bf16", **kpool, index_kpool_compress=True, max_running_requests=2))
    with pytest.raises(TypeError, match="has 7 pages of index keys beside 128 .* 64 slots"):
        describe(ours_dsa("bf16", index_buf_size=384))


@pytest.mark.parametrize(
    ("make", "page", "message"),
    [
        (mha, 6, "pages of 6 tokens do not consist of whole pages of the pool, which have 4"),
        (mla, 12, r"MLATokenToKVPool has 12 \+ 4 slots, which are not a multiple of the page size 12"),
        (lambda: mla(size=13), None, r"has 13 \+ 4 slots, which are not a multiple of the page size 4"),
        (dsa, 96, "pages of 96 tokens do not consist of whole pages of the pool, which have 64"),
        (mha, 0, "page_size_tokens=0 is not a positive integer"),
        (swa, 8, "slots, which are not a multiple of the page size 8"),  # 12 + 4 divide, 8 + 4 do not
    ],
)
def test_pages_that_do_not_divide(make, page, message):
    with pytest.raises(ValueError, match=message):
        describe(make(), page)


def mha_pair(first, second):
    return [mha(**{"size": 28, "page_size": 4, "layers": 1, **extra}) for extra in (first, second)]


@pytest.mark.parametrize(
    "make",
    [
        # Equal bytes, different shapes.
        lambda: mha_pair({"heads": 2, "dim": 4, "v_dim": 4}, {"heads": 4, "dim": 2, "v_dim": 2}),
        lambda: mha_pair({"heads": 4}, {"heads": 2, "page_size": 8, "size": 24}),
        lambda: [mla(torch.float8_e4m3fn), mla(torch.float8_e5m2)],
        lambda: [ours("fp8", "page_major"), mla(torch.float8_e5m2)],
        lambda: [ours("fp8", "page_major", k_scales={5: 0.5}), ours("fp8", "page_major")],
        lambda: [mla(page_size=4, size=12), mla(page_size=8, size=24)],
        # Different rows; index keys in different layers.
        lambda: [ours_dsa("fp8"), ours_dsa("bf16")],
        lambda: [ours_dsa("fp4"), ours_dsa("fp4", skip_topk_layers=None)],
        lambda: [ours_dsa("fp8", k_scales={2: 0.5}), ours_dsa("fp8")],
    ],
)
def test_bytes_that_mean_something_else_do_not_move(make):
    source, target = map(describe, make())
    with pytest.raises(ValueError, match="the layers of group kv differ, or the meaning of their bytes"):
        copy_pages(source, target, "kv", [0], [1])


def test_pages_split_by_head_do_not_move_to_another_page_size(monkeypatch):
    """The heads of 8 tokens are in another order in two pages of 4 tokens than in a page of 8."""
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    source, target = mha_pair({"dim": 2, "v_dim": 2}, {"dim": 2, "v_dim": 2, "page_size": 8, "size": 24})
    views = describe(source, 8), describe(target)
    assert views[0].group("kv").bytes_per_page == views[1].group("kv").bytes_per_page
    with pytest.raises(ValueError, match="by head in pages of 4.*by head in pages of 8"):
        copy_pages(*views, "kv", [0], [1])
