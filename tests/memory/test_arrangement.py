"""Named arrangements against numpy's transposition of the axes.

A1 to B4 are items of the vLLM checklist, which test_cross_layer.py explains.
"""

import itertools

import numpy as np
import pytest
import torch

from sgl_kvpool.memory.arrangement import KVArrangement, RowPlacement

#: Axes in memory, from the outermost; written here once more, as the oracle.
ORDER = {"layer_major": "LBNC", "token_major": "BNLC", "page_major": "BLNC"}
SIZES = list(itertools.product((1, 2, 3), repeat=4))


def addresses(name, layers, pages, tokens, row_bytes):
    """Address of byte [l, b, n, c] as an array, by numpy alone."""
    sizes = {"L": layers, "B": pages, "N": tokens, "C": row_bytes}
    in_memory = np.arange(layers * pages * tokens * row_bytes).reshape([sizes[a] for a in ORDER[name]])
    return in_memory.transpose([ORDER[name].index(axis) for axis in "LBNC"])


@pytest.mark.parametrize("name", ORDER)
def test_b1_b2_b3_b4_rows_of_a_view_are_the_bytes_at_the_address(name):
    """Both ways, in a part of a larger buffer; all sizes from {1, 2, 3}, also those with equal axes."""
    for layers, pages, tokens, row_bytes in SIZES:
        placement = RowPlacement(KVArrangement(name), layers, pages, tokens, row_bytes)
        where = addresses(name, layers, pages, tokens, row_bytes)
        slots = torch.arange(pages * tokens)
        rows = placement.slot_to_row(slots)
        for layer in range(layers):
            whole = torch.zeros(placement.total_bytes + 100, dtype=torch.uint8)
            buffer = whole[90:-10]
            view = placement.layer_view(buffer, layer)
            assert view.data_ptr() - buffer.data_ptr() == layer * placement.strides_bytes["L"]
            view[rows] = 7
            raw = buffer.numpy().copy()
            assert (raw[where[layer].ravel()] == 7).all()
            assert whole.sum() == 7 * pages * tokens * row_bytes  # A5: and nothing else
            buffer.copy_(torch.from_numpy(np.random.default_rng(0).permutation(256).astype(np.uint8)).repeat(2)[
                : placement.total_bytes
            ])  # fmt: skip
            expected = buffer.numpy()[where[layer]].reshape(pages * tokens, row_bytes)
            assert np.array_equal(view[rows].numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", [1, 2, 61, 64])
@pytest.mark.parametrize("name", ORDER)
def test_slots_to_rows(name, page_size, dtype):
    placement = RowPlacement(name, layers=3, pages=5, page_size_tokens=page_size, row_bytes=416)
    slots = torch.tensor([[-1, 0, page_size], [5 * page_size - 1, 2 * page_size - 1, -7]], dtype=dtype)
    # Not contiguous.
    rows = placement.slot_to_row(slots.t())
    assert rows.dtype == dtype
    assert rows.shape == (3, 2)
    where = addresses(name, 3, 5, page_size, 1)
    expected = [
        s if s < 0 else (where[0, s // page_size, s % page_size, 0]) // (placement.row_stride_bytes // 416)
        for s in slots.t().flatten().tolist()
    ]
    assert rows.flatten().tolist() == expected
    for slot in range(5 * page_size):
        assert placement.row_of_slot(slot) == placement.slot_to_row(torch.tensor(slot)).item()
    assert rows.max() == placement.rows - 1


def test_row_numbers_beyond_int32():
    """61 layers and 40 million slots: row numbers of the last slots exceed 2^31."""
    placement = RowPlacement(KVArrangement.PAGE_MAJOR, 61, 40_000_000 // 64, 64, 416)
    slots = torch.tensor([39_999_999, -1, 0], dtype=torch.int32)
    expected = (39_999_999 // 64) * 61 * 64 + 63
    assert expected > 2**31
    assert placement.slot_to_row(slots).tolist() == [expected, -1, 0]


def test_names():
    assert KVArrangement("page_major") is KVArrangement.PAGE_MAJOR
    with pytest.raises(ValueError, match=f"'nhd'; choose one of: {', '.join(ORDER)}, head_major"):
        KVArrangement("nhd")
    assert [str(member) for member in KVArrangement.of_rows()] == list(ORDER)
    with pytest.raises(ValueError, match="head_major splits pages by head, and rows have one"):
        RowPlacement(KVArrangement.HEAD_MAJOR, 1, 1, 1, 1)


@pytest.mark.parametrize("field", ["layers", "pages", "page_size_tokens", "row_bytes"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "3", True, None])
def test_invalid_sizes_are_refused(field, value):
    sizes = {"layers": 1, "pages": 1, "page_size_tokens": 1, "row_bytes": 1, field: value}
    with pytest.raises(ValueError, match=f"{field}={value!r} is not a positive integer"):
        RowPlacement(KVArrangement.LAYER_MAJOR, **sizes)


def test_sizes_of_any_integer_type_and_arrangements_by_name():
    placement = RowPlacement("page_major", *np.array([2, 3, 4, 8]))
    assert placement == RowPlacement(KVArrangement.PAGE_MAJOR, 2, 3, 4, 8)
    with pytest.raises(ValueError, match="unknown KV cache arrangement 'nhd'"):
        RowPlacement("nhd", 1, 1, 1, 1)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.float32, torch.complex64]
)
@pytest.mark.parametrize("name", ORDER)
def test_slots_of_another_dtype(name, dtype):
    """Row numbers would wrap around in small dtypes."""
    placement = RowPlacement(name, 2, 3, 4, 8)
    with pytest.raises(TypeError, match=f"slots are {dtype}, expected int32 or int64"):
        placement.slot_to_row(torch.ones(2).to(dtype))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_outside_are_no_rows(dtype):
    """Also where int32 wraps: the row number of slot 915320992 modulo 2^32 is 3744, a row of the pool."""
    placement = RowPlacement("page_major", layers=61, pages=4, page_size_tokens=64, row_bytes=416)
    slots = torch.tensor([255, 256, 915320992, 2**31 - 1], dtype=dtype)
    rows = placement.slot_to_row(slots).tolist()
    assert rows == [placement.rows - 1] + [placement.rows] * 3


def test_buffers_that_do_not_fit():
    placement = RowPlacement(KVArrangement.PAGE_MAJOR, 2, 3, 4, 8)
    good = torch.zeros(192, dtype=torch.uint8)
    for bad in (good[:-1], good.view(2, 96), torch.zeros(192), torch.zeros(384, dtype=torch.uint8)[::2]):
        with pytest.raises(ValueError, match=r"expected \(192,\) contiguous bytes"):
            placement.layer_view(bad, 0)
    for layer in (-1, 2):
        with pytest.raises(IndexError, match=f"layer {layer} of 2"):
            placement.layer_view(good, layer)
