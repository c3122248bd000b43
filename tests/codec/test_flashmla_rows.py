"""Rows of `fp8_block_scale` as an independent reader of FlashMLA's format finds them."""

import numpy as np
import pytest
import torch
from flashmla_rows import ROW_BYTES, read_rows

from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.codec import encode_rows


def case(rank, rope, tokens=257):
    """Latents whose tiles differ in size by powers of two, so that a scale in the wrong place shows."""
    generator = torch.Generator().manual_seed(rank + rope)
    tiles = torch.randint(-9, 10, (tokens, rank // 128, 1), generator=generator)
    nope = torch.randn(tokens, rank // 128, 128, generator=generator) * torch.exp2(tiles.float())
    nope[0] = 0  # all zeros have a scale too
    keys = torch.randn(tokens, rope, generator=generator)
    return nope.view(tokens, rank).bfloat16(), keys.bfloat16() if rope else None


def format_of(rank, rope):
    return MLAKVCacheLayout("fp8_block_scale").row_format(rank, rope, align_bytes=1)


@pytest.mark.parametrize(("rank", "rope"), ROW_BYTES)
def test_what_was_encoded_is_read(rank, rope):
    """Within e4m3's error: half of the last of three bits, or half of the smallest step times the scale."""
    fmt = format_of(rank, rope)
    assert fmt.row_bytes == ROW_BYTES[rank, rope]
    nope, keys = case(rank, rope)
    found = read_rows(encode_rows(nope, keys, fmt).numpy(), rank, rope)
    exact = nope.double().numpy()
    largest = np.abs(exact).reshape(len(exact), -1, 128).max(-1).repeat(128, -1)
    # The 1e-6 are for the scale, which is rounded to fp32.
    allowed = np.maximum(np.abs(exact) * 2**-4, largest / 448 * 2**-10) * (1 + 1e-6)
    assert (np.abs(found[:, :rank] - exact) <= allowed).all()
    # The bound is tight: rounding to two bits instead of three would need twice the bound.
    assert (np.abs(found[:, :rank] - exact) > allowed / 2).any()
    if rope:
        np.testing.assert_array_equal(found[:, rank:], keys.double().numpy())


@pytest.mark.parametrize(("rank", "rope"), ROW_BYTES)
def test_values_are_where_they_belong(rank, rope):
    """One token per value, all others zero: the reader finds it there and nowhere else."""
    fmt = format_of(rank, rope)
    both = torch.eye(rank + rope, dtype=torch.bfloat16) * 3
    rows = encode_rows(both[:, :rank], both[:, rank:] if rope else None, fmt)
    np.testing.assert_allclose(read_rows(rows.numpy(), rank, rope), both.double().numpy(), rtol=1e-6)
