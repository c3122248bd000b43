"""Slots, strides and what must stay untouched."""

import codec_oracle as oracle
import numpy as np
import pytest
import torch
from codec_oracle import assert_same_bytes, assert_same_values, cast, decode, encode, hard_rows, row_format

from sgl_kvpool.codec import decode_rows, encode_rows, fake_quant, gather_parts, gather_rows, store_rows

FILL = 0xEE
SLOTS = [5, -1, 0, 60, 17, -7, 2, 59, 33, -1, 1]


def columns_of_wider(tensor, left=3, right=5):
    """The same values inside a wider tensor, so that rows are apart."""
    wide = torch.full((len(tensor), left + tensor.shape[1] + right), 7.5).to(tensor.dtype)
    wide[:, left : left + tensor.shape[1]] = tensor
    return wide[:, left : left + tensor.shape[1]]


def filled_pool(rows, row_bytes, kind):
    """(bytes that hold the pool and more, pool view [rows, row_bytes])."""
    if kind == "dense":
        base = torch.full((rows, row_bytes), FILL, dtype=torch.uint8)
        return base, base
    if kind == "layer":  # one layer of a token-major buffer of three
        base = torch.full((rows, 3, row_bytes), FILL, dtype=torch.uint8)
        return base, base[:, 1]
    base = torch.full((rows * (row_bytes + 13) + 9,), FILL, dtype=torch.uint8)  # nothing aligned
    return base, base.as_strided((rows, row_bytes), (row_bytes + 13, 1), 9)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", ["dense", "layer", "odd"])
@pytest.mark.parametrize(("rank", "rope", "align"), [(384, 64, 16), (128, 0, 16), (256, 0, 1)])
@pytest.mark.parametrize("name", oracle.LAYOUTS)
def test_store_and_gather(name, rank, rope, align, kind, index):
    fmt = row_format(name, rank, rope, align)
    tokens = len(SLOTS)
    nope = columns_of_wider(hard_rows(tokens, rank, 3))
    keys = columns_of_wider(hard_rows(tokens, rope, 4), 1, 2) if rope else None
    slots = torch.tensor(SLOTS, dtype=index)
    every_other = torch.stack([slots, slots + 100], 1).flatten()[::2]  # slots may be strided too
    base, pool = filled_pool(61, fmt.row_bytes, kind)
    store_rows(pool, every_other, nope, keys, fmt)

    expected_base, expected = filled_pool(61, fmt.row_bytes, kind)
    written = encode(nope, keys, name, rank, rope, fmt.row_bytes)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            expected[slot] = torch.from_numpy(written[token])
    assert_same_bytes(base, expected_base)  # gaps and other rows included

    values = cast(decode(written, name, rank, rope), torch.bfloat16)
    values[np.array(SLOTS) < 0] = 0
    before = base.clone()
    assert_same_values(gather_rows(pool, every_other, fmt), values)

    out = columns_of_wider(torch.full((tokens, rank + rope), -3.0).bfloat16())
    assert gather_rows(pool, slots, fmt, out=out) is out
    assert_same_values(out, values)
    around = out._base
    assert bool((around[:, :3] == 7.5).all() and (around[:, -5:] == 7.5).all())

    nope_out = columns_of_wider(torch.full((tokens, rank), -3.0).half())
    rope_out = columns_of_wider(torch.full((tokens, rope), -3.0).half()) if rope else None
    gather_parts(pool, slots, fmt, nope_out, rope_out)
    half = cast(decode(written, name, rank, rope), torch.float16)
    half[np.array(SLOTS) < 0] = 0
    assert_same_values(nope_out, half[:, :rank])
    assert bool((nope_out._base[:, :3] == 7.5).all() and (nope_out._base[:, -5:] == 7.5).all())
    if rope:
        assert_same_values(rope_out, half[:, rank:])
    assert torch.equal(base, before)  # reading writes nothing


@pytest.mark.parametrize("name", oracle.LAYOUTS)
def test_many_rows_go_in_chunks_without_seams(name):
    fmt = row_format(name, 128, 64)
    tokens = 1543  # three chunks of the reference, and 7 tokens of a fourth
    nope, keys = hard_rows(tokens, 128), hard_rows(tokens, 64, 1)
    slots = torch.randperm(2000)[:tokens]
    pool = torch.full((2000, fmt.row_bytes), FILL, dtype=torch.uint8)
    store_rows(pool, slots, nope, keys, fmt)
    written = encode(nope, keys, name, 128, 64, fmt.row_bytes)
    assert_same_bytes(pool[slots], written)
    values = cast(decode(written, name, 128, 64), torch.bfloat16)
    assert_same_values(gather_rows(pool, slots, fmt), values)
    assert_same_values(decode_rows(pool.flip(0), fmt), decode_rows(pool, fmt).flip(0))
    untouched = torch.ones(2000, dtype=torch.bool)
    untouched[slots] = False
    assert bool((pool[untouched] == FILL).all())


@pytest.mark.parametrize("name", oracle.LAYOUTS)
def test_nothing_to_do(name):
    fmt = row_format(name, 128, 64)
    nope, keys = torch.zeros(0, 128), torch.zeros(0, 64)
    none = torch.zeros(0, dtype=torch.int64)
    for rows in (0, 3):
        pool = torch.full((rows, fmt.row_bytes), FILL, dtype=torch.uint8)
        assert encode_rows(nope, keys, fmt).shape == (0, fmt.row_bytes)
        assert decode_rows(pool[:0], fmt).shape == (0, 192)
        store_rows(pool, none, nope, keys, fmt)
        assert gather_rows(pool, none, fmt).shape == (0, 192)
        gather_parts(pool, none, fmt, torch.zeros(0, 128), torch.zeros(0, 64))
        absent = torch.tensor([-1, -2])
        store_rows(pool, absent, torch.ones(2, 128), torch.ones(2, 64), fmt)
        assert not gather_rows(pool, absent, fmt).any()
        assert bool((pool == FILL).all())


FMT = row_format("fp4", 128, 64)
POOL = torch.zeros(4, 208, dtype=torch.uint8)
NOPE, ROPE, SLOT = torch.zeros(2, 128), torch.zeros(2, 64), torch.tensor([0, 1])
REFUSED = {
    "nope width": (ValueError, r"k_nope has shape \(2, 127\).*128.*row_format",
                   lambda: encode_rows(NOPE[:, 1:], ROPE, FMT)),
    "nope dtype": (TypeError, r"float64.*bfloat16.*convert",
                   lambda: encode_rows(NOPE.double(), ROPE, FMT)),
    "rope missing": (ValueError, r"k_rope is None.*64", lambda: encode_rows(NOPE, None, FMT)),
    "rope rows": (ValueError, r"1 rows and k_nope 2", lambda: encode_rows(NOPE, ROPE[:1], FMT)),
    "device": (ValueError, r"meta.*cpu.*\.to\(",
               lambda: encode_rows(NOPE, ROPE.to("meta"), FMT)),
    "pool dtype": (TypeError, r"bfloat16.*uint8.*view",
                   lambda: store_rows(POOL.view(torch.bfloat16), SLOT, NOPE, ROPE, FMT)),
    "pool width": (ValueError, r"row_buffer has shape \(4, 207\).*208.*fp4-r128-p64",
                   lambda: store_rows(POOL[:, 1:], SLOT, NOPE, ROPE, FMT)),
    "slots dtype": (TypeError, r"slots is int16.*int32, int64",
                    lambda: gather_rows(POOL, SLOT.short(), FMT)),
    "slots count": (ValueError, r"slots has shape \(1,\).*\(2,\)",
                    lambda: store_rows(POOL, SLOT[:1], NOPE, ROPE, FMT)),
    "slots range": (IndexError, r"slot 4 .* 4 rows.*-1", lambda: gather_rows(POOL, SLOT + 3, FMT)),
    "store range": (IndexError, r"slot 9 ", lambda: store_rows(POOL, SLOT + 8, NOPE, ROPE, FMT)),
    "output dtype": (TypeError, r"float64", lambda: decode_rows(POOL, FMT, torch.float64)),
    "out dtype": (TypeError, r"out is float32, expected bfloat16; allocate another, or ask for its dtype",
                  lambda: gather_rows(POOL, SLOT, FMT, out=torch.zeros(2, 192))),
    "fake_quant dtype": (TypeError, r"k_rope is float32, allowed beside k_nope .*: bfloat16; convert",
                         lambda: fake_quant(NOPE.bfloat16(), ROPE, "fp4")),
    "fake_quant layout": (ValueError, r"'fp5'; choose one of: .*fp4", lambda: fake_quant(NOPE, ROPE, "fp5")),
    "rows": (ValueError, r"rows has shape", lambda: decode_rows(POOL[:, :16], FMT)),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case):
    kind, message, call = REFUSED[case]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("k_scale", [0.0, -1.0, float("nan"), float("inf"), 1e-46, 1e39])
def test_refuses_k_scale(k_scale):
    with pytest.raises(TypeError, match="k_scale=None is no number; pass the layer's scale"):
        encode_rows(NOPE, ROPE, FMT, k_scale=None)
    with pytest.raises(ValueError, match=r"k_scale=.*finite and positive"):
        encode_rows(NOPE, ROPE, FMT, k_scale=k_scale)
    with pytest.raises(ValueError, match=r"k_scale=.*finite and positive"):
        gather_rows(POOL, SLOT, FMT, k_scale=k_scale)
