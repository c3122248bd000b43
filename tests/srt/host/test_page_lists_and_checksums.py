"""Checks of slot lists against a brute-force search, and checksums of pages."""

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from sgl_kvpool.srt.host import page_format
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


@given(page_size=st.sampled_from([2, 3, 8]), slots=st.lists(st.integers(0, 40), min_size=1, max_size=24))
def test_any_list(page_size, slots):
    pages = [slots[i : i + page_size] for i in range(0, len(slots), page_size)]
    whole = all(p[0] % page_size == 0 and p == list(range(p[0], p[0] + page_size)) for p in pages)
    fine = whole and len({page[0] for page in pages}) == len(pages) and max(slots) < 5 * page_size
    assert (slot_list_problem(torch.tensor(slots), page_size, 5) is None) == fine


OTHER_DTYPES = [torch.tensor([0, 1], dtype=dtype) for dtype in (torch.uint8, torch.int16, torch.bool)]


@pytest.mark.parametrize("slots", [torch.tensor([0.0, 1.0]), torch.tensor([[0, 1]]), *OTHER_DTYPES])
def test_slot_lists_of_other_dtypes_or_shapes_are_refused(slots):
    assert "expected a list of int64" in slot_list_problem(slots, 2, 5)


@given(page=st.binary(min_size=1, max_size=600), tag=st.text(max_size=9), key=st.text(max_size=9))
def test_a_page_with_its_checksum_is_undamaged(page, tag, key):
    sealed = np.frombuffer(page + bytes([0xEE]) * page_format.CHECKSUM_BYTES, dtype=np.uint8).copy()
    page_format.write_checksum(sealed, tag, key)
    assert sealed[: -page_format.CHECKSUM_BYTES].tobytes() == page
    assert page_format.damage(sealed, tag, key) is None


@given(page=st.binary(min_size=2, max_size=600), data=st.data())
def test_changes_of_page_tag_or_key_are_damage(page, data):
    sealed = np.frombuffer(page + bytes(page_format.CHECKSUM_BYTES), dtype=np.uint8).copy()
    page_format.write_checksum(sealed, "tag", "key")
    changed = sealed.copy()
    changed[data.draw(st.integers(0, len(sealed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    for bad, tag, key in (
        (changed, "tag", "key"),
        (sealed[:-1], "tag", "key"),
        (np.append(sealed, np.uint8(0)), "tag", "key"),
        (sealed, "tag", "other"),
        (sealed, "other", "key"),
        (sealed, "tagk", "ey"),
        (sealed, "tag", ""),
        (sealed[:5], "tag", "key"),
    ):
        assert page_format.damage(bad, tag, key) is not None


def test_the_checksum_is_xxh3():
    """A fixed value, so that later releases read pages that this one stored."""
    found = page_format.checksum(np.arange(200, dtype=np.uint8), "fp4", "k")
    seed = xxhash.xxh3_64_intdigest(b"3 1 fp4k")
    assert found == xxhash.xxh3_128(bytes(range(200)), seed=seed).digest()
    assert found.hex() == "fadf6ae6672f845930246af74ec80097"


@pytest.mark.parametrize("page_bytes", [600, 1 << 19])
def test_the_first_damaged_of_several(page_bytes):
    """On one thread and on several; the size of the pages decides."""
    pages = np.random.default_rng(0).integers(0, 256, (9, page_bytes), dtype=np.uint8)
    keys = [str(n) for n in range(9)]
    page_format.write_checksums(list(pages), "tag", keys)
    assert page_format.first_damage(list(pages), "tag", keys) is None
    assert page_format.first_damage([], "tag", []) is None
    pages[6, 5] ^= 1
    pages[3, -1] ^= 1
    place, what = page_format.first_damage(list(pages), "tag", keys)
    assert (place, what) == (3, "its checksum does not match its bytes, format and key")
    with pytest.raises(ValueError, match="9 pages for 8 keys"):
        page_format.first_damage(list(pages), "tag", keys[1:])
