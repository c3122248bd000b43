"""Transfer plans, carried out run by run, against plain indexing, for all pairs of arrangements."""

import ctypes
import itertools

import engine_cases
import numpy as np
import pytest
import torch
from engine_cases import ARRANGEMENTS
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kvpool.memory.canonical import CanonicalGroup, CanonicalKVCaches, LayerReference
from sgl_kvpool.memory.runs import PageRuns
from sgl_kvpool.transfer.plan import TransferPlan

LAYERS, PAGES, TOKENS, ROW = 3, 7, 4, 5


def side(arrangement, fill, layers=LAYERS, pages=PAGES, tokens=TOKENS, row=ROW, content="rows"):
    """Caches of `layers` layers, and their bytes `[layer, page, token, byte]`, int8."""
    caches, rows = engine_cases.device_pool(arrangement, pages, tokens, row, "cpu", layers, content)
    found = rows.view(torch.int8).numpy()
    found[...] = fill if np.isscalar(fill) else fill(found.shape)
    return caches, found


def distinct(shape):
    return (np.arange(np.prod(shape)).reshape(shape) * 37 % 127).astype(np.int8)


def copies_of(runs, source_pages, target_pages):
    """(source address, target address, bytes) of every run of every page, as the module's formula says."""
    return [
        (
            run.source_address + source * run.source_page_stride + i * run.source_run_stride,
            run.target_address + target * run.target_page_stride + i * run.target_run_stride,
            run.run_bytes,
        )
        for run in runs
        for source, target in zip(source_pages, target_pages, strict=True)
        for i in range(run.run_count)
    ]


@pytest.mark.parametrize(("device", "host"), list(itertools.product(ARRANGEMENTS, repeat=2)))
@given(data=st.data())
@settings(max_examples=25)
def test_pages_arrive_and_nothing_else_changes(device, host, data):
    """Any lists, all layers or some; every byte not meant stays 0xEE, the source as it was."""
    source, from_pages = side(device, distinct)
    target, to_pages = side(host, -18, pages=PAGES + 2)
    taken = data.draw(st.lists(st.integers(0, PAGES - 1), max_size=PAGES))
    put = data.draw(st.permutations(range(PAGES + 2)))[: len(taken)]
    layers = sorted(data.draw(st.sets(st.integers(0, LAYERS - 1))))
    plan = TransferPlan(source, target, "kv")
    before, expected = from_pages.copy(), to_pages.copy()
    for layer in layers:
        expected[layer, put] = from_pages[layer, taken]
    plan.check_pages(np.array(taken, dtype=np.int64), np.array(put, dtype=np.int32))
    copies = copies_of(plan.copy_runs_of(layers), taken, put)
    for from_address, to_address, size in copies:
        ctypes.memmove(to_address, from_address, size)
    assert np.array_equal(to_pages, expected)
    assert np.array_equal(from_pages, before)
    assert sum(size for *_, size in copies) == len(taken) * len(layers) * TOKENS * ROW


@pytest.mark.parametrize(
    ("device", "host", "copy_runs", "runs_of_a_page"),
    [
        ("page_major", "page_major", 1, 1),
        ("token_major", "token_major", 1, 1),
        ("layer_major", "layer_major", LAYERS, LAYERS),
        ("layer_major", "page_major", LAYERS, LAYERS),
        ("page_major", "layer_major", LAYERS, LAYERS),
        ("token_major", "page_major", LAYERS, LAYERS * TOKENS),
        ("token_major", "layer_major", LAYERS, LAYERS * TOKENS),
    ],
)
def test_as_few_runs_as_the_bytes_allow(device, host, copy_runs, runs_of_a_page):
    plan = TransferPlan(side(device, 0)[0], side(host, 0)[0], "kv")
    assert len(plan.copy_runs) == copy_runs
    assert sum(run.run_count for run in plan.copy_runs) == runs_of_a_page
    assert plan.copy_runs_of([]) == ()


@pytest.mark.parametrize(
    ("source", "target", "error", "message"),
    [
        ([0, 7], [0, 1], ValueError, "source pages 0 to 7 requested; group kv has 7"),
        ([0], [-1], ValueError, "target pages -1 to -1 requested"),
        ([0, 1], [2], ValueError, "2 source pages for 1 target pages"),
        ([0, 1], [2, 2], ValueError, "a target page is listed twice"),
        ([0.0], [1.0], TypeError, "expected a 1-d array of integers"),
        ([True], [True], TypeError, "expected a 1-d array of integers"),
        ([[0]], [[1]], TypeError, "expected a 1-d array of integers"),
    ],
)
def test_invalid_page_lists_are_refused(source, target, error, message):
    plan = TransferPlan(side("page_major", 0)[0], side("layer_major", 0)[0], "kv")
    with pytest.raises(error, match=message):
        plan.check_pages(np.array(source), np.array(target))
    with pytest.raises(TypeError, match="source pages are list"):
        plan.check_pages([0], np.array([1]))


@pytest.mark.parametrize("other", [{"content": "e5m2"}, {"layers": 2}, {"tokens": 2, "row": 10}, {"row": 6}])
def test_sides_that_differ(other):
    with pytest.raises(ValueError, match="the layers of group kv differ, or the meaning of their bytes"):
        TransferPlan(side("page_major", 0)[0], side("layer_major", 0, **other)[0], "kv")


def test_runs_that_cannot_be_paired():
    """Four runs of 10 on one side, five of 8 on the other."""

    def strided(count, size):
        tensor = torch.zeros(3, 100, dtype=torch.int8)
        strides = {"run_count": count, "run_stride_bytes": size + 5}
        runs = PageRuns(tensor_index=0, offset_bytes=0, run_bytes=size, **strides)
        layer = LayerReference(layer_id=0, part="kv", runs=runs, content="x")
        group = CanonicalGroup(name="kv", layers=(layer,), num_pages=3, page_size_tokens=4)
        return CanonicalKVCaches((tensor,), (group,))

    with pytest.raises(ValueError, match="4 runs of 10 bytes on one side and 5 of 8 on the other"):
        TransferPlan(strided(4, 10), strided(5, 8), "kv")
