"""The codec on a GPU against the torch reference on the CPU, bit for bit; needs no SGLang."""

import codec_oracle as oracle
import pytest
import torch

from sgl_kvpool.codec import decode_rows, encode_rows, fake_quant, gather_parts, gather_rows, store_rows

pytestmark = pytest.mark.gpu
FILL = 0xEE
GEOMETRIES = [(512, 64, 16), (384, 64, 16), (128, 0, 16), (256, 0, 1)]


def cuda(tensor):
    return None if tensor is None else tensor.to("cuda")


def same_values(found, expected):
    oracle.assert_same_values(found.cpu(), expected)


@pytest.mark.silicon
@pytest.mark.parametrize("name", oracle.LAYOUTS)
def test_ten_million_blocks(name):
    """312512 rows of 512: 10000384 blocks of 16. Decoded to bfloat16, those of one seed to every type."""
    fmt = oracle.row_format(name, 512, 64)
    for seed in range(19):
        nope, keys = oracle.hard_rows(16448, 512, seed), oracle.hard_rows(16448, 64, seed + 100)
        expected = encode_rows(nope, keys, fmt)
        rows = encode_rows(cuda(nope), cuda(keys), fmt)
        oracle.assert_same_bytes(rows.cpu(), expected)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)[: 1 if seed else 3]:
            same_values(decode_rows(rows, fmt, dtype), decode_rows(expected, fmt, dtype))


@pytest.mark.quick
def test_errors_are_summed_in_the_order_of_the_rules():
    fmt = oracle.row_format("fp4", 128, 0)
    rows = encode_rows(cuda(oracle.order_decides()), None, fmt)
    oracle.assert_same_bytes(rows.cpu(), encode_rows(oracle.order_decides(), None, fmt))


@pytest.mark.parametrize("name", oracle.LAYOUTS)
def test_every_bf16_pattern(name):
    fmt = oracle.row_format(name, 512, 0)
    alone = torch.zeros(65536, 16, dtype=torch.bfloat16)
    alone[torch.arange(65536), torch.arange(65536) % 16] = oracle.every_bf16().view(-1)
    generator = torch.Generator().manual_seed(5)
    among = torch.randn(65536, 16, generator=generator).bfloat16()
    among[torch.arange(65536), torch.arange(65536) % 16] = oracle.every_bf16().view(-1)
    for nope in (oracle.every_bf16(), alone.view(-1, 512), among.view(-1, 512)):
        expected = encode_rows(nope, None, fmt)
        rows = encode_rows(cuda(nope), None, fmt)
        oracle.assert_same_bytes(rows.cpu(), expected)
        same_values(decode_rows(rows, fmt), decode_rows(expected, fmt))
        if name == "bf16":  # NaN payloads too
            oracle.assert_same_bits(decode_rows(rows, fmt).cpu(), nope)


@pytest.mark.parametrize(("rank", "rope", "align"), GEOMETRIES)
@pytest.mark.parametrize("name", oracle.LAYOUTS)
def test_rows_that_no_encoder_wrote(name, rank, rope, align):
    fmt = oracle.row_format(name, rank, rope, align)
    rows = torch.randint(0, 256, (5003, fmt.row_bytes), dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        same_values(decode_rows(cuda(rows), fmt, dtype), decode_rows(rows, fmt, dtype))


@pytest.mark.parametrize("k_scale", [pytest.param(0.37, marks=pytest.mark.quick), 3e-38, 1e-42, 2.5e5])
def test_k_scale(k_scale):
    fmt = oracle.row_format("fp8", 256, 64)
    nope, keys = oracle.hard_rows(4097, 256), oracle.hard_rows(4097, 64, 1)
    expected = encode_rows(nope, keys, fmt, k_scale)
    rows = encode_rows(cuda(nope), cuda(keys), fmt, k_scale)
    oracle.assert_same_bytes(rows.cpu(), expected)
    for dtype in (torch.bfloat16, torch.float32):
        found = decode_rows(rows, fmt, dtype, k_scale)
        same_values(found, decode_rows(expected, fmt, dtype, k_scale))


@pytest.mark.parametrize("name", oracle.LAYOUTS)
def test_fake_quant(name):
    nope, keys = oracle.hard_rows(519, 256), oracle.hard_rows(519, 64, 1)
    results = (fake_quant(*given, name, 0.37) for given in ((cuda(nope), cuda(keys)), (nope, keys)))
    for found, expected in zip(*results, strict=True):
        same_values(found, expected)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", ["dense", "layer"])
@pytest.mark.parametrize(("rank", "rope", "align"), GEOMETRIES)
@pytest.mark.parametrize("name", oracle.LAYOUTS)
def test_store_and_gather(name, rank, rope, align, kind, index):
    """`layer` rows lie between those of other layers, as in a token-major pool."""
    fmt = oracle.row_format(name, rank, rope, align)
    tokens, slots_count = 269, 1021
    slots = torch.randperm(slots_count)[:tokens].to(index)
    slots[::7] = -1
    wide = oracle.hard_rows(tokens, rank + rope + 48)
    layers = 3 if kind == "layer" else 1
    base = torch.full((slots_count * layers * fmt.row_bytes,), FILL, dtype=torch.uint8)
    first = fmt.row_bytes if kind == "layer" else 0
    shape, strides = (slots_count, fmt.row_bytes), (layers * fmt.row_bytes, 1)
    device_base, device_wide = cuda(base), cuda(wide)
    pool, device_pool = (memory.as_strided(shape, strides, first) for memory in (base, device_base))
    for rows, numbers, values in ((device_pool, cuda(slots), device_wide), (pool, slots, wide)):
        keys = values[:, rank + 5 : rank + 5 + rope] if rope else None
        store_rows(rows, numbers, values[:, 3 : rank + 3], keys, fmt)
    oracle.assert_same_bytes(device_base.cpu(), base)  # what is between and around the rows too

    expected = gather_rows(pool, slots, fmt)
    same_values(gather_rows(device_pool, cuda(slots), fmt), expected)
    out = torch.full((tokens, rank + rope + 7), -3.0, dtype=torch.bfloat16, device="cuda")
    parts = out[:, :rank], out[:, rank + 2 : rank + 2 + rope] if rope else None
    gather_parts(device_pool, cuda(slots), fmt, *parts)
    same_values(parts[0], expected[:, :rank])
    if rope:
        same_values(parts[1], expected[:, rank:])
    assert bool((out[:, -5:] == -3).all())
    assert bool((out[:, rank : rank + 2] == -3).all() or not rope)


@pytest.mark.quick
def test_captured_graph():
    """Neither direction waits for the device, so both may be captured and replayed."""
    fmt = oracle.row_format("fp4", 512, 64)
    pool = torch.full((64, fmt.row_bytes), FILL, dtype=torch.uint8, device="cuda")
    nope = torch.zeros(8, 512, dtype=torch.bfloat16, device="cuda")
    keys = torch.zeros(8, 64, dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(8, device="cuda")
    store_rows(pool, slots, nope, keys, fmt)  # compiles
    out = gather_rows(pool, slots, fmt)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        store_rows(pool, slots, nope, keys, fmt)
        gather_rows(pool, slots, fmt, out=out)
    new_nope, new_keys = oracle.hard_rows(8, 512), oracle.hard_rows(8, 64)
    nope.copy_(new_nope)
    keys.copy_(new_keys)
    slots.copy_(torch.tensor([9, -1, 11, 40, 2, 3, -1, 63]))
    graph.replay()
    expected = decode_rows(encode_rows(new_nope, new_keys, fmt), fmt)
    expected[[1, 6]] = 0
    same_values(out, expected)


@pytest.mark.quick
def test_rows_at_odd_addresses_are_refused():
    fmt = oracle.row_format("fp4", 128, 0)
    buffer = torch.zeros(1000, dtype=torch.uint8, device="cuda")
    for shape, first in (((3, 81), 0), ((3, 80), 2)):
        pool = buffer.as_strided((shape[0], fmt.row_bytes), (shape[1], 1), first)
        with pytest.raises(ValueError, match="multiples of 4"):
            gather_rows(pool, torch.zeros(1, dtype=torch.int64, device="cuda"), fmt)
