"""Stored bytes and decoded values against the independent oracle."""

import codec_oracle as oracle
import pytest
import torch
from codec_oracle import LAYOUTS, assert_same_bytes, assert_same_values, cast, decode, encode, row_format
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kvpool.codec import decode_rows, encode_rows

pytestmark = pytest.mark.usefixtures("each_encoder")

GEOMETRIES = [(512, 64, 16), (512, 0, 16), (384, 64, 16), (128, 0, 16), (256, 0, 1), (128, 64, 1)]


def both(name, rank, rope, align, tokens, seed=0, k_scale=1.0):
    fmt = row_format(name, rank, rope, align)
    nope = oracle.hard_rows(tokens, rank, seed)
    keys = oracle.hard_rows(tokens, rope, seed + 1) if rope else None
    return fmt, nope, keys, encode(nope, keys, name, rank, rope, fmt.row_bytes, k_scale)


@pytest.mark.parametrize(("rank", "rope", "align"), GEOMETRIES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes(name, rank, rope, align):
    fmt, nope, keys, expected = both(name, rank, rope, align, tokens=701)
    assert_same_bytes(encode_rows(nope, keys, fmt), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rank", "rope", "align"), GEOMETRIES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_values(name, rank, rope, align, dtype):
    fmt, *_, rows = both(name, rank, rope, align, tokens=203)
    expected = cast(decode(rows, name, rank, rope), dtype)
    assert_same_values(decode_rows(torch.from_numpy(rows), fmt, dtype), expected)


@pytest.mark.parametrize("k_scale", [1.0, 0.37, 3e-38, 1e-42, 2.5e5])
@pytest.mark.parametrize("name", LAYOUTS)
def test_k_scale_divides_and_multiplies_in_fp8_only(name, k_scale):
    used = k_scale if name == "fp8" else 1.0
    fmt, nope, keys, expected = both(name, 256, 64, 16, tokens=97, k_scale=used)
    rows = encode_rows(nope, keys, fmt, k_scale=k_scale)
    assert_same_bytes(rows, expected)
    for dtype in (torch.bfloat16, torch.float32):
        values = cast(decode(expected, name, 256, 64, used), dtype)
        assert_same_values(decode_rows(rows, fmt, dtype, k_scale=k_scale), values)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_bf16_pattern(name):
    """All patterns side by side, and each alone in a block (where it decides the scale)."""
    fmt = row_format(name, 512, 0)
    alone = torch.zeros(65536, 16, dtype=torch.bfloat16)
    alone[torch.arange(65536), torch.arange(65536) % 16] = oracle.every_bf16().view(-1)
    for nope in (oracle.every_bf16(), alone.view(-1, 512)):
        rows = encode_rows(nope, None, fmt)
        expected = encode(nope, None, name, 512, 0, fmt.row_bytes)
        assert_same_bytes(rows, expected)
        decoded = cast(decode(expected, name, 512, 0), torch.bfloat16)
        assert_same_values(decode_rows(rows, fmt), decoded)


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_bytes_decode_as_the_oracle_says(name):
    """Rows that no encoder wrote too: reserved scale bytes, NaN codes, NaN scales."""
    fmt = row_format(name, 128, 64)
    rows = torch.randint(0, 256, (4099, fmt.row_bytes), dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float32):
        expected = cast(decode(rows.numpy(), name, 128, 64), dtype)
        assert_same_values(decode_rows(rows, fmt, dtype), expected)


@settings(max_examples=60)
@given(st.sampled_from(LAYOUTS), st.binary(min_size=384, max_size=384))
def test_any_bits_encode_as_the_oracle_says(name, bits):
    values = torch.frombuffer(bytearray(bits), dtype=torch.bfloat16).view(1, 192)
    fmt = row_format(name, 128, 64)
    nope, keys = values[:, :128], values[:, 128:]
    assert_same_bytes(encode_rows(nope, keys, fmt), encode(nope, keys, name, 128, 64, fmt.row_bytes))


def test_bf16_segments_keep_nan_payloads():
    bits = oracle.every_bf16()
    fmt = row_format("bf16", 512, 0)
    rows = encode_rows(bits, None, fmt)
    assert_same_bytes(rows, bits.view(torch.uint8))
    oracle.assert_same_bits(decode_rows(rows, fmt), bits)
    for name in (name for name in LAYOUTS if oracle.STORED[name][1] == "bf16"):
        fmt = row_format(name, 128, 64)
        keys = bits.view(1024, 64)
        rows = encode_rows(torch.zeros(1024, 128), keys, fmt)
        stored = rows[:, fmt.rope.offset_bytes : fmt.rope.end_bytes]
        assert_same_bytes(stored, keys.view(torch.uint8))
        oracle.assert_same_bits(decode_rows(rows, fmt)[:, 128:], keys)
