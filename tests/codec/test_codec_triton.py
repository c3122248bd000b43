"""The Triton kernels in Triton's interpreter, byte for byte against the torch reference.

On a machine with a GPU the interpreter is off; ``tests/gpu/test_codec_gpu.py`` then makes this comparison
with the machine's own conversions (`NATIVE`), which the interpreter does not have, and has slots and strides.
"""

import os

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


def encoded_by_both(nope, keys, fmt):
    rows = torch.full((len(nope), fmt.row_bytes), FILL, dtype=torch.uint8)
    expected = rows.clone()
    kernels.encode_rows(rows, nope, keys, fmt, 1.0)
    reference.encode_rows(expected, nope, keys, fmt, 1.0)
    return rows, expected


def gathered_by(module, pool, fmt, dtype):
    out = torch.full((len(pool), fmt.head_dim + 5), -3.0, dtype=dtype)
    nope, keys = out[:, : fmt.kv_lora_rank], out[:, fmt.kv_lora_rank : fmt.head_dim]
    rope_out = keys if fmt.rope is not None else None
    module.gather_parts(pool, None, fmt, nope, rope_out, 1.0)
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
            found = gathered_by(kernels, pool, fmt, dtype)
            assert_same_values(found, gathered_by(reference, pool, fmt, dtype))
