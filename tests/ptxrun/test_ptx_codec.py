"""The codec's kernels as compiled for sm_90a, on ptxrun, byte for byte against the torch reference."""

import codec_oracle as oracle
import pytest
import torch
from codec_oracle import LAYOUTS, assert_same_bits, assert_same_bytes, assert_same_values, hard_rows

from sgl_kvpool.codec import reference
from sgl_kvpool.codec import triton as kernels
from sgl_kvpool.layout import Encoding
from sgl_kvpool.memory.arrangement import KVArrangement, RowPlacement

FILL = 0xEE
LAYERS, LAYER, PAGES, PAGE_SIZE = 3, 1, 11, 8
#: Rank, rope and alignment of rows. Latents of one chunk and of three; rows without padding, whose width
#: is no multiple of 16 bytes with fp8_block_scale (264).
GEOMETRIES = [(512, 64, 16), (384, 64, 16), (128, 0, 16), (256, 0, 1)]
#: Arrangement, dtype of slots, stride of slots.
PLACEMENTS = [("layer_major", "int64", 1), ("token_major", "int32", 2), ("page_major", "int64", 1)]
USUAL = PLACEMENTS[0]
STORES = [
    *((name, (512, 64, 16), placement) for name in LAYOUTS for placement in PLACEMENTS),
    *((name, geometry, PLACEMENTS[i % 3]) for name in LAYOUTS for i, geometry in enumerate(GEOMETRIES[1:])),
]


def _quick(cases, chosen):
    return [pytest.param(*case, marks=[pytest.mark.quick] * (case in chosen)) for case in cases]


def pool_of(fmt, arrangement):
    """(placement, a layer's rows in the memory of all layers, that memory); the memory has no guard bytes."""
    placement = RowPlacement(KVArrangement(arrangement), LAYERS, PAGES, PAGE_SIZE, fmt.row_bytes)
    memory = torch.full((placement.total_bytes,), FILL, dtype=torch.uint8)
    return placement, placement.layer_view(memory, LAYER), memory


def gathered(module, pool, slots, fmt, dtype=torch.bfloat16, k_scale=1.0):
    """Values that a module decodes, [tokens, R + P], in columns of a wider tensor."""
    out = torch.full((len(slots), fmt.head_dim + 8), -3.0, dtype=dtype)
    nope, keys = out[:, : fmt.kv_lora_rank], out[:, fmt.kv_lora_rank : fmt.head_dim]
    module.gather_parts(pool, slots, fmt, nope, None if fmt.rope is None else keys, k_scale)
    assert bool((out[:, fmt.head_dim :] == -3).all())
    return out[:, : fmt.head_dim]


def round_trip(name, geometry, placement, tokens=37, k_scale=1.0, values=None, seed=0):
    """Store and gather, some slots -1 and some beyond the pool; every byte of the memory is compared.

    Slot 2^31 - 2 is hundreds of gigabytes away from the pool, so a kernel without the check of slots cannot
    reach another tensor of this process with it: ptxrun reports the access for certain.
    """
    rank, rope, align = geometry
    arrangement, index, stride = placement
    fmt = oracle.row_format(name, rank, rope, align)
    rows, pool, memory = pool_of(fmt, arrangement)
    slots = torch.randperm(PAGES * PAGE_SIZE)[:tokens]
    slots = rows.slot_to_row(slots)
    slots[::7], slots[5], slots[6] = -1, len(pool) + 3, 2**31 - 2
    apart = torch.stack([slots] * stride, 1).to(getattr(torch, index)).flatten()[::stride]
    if values is None:
        values = hard_rows(tokens, rank + rope + 16, seed)
    nope, keys = values[:, :rank], values[:, rank + 8 : rank + 8 + rope] if rope else None
    expected = memory.clone()
    kernels.store_rows(pool, apart, nope, keys, fmt, k_scale)
    reference_pool = rows.layer_view(expected, LAYER)
    inside = torch.where(slots < len(pool), slots, -1)
    reference.store_rows(reference_pool, inside, nope, keys, fmt, k_scale)
    assert_same_bytes(memory, expected, "memory")
    found = gathered(kernels, pool, apart, fmt, k_scale=k_scale)
    assert_same_values(found, gathered(reference, reference_pool, inside, fmt, k_scale=k_scale))
    assert not found[5:7].any()
    return fmt, memory


@pytest.mark.parametrize(
    ("name", "geometry", "placement"),
    _quick(STORES, [STORES[0], STORES[4], STORES[8], STORES[9], STORES[21]]),
    ids=lambda case: case if isinstance(case, str) else "-".join(map(str, case)),
)
def test_rows_there_and_back(runs, name, geometry, placement):
    round_trip(name, geometry, placement)


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("name", LAYOUTS)
def test_schedules(runs, name, seed):
    with runs.using(seed=seed, quantum=[200, 5, 1][seed - 1]):
        round_trip(name, GEOMETRIES[0], USUAL, seed=seed)


@pytest.mark.parametrize("name", LAYOUTS)
def test_many_random_rows(runs, name):
    """More than 16000 other blocks of 16, among them NaN, infinities and numbers of every size."""
    for seed in range(10):
        round_trip(name, GEOMETRIES[0], USUAL, tokens=64, seed=10 + seed)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_bf16(runs, name):
    """Every bit pattern as a latent value and as a rope value; a rope in bf16 comes back unchanged."""
    values = oracle.every_bf16().view(1024, 64)
    fmt = oracle.row_format(name, 512, 64)
    for first in range(0, 1024, 64):
        some = values[first : first + 64]
        wide = torch.zeros(64, 592, dtype=torch.bfloat16)
        wide[:, 64:128] = wide[:, 520:584] = some
        pool = torch.full((64, fmt.row_bytes), FILL, dtype=torch.uint8)
        expected, slots = pool.clone(), torch.arange(64)
        kernels.store_rows(pool, slots, wide[:, :512], wide[:, 520:584], fmt, 1.0)
        reference.store_rows(expected, slots, wide[:, :512], wide[:, 520:584], fmt, 1.0)
        assert_same_bytes(pool, expected)
        if fmt.rope.encoding is Encoding.BF16:
            keys = gathered(kernels, pool, slots, fmt)[:, 512:]
            assert_same_bits(keys, some)


@pytest.mark.quick
def test_errors_are_summed_in_the_order_of_the_rules(runs):
    fmt = oracle.row_format("fp4", 128, 0)
    values = oracle.order_decides()
    rows = torch.full((len(values), fmt.row_bytes), FILL, dtype=torch.uint8)
    expected, slots = rows.clone(), torch.arange(len(values))
    kernels.store_rows(rows, slots, values, None, fmt, 1.0)
    reference.store_rows(expected, slots, values, None, fmt, 1.0)
    assert_same_bytes(rows, expected)


@pytest.mark.parametrize("k_scale", [0.5, 0.37, 3e-38, 2.5e5])
def test_k_scale(runs, k_scale):
    round_trip("fp8", GEOMETRIES[0], USUAL, k_scale=torch.tensor(k_scale).item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_that_no_encoder_wrote(runs, name, dtype):
    """Random bytes as codes and as scales."""
    fmt = oracle.row_format(name, 512, 64)
    pool = torch.randint(0, 256, (70, fmt.row_bytes), dtype=torch.uint8)
    slots = torch.randperm(70)
    found = gathered(kernels, pool, slots, fmt, dtype)
    assert_same_values(found, gathered(reference, pool, slots, fmt, dtype))


def test_rows_without_slots(runs):
    """Token t is row t: `encode_rows` and `decode_rows`."""
    fmt = oracle.row_format("fp4", 512, 64)
    nope, keys = hard_rows(21, 512), hard_rows(21, 64, 1)
    rows = torch.full((21, fmt.row_bytes), FILL, dtype=torch.uint8)
    expected = rows.clone()
    kernels.encode_rows(rows, nope, keys, fmt, 1.0)
    reference.encode_rows(expected, nope, keys, fmt, 1.0)
    assert_same_bytes(rows, expected)
    found, wanted = torch.empty(2, 21, 576, dtype=torch.bfloat16)
    kernels.gather_parts(rows, None, fmt, found[:, :512], found[:, 512:], 1.0)
    reference.gather_parts(rows, None, fmt, wanted[:, :512], wanted[:, 512:], 1.0)
    assert_same_values(found, wanted)


def test_a_pool_beyond_31_bits(runs):
    """Rows a gigabyte apart; only the touched pages take memory."""
    fmt = oracle.row_format("fp4", 512, 64)
    stride = 2**30 + 4096
    try:
        pool = torch.empty(3 * stride, dtype=torch.uint8).as_strided((3, fmt.row_bytes), (stride, 1))
    except RuntimeError:
        pytest.skip("the system refuses 3 GiB of unused address space")
    nope, keys, slots = hard_rows(2, 512), hard_rows(2, 64), torch.tensor([2, 0])
    pool[slots] = FILL
    with runs.using(global_races=0):  # race detection would reserve 8 bytes for each byte
        kernels.store_rows(pool, slots, nope, keys, fmt, 1.0)
        expected = torch.empty(2, fmt.row_bytes, dtype=torch.uint8)
        reference.encode_rows(expected, nope, keys, fmt, 1.0)
        assert_same_bytes(pool[slots], expected)
        found = gathered(kernels, pool, slots, fmt)
    assert_same_values(found, gathered(reference, expected, torch.arange(2), fmt))
