"""Cross-layer buffers against numpy's transposition of axes, and shapes of models that vLLM serves.

Names and docstrings with A1 to D5 refer to the vLLM checklist: defects and fixtures of vLLM's pull requests
37090 (A), 42374 (B), 34373 (C) and 37853 (D).
"""

import itertools

import numpy as np
import pytest
import torch

from sgl_kvpool.connectors.allocation import allocate_cross_layer, allocate_states, as_canonical
from sgl_kvpool.connectors.cross_layer import LayerPages

READER = object()
#: Axes in memory, from the outermost; written here once more, as the oracle.
ORDER = {"page_major": "BLXC", "token_major": "BXLC", "head_major": "BXLC"}
SIZES = list(itertools.product((1, 2, 3), repeat=4))


def layers(names, page_bytes, **extra):
    extra = {"backend": READER, **extra}
    return [LayerPages(name=name, page_bytes=page_bytes, **extra) for name in names]


def one_group(order, count, pages, chunks, chunk_bytes, device="cpu"):
    """`count` layers of `chunks` tokens or heads."""
    axis = {"head_major": "heads", "token_major": "page_size_tokens", "page_major": "page_size_tokens"}[order]
    members = layers(range(count), chunks * chunk_bytes, **{axis: chunks})
    (group,) = allocate_cross_layer([members], pages=pages, arrangement=order, device=device)
    return group


def addresses(order, count, pages, chunks, chunk_bytes):
    """Address of byte [layer, page, chunk, byte] as an array, by numpy alone."""
    sizes = {"L": count, "B": pages, "X": chunks, "C": chunk_bytes}
    in_memory = np.arange(count * pages * chunks * chunk_bytes).reshape([sizes[a] for a in ORDER[order]])
    return in_memory.transpose([ORDER[order].index(axis) for axis in "LBXC"])


def filled(group):
    """Fill the group's bytes with a pattern that repeats after 251 bytes; return them as numpy."""
    raw = group.tensor.view(-1).numpy()
    raw[:] = (np.arange(raw.size) * 37 % 251).astype(np.uint8).view(np.int8)
    return raw


def addresses_of(view, group):
    """Address of every byte of an int8 view, counted from the beginning of the group's buffer."""
    begin = view.data_ptr() - group.tensor.data_ptr()
    return begin + np.tensordot(view.stride(), np.indices(view.shape), axes=1)


@pytest.mark.parametrize("order", ORDER)
def test_b1_b3_b4_views_are_the_bytes_at_the_address_and_cover_the_buffer(order):
    """B1 to B4: all sizes from {1, 2, 3}; views both ways, references, every byte of one storage once."""
    for sizes in SIZES:
        count, pages, chunks, _ = sizes
        group = one_group(order, *sizes)
        where = addresses(order, *sizes)
        raw = filled(group)
        caches = as_canonical([group], ["kv"])
        covered = {"views": [], "runs": []}
        for layer in range(count):
            expected = raw[where[layer]]  # [pages, chunks, chunk_bytes]
            view = group.layer_view(layer)
            assert view.data_ptr() - group.tensor.data_ptr() == where[layer].min()
            assert np.array_equal(view.numpy().reshape(expected.shape), expected), sizes
            runs = caches.group("kv").layer(layer).runs
            moved = caches.view(caches.group("kv"), runs)
            assert np.array_equal(moved.reshape(pages, -1).numpy(), expected.reshape(pages, -1)), sizes
            covered["views"].extend(addresses_of(view, group).ravel())
            covered["runs"].extend(addresses_of(moved, group).ravel())
        for kind, found in covered.items():
            assert sorted(found) == list(range(raw.size)), (kind, sizes)  # a bijection
        for layer in range(count):
            before = raw.copy()
            group.layer_view(layer).fill_(-1)
            changed = np.flatnonzero(raw != before)
            assert set(changed) <= set(where[layer].ravel())  # A5
            assert (raw[where[layer]] == -1).all()
            raw[:] = before
        assert group.chunks == (1 if order == "page_major" else chunks)


# -------------------------------------------------------------------- exact shapes of the checklist


def test_gpt_oss_head_major():
    page = 2 * 16 * 4 * 64 * 2
    pairs = [layers([f"{kind}.{i}" for i in range(12)], page, heads=4) for kind in ("full", "sliding")]
    (group,) = allocate_cross_layer(pairs, pages=66511, arrangement="head_major", device="meta")
    assert tuple(group.tensor.shape) == (66511, 4, 12, 4096)
    assert group.tensor.stride() == (196608, 49152, 4096, 1)
    view = group.layer_view("sliding.11").view(torch.bfloat16).view(66511, 4, 2, 16, 64)
    view = view.permute(0, 2, 3, 1, 4)
    assert tuple(view.shape) == (66511, 2, 16, 4, 64)
    assert view.stride() == (196608 // 2, 1024, 64, 49152 // 2, 1)


def test_c1_a_hybrid_of_three_sets():
    """C1: [full.0, full.1], [sw.0, sw.2], [sw.1, sw.3], 2048 each: one tensor (10, 4096), a run per set."""
    sets = [layers(names, 2048) for names in (["full.0", "full.1"], ["sw.0", "sw.2"], ["sw.1", "sw.3"])]
    groups = allocate_cross_layer(sets, pages=10, arrangement="page_major", device="cpu")
    caches = as_canonical(groups, ["full", "sw_a", "sw_b"])
    (tensor,) = caches.tensors
    assert tuple(tensor.shape) == (10, 4096)
    assert tensor.dtype == torch.int8
    assert tensor.is_contiguous()
    for name in ("full", "sw_a", "sw_b"):
        (reference,) = caches.group(name).references
        assert (reference.offset_bytes, reference.size_bytes, reference.run_count) == (0, 4096, 1)
        assert caches.group(name).bytes_per_page == 4096
    assert caches.group("sw_a").layer("sw.2").runs.offset_bytes == 2048
    assert groups[0].layer_view("sw.3").data_ptr() == groups[0].layer_view("full.1").data_ptr()


@pytest.mark.parametrize("arrangement", ["page_major", "token_major", "head_major"])
def test_c2_a_hole_is_listed_and_never_read_written_or_counted(arrangement):
    """C2: sets of 3, 3, 3 and 2 layers."""
    names = [[f"{s}.{i}" for i in range(count)] for s, count in enumerate((3, 3, 3, 2))]
    sets = [layers(some, 48, heads=3, page_size_tokens=4) for some in names]
    groups = allocate_cross_layer(sets, pages=10, arrangement=arrangement, device="cpu")
    (group,) = groups
    assert group.holes == ((3, 2),)
    caches = as_canonical(groups, list("abcd"))
    assert [caches.group(name).bytes_per_page for name in "abcd"] == [144, 144, 144, 96]
    last = caches.group("d")
    group.tensor.fill_(-18)  # 0xEE
    for reference in last.references:
        caches.view(last, reference).fill_(1)
    position = {"page_major": (slice(None), 2), "token_major": (slice(None), slice(None), 2)}
    hole = group.tensor[position.get(arrangement, position["token_major"])]
    assert (hole == -18).all()
    assert int((group.tensor == 1).sum()) == 10 * 96
    # A page of a set without holes is still one run, a page of the last set one run per chunk.
    assert [len(caches.group(name).references) for name in "abcd"] == [1, 1, 1, 1]
    assert caches.group("a").references[0].run_count == 1
    assert last.references[0].run_count == group.chunks


def test_c3_equal_is_not_identical():
    """C3: backends that compare equal but are different objects do not share a buffer."""

    class Backend:
        def __eq__(self, other):
            return True

        def __hash__(self):
            return 1

    one, other = layers(["a"], 64, backend=Backend()), layers(["b"], 64, backend=Backend())
    assert one[0].backend == other[0].backend
    groups = allocate_cross_layer([[*one, *other]], pages=2, arrangement="page_major", device="cpu")
    assert [group.positions for group in groups] == [1, 1]
    with pytest.raises(KeyError, match="layer 'b' is not in this group"):
        groups[0].layer_view("b")


def test_c4_mixed_page_sizes_are_separate_and_none_is_padded():
    """C4."""
    sets = [layers(["a", "b"], 64), layers(["c"], 64) + layers(["d"], 96)]
    groups = allocate_cross_layer(sets, pages=3, arrangement="page_major", device="cpu")
    assert [(g.positions, g.span_bytes) for g in groups] == [(2, 64), (1, 96)]
    caches = as_canonical(groups, ["one", "two"])
    assert [tuple(t.shape) for t in caches.tensors] == [(3, 128), (3, 96)]
    assert caches.group("two").bytes_per_page == 160
    assert groups[0].holes == ((1, 1),)
    assert groups[1].holes == ((0, 0),)


def test_c5_states_are_separate_tensors():
    """C5: states (4, 2) and (8,) float32, 2 slots, 2 layers, filled with 42 and 99."""
    states = allocate_states({0: {"conv": 32, "ssm": 32}, 1: {"conv": 32, "ssm": 32}}, slots=2, device="cpu")
    (pages,) = allocate_cross_layer([layers([2, 3], 64)], pages=5, arrangement="page_major", device="cpu")
    caches = as_canonical([pages], ["kv"], states)
    assert [tuple(t.shape) for t in caches.tensors] == [(5, 128)] + [(2, 32)] * 4
    group = caches.group("state")
    assert group.page_size_tokens is None
    assert group.num_pages == 2
    states[0, "conv"][0].view(torch.float32).fill_(42)
    states[1, "ssm"][1].view(torch.float32).fill_(99)
    for (layer, kind), state in states.items():
        view = caches.view(group, group.layer(layer, kind).runs)
        assert view.data_ptr() == state.data_ptr()
        expected = torch.zeros(2, 8)
        expected[0] = 42 if (layer, kind) == (0, "conv") else 0
        expected[1] = 99 if (layer, kind) == (1, "ssm") else 0
        assert torch.equal(view.reshape(2, 32).view(torch.float32), expected)
    assert (pages.tensor == 0).all()


# -------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("extra", "arrangement", "message"),
    [
        ({"page_size_tokens": 3}, "token_major", "64 bytes cannot be split into 3 chunks"),
        ({"heads": 2, "padded_page_bytes": 128}, "head_major", "head_major page cannot be padded"),
        ({}, "layer_major", "layer_major keeps layers apart"),
        ({}, "nhd", "unknown KV cache arrangement 'nhd'"),
    ],
)  # fmt: skip
def test_pages_an_arrangement_cannot_cut(extra, arrangement, message):
    with pytest.raises(ValueError, match=message):
        allocate_cross_layer([layers(["a"], 64, **extra)], pages=2, arrangement=arrangement, device="cpu")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"page_bytes": 0}, "page_bytes=0 is not a positive integer"),
        ({"page_bytes": True}, "page_bytes=True is not"),
        ({"heads": -1}, "heads=-1 is not"),
        ({"padded_page_bytes": 63}, "padded_page_bytes=63 is less than the page.s 64 bytes"),
        ({"backend": None}, "layer a names no backend"),
    ],
)
def test_invalid_layers_are_refused(extra, message):
    with pytest.raises(ValueError, match=message):
        LayerPages(**{"name": "a", "page_bytes": 64, "backend": READER, **extra})


@pytest.mark.parametrize(
    ("sets", "pages", "message"),
    [
        ([], 2, "give at least one"),
        ([["a", "b"], ["a"]], 2, "each once"),
        ([["a"]], 0, "pages=0 is not a positive integer"),
    ],
)
def test_invalid_sets_and_page_counts_are_refused(sets, pages, message):
    sets = [layers(s, 8) for s in sets]
    with pytest.raises(ValueError, match=message):
        allocate_cross_layer(sets, pages=pages, arrangement="page_major", device="cpu")


def test_views_of_what_was_not_allocated_together():
    sets, others = ([layers([name], 8) for name in names] for names in ("ab", "cd"))
    groups = allocate_cross_layer(sets, pages=2, arrangement="page_major", device="cpu")
    other = allocate_cross_layer(others, pages=5, arrangement="page_major", device="cpu")
    for names in (["one"], ["one", "two", "three"]):
        with pytest.raises(ValueError, match=f"{len(names)} names for"):
            as_canonical(groups, names)
    with pytest.raises(ValueError, match=r"groups of \[2, 5\] pages were not allocated together"):
        as_canonical([*groups, *other], ["one", "two"])
    states = {(0, "conv"): torch.zeros(4, 8), (0, "ssm"): torch.zeros(3, 8)}
    with pytest.raises(ValueError, match=r"states of \[3, 4\] slots"):
        as_canonical(groups, ["one", "two"], states)
    whole = as_canonical(groups, ["one", "two"], {(0, "conv"): torch.zeros(4, 8)})
    assert whole.group("state").bytes_per_page == 32  # of float32
