"""The Triton kernels in Triton's interpreter, byte for byte against the torch reference.

On a machine with a GPU the interpreter is off; ``tests/gpu/test_codec_gpu.py`` then makes this comparison
with the machine's own conversions (`NATIVE`), which the interpreter does not have. Slots and strides are in
tests/ptxrun/test_ptx_codec.py, with compiled kernels.
"""

import os
from dataclasses import replace

import pytest
import torch
from codec_oracle import (
    LAYOUTS,
    assert_same_bytes,
    assert_same_values,
    every_bf16,
    hard_rows,
    row_format,
)

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET", "0") == "0":
    pytest.skip("needs TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)

from sgl_kvpool import codec
from sgl_kvpool.codec import reference
from sgl_kvpool.codec import triton as kernels

pytestmark = [
    pytest.mark.slow,
    # numpy's warnings inside the interpreter, where tests use infinities on purpose
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning"),
]
FILL = 0xEE
GEOMETRIES = [(512, 64, 16), (384, 64, 16), (128, 0, 16), (256, 0, 1)]


@pytest.fixture
def large_programs(monkeypatch):
    """More tokens per program: the interpreter's time depends on the number of operations, not of values."""
    monkeypatch.setattr(kernels, "_STORE_TOKENS", 128)
    monkeypatch.setattr(kernels, "_GATHER_TOKENS", 128)


def encoded_by_both(nope, keys, fmt, k_scale=1.0):
    rows = torch.full((len(nope), fmt.row_bytes), FILL, dtype=torch.uint8)
    expected = rows.clone()
    kernels.encode_rows(rows, nope, keys, fmt, k_scale)
    reference.encode_rows(expected, nope, keys, fmt, k_scale)
    return rows, expected


def gathered_by(module, pool, slots, fmt, dtype, k_scale=1.0):
    tokens = len(pool if slots is None else slots)
    out = torch.full((tokens, fmt.head_dim + 5), -3.0, dtype=dtype)
    nope, keys = out[:, : fmt.kv_lora_rank], out[:, fmt.kv_lora_rank : fmt.head_dim]
    rope_out = keys if fmt.rope is not None else None
    module.gather_parts(pool, slots, fmt, nope, rope_out, k_scale)
    assert bool((out[:, fmt.head_dim :] == -3).all())
    return out[:, : fmt.head_dim]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_bf16_pattern(name, large_programs):
    fmt = row_format(name, 512, 0)
    alone = torch.zeros(65536, 16, dtype=torch.bfloat16)
    alone[torch.arange(65536), torch.arange(65536) % 16] = every_bf16().view(-1)
    for nope in (every_bf16(), alone.view(-1, 512)):
        rows, expected = encoded_by_both(nope, None, fmt)
        assert_same_bytes(rows, expected)


@pytest.mark.parametrize(("rank", "rope", "align"), GEOMETRIES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_geometries_and_types(name, rank, rope, align):
    """Token counts that no tile divides, and decoding of rows that no encoder wrote."""
    fmt = row_format(name, rank, rope, align)
    nope, keys = hard_rows(37, rank), hard_rows(37, rope, 1) if rope else None
    rows, expected = encoded_by_both(nope, keys, fmt)
    assert_same_bytes(rows, expected)
    garbage = torch.randint(0, 256, (21, fmt.row_bytes), dtype=torch.uint8)
    for pool in (rows, garbage):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            found = gathered_by(kernels, pool, None, fmt, dtype)
            assert_same_values(found, gathered_by(reference, pool, None, fmt, dtype))


@pytest.mark.parametrize("name", LAYOUTS)
def test_fake_quant(name, monkeypatch):
    nope, keys = hard_rows(64, 256), hard_rows(64, 64, 1)
    expected = codec.fake_quant(nope, keys, name, 0.37)
    monkeypatch.setattr(codec, "_backend", lambda rows: kernels)
    for found, part in zip(codec.fake_quant(nope, keys, name, 0.37), expected, strict=True):
        assert_same_values(found, part)


@pytest.mark.parametrize("part", ["nope", "rope"])
def test_k_scale_divides_the_segments_that_use_it(part):
    """A possible layout: rows like `fp8`, with one segment that k_scale does not divide."""
    both, k_scale = row_format("fp8", 256, 64), 0.5
    fmt = replace(both, **{part: replace(getattr(both, part), uses_k_scale=False)})
    nope, keys = hard_rows(64, 256), hard_rows(64, 64, 1)
    rows, expected = encoded_by_both(nope, keys, fmt, k_scale)
    assert_same_bytes(rows, expected)
    undivided, divided = (encoded_by_both(nope, keys, both, k)[1] for k in (1.0, k_scale))
    at = both.rope.offset_bytes
    assert_same_bytes(rows[:, :at], (undivided if part == "nope" else divided)[:, :at])
    assert_same_bytes(rows[:, at:], (undivided if part == "rope" else divided)[:, at:])
    found = gathered_by(kernels, rows, None, fmt, torch.float32, k_scale)
    assert_same_values(found, gathered_by(reference, rows, None, fmt, torch.float32, k_scale))
    plain = gathered_by(reference, rows, None, both, torch.float32, 1.0)
    columns = slice(0, 256) if part == "nope" else slice(256, 320)
    assert_same_values(found[:, columns], plain[:, columns])


def test_nothing_to_do():
    fmt = row_format("fp4", 128, 0)
    pool = torch.full((2, fmt.row_bytes), FILL, dtype=torch.uint8)
    none = torch.zeros(0, dtype=torch.int64)
    kernels.store_rows(pool, none, torch.zeros(0, 128).bfloat16(), None, fmt, 1.0)
    kernels.gather_parts(pool, none, fmt, torch.zeros(0, 128), None, 1.0)
    assert bool((pool == FILL).all())


def test_can_address():
    buffer = torch.zeros(1000, dtype=torch.uint8)
    assert kernels.can_address(buffer.as_strided((3, 80), (84, 1), 4))
    assert not kernels.can_address(buffer.as_strided((3, 80), (81, 1)))
    assert not kernels.can_address(buffer.as_strided((3, 80), (80, 1), 2))
