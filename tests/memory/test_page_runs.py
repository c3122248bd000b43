"""Runs of bytes simplified, folded over pages and merged: the bytes that they mean stay the same."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_kvpool.memory.runs import PageRuns, merged


def places(runs, pages=1, page_bytes=0):
    """Offset of every byte of the runs, by their definition, in `pages` pages."""
    return [
        p * page_bytes + runs.offset_bytes + i * runs.run_stride_bytes + b
        for p in range(pages)
        for i in range(runs.run_count)
        for b in range(runs.run_bytes)
    ]


runs_strategy = st.builds(
    lambda offset, size, count, gap: PageRuns(
        tensor_index=0, offset_bytes=offset, run_bytes=size, run_count=count, run_stride_bytes=size + gap
    ),
    st.integers(0, 9),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 6),
)


@given(runs_strategy)
def test_simplified_runs_mean_the_same_bytes(runs):
    assert sorted(places(runs.simplified())) == sorted(places(runs))
    assert runs.simplified().size_bytes == runs.size_bytes == len(places(runs))
    assert runs.end_bytes == max(places(runs)) + 1


@given(runs_strategy, st.integers(1, 4), st.integers(0, 9))
def test_folded_runs_mean_the_bytes_of_all_pages(runs, pages, gap):
    page_bytes = runs.end_bytes + gap
    go_on = runs.run_count * runs.run_stride_bytes == page_bytes
    if pages > 1 and runs.run_count > 1 and not go_on:
        with pytest.raises(ValueError, match="cannot be one page"):
            runs.folded(pages, page_bytes)
        return
    folded = runs.folded(pages, page_bytes)
    assert sorted(places(folded)) == sorted(places(runs, pages, page_bytes))


@given(st.lists(runs_strategy, max_size=6), st.integers(1, 3))
def test_merged_runs_mean_the_same_bytes(references, tensors):
    """Whatever they are, overlaps included: no byte is lost or added."""
    spread = [replace(r, tensor_index=i % tensors) for i, r in enumerate(references)]
    found = merged(spread)
    for index in range(tensors):
        before = [b for r in spread if r.tensor_index == index for b in places(r)]
        after = [b for r in found if r.tensor_index == index for b in places(r)]
        assert sorted(before) == sorted(after)
    assert len(found) <= len(spread)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.permutations(range(6)), st.integers(0, 63))
def test_merged_runs_side_by_side(size, positions, count, order, present):
    """Layers of one stride pattern, some of them missing: one reference per group of adjacent layers."""
    layers = [i for i in order if i < positions and present >> i & 1]
    references = [
        PageRuns(tensor_index=0, offset_bytes=i * size, run_bytes=size, run_count=count,
                 run_stride_bytes=positions * size)
        for i in layers
    ]  # fmt: skip
    found = merged(references)
    assert sorted(b for r in found for b in places(r)) == sorted(b for r in references for b in places(r))
    assert len(found) == sum(1 for i in layers if i - 1 not in layers)


def test_overlapping_runs_of_one_stride_pattern_stay_apart():
    one = PageRuns(tensor_index=0, offset_bytes=0, run_bytes=2, run_count=2, run_stride_bytes=2)
    other = PageRuns(tensor_index=0, offset_bytes=2, run_bytes=1, run_count=2, run_stride_bytes=2)
    found = merged([one, other])
    assert found == (PageRuns(tensor_index=0, offset_bytes=0, run_bytes=4), other)
    assert sorted(b for r in found for b in places(r)) == [0, 1, 2, 2, 3, 4]
