"""Byte views from explicit tensors: fixtures D1 and D2, copies of pages, refusals, lookups.

D1 and D2 are items of the vLLM checklist, which test_cross_layer.py explains.
"""

from dataclasses import replace

import pytest
import torch
from cases import copy_pages

from sgl_kvpool.connectors.allocation import allocate_cross_layer, as_canonical
from sgl_kvpool.connectors.cross_layer import LayerPages
from sgl_kvpool.memory import canonical
from sgl_kvpool.memory.canonical import CanonicalKVCaches, LayerReference, TensorList, byte_pages
from sgl_kvpool.memory.runs import PageRuns

PAGES, TOKENS = 10, 16


def group_of(name, layers, pages=PAGES):
    return canonical.CanonicalGroup(name=name, layers=tuple(layers), num_pages=pages, page_size_tokens=TOKENS)


def whole(tensors, layer_id, tensor, part="kv", size_bytes=None):
    """A layer at the beginning of the pages of one tensor."""
    index = tensors.add(tensor)
    size_bytes = tensor.shape[1] if size_bytes is None else size_bytes
    runs = PageRuns(tensor_index=index, offset_bytes=0, run_bytes=size_bytes)
    return LayerReference(layer_id=layer_id, part=part, runs=runs, content="fp16")


def checklist_d1(fill):
    """Attention (4 heads of 64), MLA (head 512), Mamba (64,64)+(63,64) padded, Mamba (64,64)+(64,64); fp16.

    Groups of 3, 3, 3 and 2 layers on the same bytes, a page belonging to one group at a time.
    """
    memory = [torch.full((PAGES, 16384), fill, dtype=torch.int8) for _ in range(3)]
    tensors = TensorList()
    attention = [m.view(torch.float16).view(PAGES, TOKENS, 4, 2 * 64) for m in memory]
    mla = [m.view(torch.float16).view(PAGES, TOKENS, 512) for m in memory]
    groups = [
        group_of("attention", [whole(tensors, i, byte_pages(t, 1, "a")) for i, t in enumerate(attention)]),
        group_of("mla", [whole(tensors, 3 + i, byte_pages(t, 1, "m")) for i, t in enumerate(mla)]),
    ]
    for name, first, count, ssm in (("mamba", 6, 3, 63), ("aligned", 9, 2, 64)):
        references = []
        for i in range(count):
            index = tensors.add(memory[i])
            for part, offset, rows in (("conv_0", 0, 64), ("ssm", 64 * 64 * 2, ssm)):
                runs = PageRuns(tensor_index=index, offset_bytes=offset, run_bytes=rows * 64 * 2)
                references.append(LayerReference(layer_id=first + i, part=part, runs=runs, content="fp16"))
        groups.append(group_of(name, references))
    return CanonicalKVCaches(tuple(tensors.tensors), tuple(groups)), memory


def test_d1_four_groups_on_three_tensors():
    caches, memory = checklist_d1(0)
    assert [tuple(t.shape) for t in caches.tensors] == [(10, 16384)] * 3
    assert [t.data_ptr() for t in caches.tensors] == [m.data_ptr() for m in memory]
    sizes = {
        g.name: [(r.tensor_index, r.offset_bytes, r.size_bytes) for r in g.references] for g in caches.groups
    }
    assert sizes == {
        "attention": [(0, 0, 16384), (1, 0, 16384), (2, 0, 16384)],
        "mla": [(0, 0, 16384), (1, 0, 16384), (2, 0, 16384)],
        "mamba": [(0, 0, 16256), (1, 0, 16256), (2, 0, 16256)],
        "aligned": [(0, 0, 16384), (1, 0, 16384)],
    }
    assert [g.bytes_per_page for g in caches.groups] == [49152, 49152, 48768, 32768]


def padded(fill):
    """The Mamba group of D1 through our allocator: pages of 16256 bytes, 16384 apart."""
    members = [LayerPages(name=i, page_bytes=16256, padded_page_bytes=16384, backend="b") for i in range(3)]
    (group,) = allocate_cross_layer([members], pages=PAGES, arrangement="page_major", device="cpu")
    group.tensor.fill_(fill)
    return group, as_canonical([group], ["mamba"])


def test_d1_d2_padding_of_the_allocator():
    """D1, D2: the tensor's page is padded, the references are not, and a transfer leaves the tails alone."""
    (source, ours), (target, theirs) = padded(5), padded(-18)
    assert tuple(target.tensor.shape) == (10, 3, 16384)
    assert tuple(theirs.tensors[0].shape) == (10, 49152)
    assert [(r.offset_bytes, r.size_bytes) for r in theirs.group("mamba").references] == [
        (0, 16256), (16384, 16256), (32768, 16256),
    ]  # fmt: skip
    assert theirs.group("mamba").bytes_per_page == 48768
    assert tuple(source.layer_view(1).shape) == (10, 16256)
    copy_pages(ours, theirs, "mamba", [7], [2])
    assert (target.tensor[2, :, :16256] == 5).all()
    assert (target.tensor[2, :, 16256:] == -18).all()
    assert (target.tensor[[0, 1, *range(3, 10)]] == -18).all()
    for layer in range(3):
        target.layer_view(layer).fill_(1)
    assert (target.tensor[..., 16256:] == -18).all()


# -------------------------------------------------------------------- validation and lookups


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset_bytes": -1}, "offset_bytes=-1 is not an integer of at least 0"),
        ({"tensor_index": -1}, "tensor_index=-1 is not an integer of at least 0"),
        ({"run_bytes": 0}, "run_bytes=0 is not a positive integer"),
        ({"run_count": 0}, "run_count=0 is not a positive integer"),
        ({"run_count": 2, "run_stride_bytes": 7}, "runs 7 bytes apart overlap"),
    ],
)
def test_invalid_runs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        PageRuns(**{"tensor_index": 0, "offset_bytes": 0, "run_bytes": 8, **change})


def one_layer(**runs):
    runs = {"tensor_index": 0, "offset_bytes": 0, "run_bytes": 8, **runs}
    return LayerReference(layer_id=0, part="kv", runs=PageRuns(**runs), content="fp16")


@pytest.mark.parametrize(
    ("tensor", "layers", "message"),
    [
        (torch.zeros(10, 8), [one_layer()], "tensor 0 is torch.float32"),
        (torch.zeros(10, 2, 4, dtype=torch.int8), [one_layer()], "tensor 0 is torch.int8"),
        (torch.zeros(10, 16, dtype=torch.int8)[:, ::2], [one_layer()], r"stride \(16, 2\)"),
        (torch.zeros(80, dtype=torch.int8).as_strided((10, 8), (7, 1)), [one_layer()], "7 bytes apart"),
        (torch.zeros(9, 8, dtype=torch.int8), [one_layer()], "in 10 pages ends at byte 8, outside"),
        (torch.zeros(10, 7, dtype=torch.int8), [one_layer()], "ends at byte 8, outside of tensor 0"),
        (torch.zeros(10, 8, dtype=torch.int8), [one_layer(tensor_index=1)], "refers to tensor 1, of 1"),
        (
            torch.zeros(10, 32, dtype=torch.int8),
            [one_layer(run_count=2, run_stride_bytes=16), replace(one_layer(offset_bytes=23), part="x")],
            "byte 23 of a page of tensor 0 has two owners",
        ),
        (torch.zeros(10, 16, dtype=torch.int8), [one_layer(), one_layer(offset_bytes=8)], "twice"),
    ],
)  # fmt: skip
def test_invalid_views_are_refused(tensor, layers, message):
    with pytest.raises(ValueError, match=message):
        CanonicalKVCaches((tensor,), (group_of("kv", layers),))


def test_memory_or_a_name_that_is_listed_twice():
    tensor = torch.zeros(10, 8, dtype=torch.int8)
    flat = tensor.view(-1)
    for other in (tensor.view(10, 8), tensor.view(5, 16), flat[40:].view(5, 8), flat[:1].view(1, 1)):
        with pytest.raises(ValueError, match="tensors . and . share memory"):
            CanonicalKVCaches((tensor, other), ())
    CanonicalKVCaches((flat[:40].view(5, 8), flat[40:].view(5, 8)), ())  # side by side
    with pytest.raises(ValueError, match="same name"):
        CanonicalKVCaches((tensor,), (group_of("kv", [one_layer()]), group_of("kv", [one_layer()])))


def test_lookups():
    caches, _ = checklist_d1(0)
    assert caches.group("mamba").layer(7, "ssm").runs.size_bytes == 63 * 64 * 2
    assert caches.group("mla").layer(4).runs.tensor_index == 1
    assert caches.group("mla").page_size_tokens is not None
    with pytest.raises(KeyError, match="no group 'kv'; there are: attention, mla, mamba, aligned"):
        caches.group("kv")
    with pytest.raises(KeyError, match="parts \\['conv_0', 'ssm'\\] of layer 7, requested None"):
        caches.group("mamba").layer(7)
    with pytest.raises(KeyError, match="parts \\[\\] of layer 0"):
        caches.group("mla").layer(0)


def test_byte_pages_refuse_what_they_would_have_to_copy():
    good = torch.zeros(6, 3, dtype=torch.bfloat16)
    assert byte_pages(good, 2, "kv").data_ptr() == good.data_ptr()
    assert tuple(byte_pages(good, 2, "kv").shape) == (3, 12)
    with pytest.raises(ValueError, match=r"kv has shape \(3, 6\) and stride \(1, 3\)"):
        byte_pages(good.t(), 1, "kv")
    with pytest.raises(ValueError, match="kv has 6 units along its first axis, not a multiple of 4 per page"):
        byte_pages(good, 4, "kv")
    assert tuple(byte_pages(torch.zeros(0, 3), 4, "kv").shape) == (0, 0)


def test_one_part_alone():
    """The same tensors and groups; a group without the part has no layers, and nothing else moves."""
    caches, memory = checklist_d1(3)
    alone = caches.only("ssm")
    assert alone.tensors is caches.tensors
    assert [group.name for group in alone.groups] == ["attention", "mla", "mamba", "aligned"]
    assert [group.num_pages for group in alone.groups] == [PAGES] * 4
    assert [len(group.layers) for group in alone.groups] == [0, 0, 3, 2]
    assert alone.group("mamba").layers == tuple(r for r in caches.group("mamba").layers if r.part == "ssm")
    assert alone.group("mamba").bytes_per_page == 3 * 63 * 64 * 2
    assert caches.group("mamba").bytes_per_page == 3 * (64 + 63) * 64 * 2  # unchanged
    assert caches.only("kv").group("mla").layers == caches.group("mla").layers
    with pytest.raises(KeyError):
        alone.group("mamba").layer(6, "conv_0")
    for tensor in memory:
        tensor[1] = 5
    copy_pages(alone, alone, "aligned", [1], [4])
    for number, tensor in enumerate(memory):
        expected = torch.full((16384,), 3, dtype=torch.int8)
        if number < 2:
            expected[64 * 64 * 2 :] = 5
        assert torch.equal(tensor[4], expected)
