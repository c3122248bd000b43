"""Lists of slots against a search by hand, and digests of pages."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_kvpool.srt.host.page_digest import DIGEST_BYTES, DamagedPage, verified, with_digest
from sgl_kvpool.transfer.slots import pages_of, slot_list_problem


@given(
    page_size=st.sampled_from([1, 2, 61, 64]),
    pages=st.lists(st.integers(-2, 9), max_size=6),
    first_page=st.sampled_from([0, 1]),
    dtype=st.sampled_from([torch.int64, torch.int32]),
)
def test_whole_pages(page_size, pages, first_page, dtype):
    slots = torch.tensor([p * page_size + t for p in pages for t in range(page_size)], dtype=dtype)
    fine = len(set(pages)) == len(pages) and all(first_page <= p < 8 for p in pages)
    assert (slot_list_problem(slots, page_size, 8, first_page) is None) == fine
    assert pages_of(slots, page_size).tolist() == pages


@given(
    page_size=st.sampled_from([2, 3, 8]),
    slots=st.lists(st.integers(0, 40), min_size=1, max_size=24),
)
def test_any_list(page_size, slots):
    pages = [slots[i : i + page_size] for i in range(0, len(slots), page_size)]
    whole = all(
        len(page) == page_size
        and page[0] % page_size == 0
        and page == list(range(page[0], page[0] + page_size))
        for page in pages
    )
    fine = whole and len({page[0] for page in pages}) == len(pages) and max(slots) < 5 * page_size
    assert (slot_list_problem(torch.tensor(slots), page_size, 5) is None) == fine


@pytest.mark.parametrize(
    "slots",
    [
        torch.tensor([0.0, 1.0]),
        torch.tensor([[0, 1]]),
        *(torch.tensor([0, 1], dtype=t) for t in (torch.uint8, torch.int16, torch.bool)),
    ],
)
def test_lists_that_are_none(slots):
    assert "expected a list of int64" in slot_list_problem(slots, 2, 5)


@given(page=st.binary(min_size=1, max_size=200), tag=st.text(max_size=9), key=st.text(max_size=9))
def test_a_page_with_its_digest_is_verified(page, tag, key):
    raw = np.frombuffer(page, dtype=np.uint8)
    stored = with_digest(raw, tag, key)
    assert len(stored) == len(raw) + DIGEST_BYTES
    assert verified(stored, len(raw), tag, key).tobytes() == page


@given(page=st.binary(min_size=2, max_size=60), data=st.data())
def test_nothing_else_does(page, data):
    raw = np.frombuffer(page, dtype=np.uint8)
    stored = with_digest(raw, "tag", "key")
    changed = stored.copy()
    changed[data.draw(st.integers(0, len(stored) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    for bad, tag, key in (
        (changed, "tag", "key"),
        (stored[:-1], "tag", "key"),
        (np.append(stored, 0), "tag", "key"),
        (stored, "tag", "other"),
        (stored, "other", "key"),
        (stored, "tagk", "ey"),
        (stored, "tag", ""),
    ):
        with pytest.raises(DamagedPage):
            verified(bad, len(raw), tag, key)


def test_the_digest_is_blake2b():
    """Written down once more, so that stored pages stay readable by later releases."""
    stored = with_digest(np.arange(10, dtype=np.uint8), "fp4", "k")
    head = b"3 1 fp4k"
    assert stored[10:].tobytes() == hashlib.blake2b(head + bytes(range(10)), digest_size=16).digest()
