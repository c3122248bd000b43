"""The codec's kernels as compiled for sm_90a, on ptxrun, byte for byte against the torch reference.

Every value, code and scale, other geometries and fp8 with a k_scale: ``tests/gpu/test_codec_gpu.py``, on the
emulated device.
"""

import re
from pathlib import Path

import codec_oracle as oracle
import pytest
import test_ptx_decode
import torch
from codec_oracle import LAYOUTS, assert_same_bytes, assert_same_values, hard_rows

import sgl_kvpool
from sgl_kvpool.codec import reference
from sgl_kvpool.codec import triton as kernels
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement, RowPlacement

FILL = 0xEE
LAYERS, LAYER, PAGES, PAGE_SIZE = 3, 1, 11, 8


def pool_of(fmt):
    """(placement, a layer's rows in the memory of all layers, that memory); the memory has no guard bytes."""
    placement = RowPlacement(KVArrangement.TOKEN_MAJOR, LAYERS, PAGES, PAGE_SIZE, fmt.row_bytes)
    memory = torch.full((placement.total_bytes,), FILL, dtype=torch.uint8)
    return placement, placement.layer_view(memory, LAYER), memory


def gathered(module, pool, slots, fmt, dtype=torch.bfloat16):
    """Values that a module decodes, [tokens, R + P], in columns of a wider tensor."""
    out = torch.full((len(slots), fmt.head_dim + 8), -3.0, dtype=dtype)
    nope, keys = out[:, : fmt.kv_lora_rank], out[:, fmt.kv_lora_rank : fmt.head_dim]
    module.gather_parts(pool, slots, fmt, nope, None if fmt.rope is None else keys, 1.0)
    assert bool((out[:, fmt.head_dim :] == -3).all())
    return out[:, : fmt.head_dim]


def round_trip(name, tokens=37, seed=0, rank=512, rope=64):
    """Store and gather, some slots -1 and some beyond the pool; every byte of the memory is compared.

    Slot 2^31 - 2 is hundreds of gigabytes away from the pool, so a kernel without the check of slots cannot
    reach another tensor of this process with it: ptxrun reports the access for certain.
    """
    fmt = oracle.row_format(name, rank, rope)
    rows, pool, memory = pool_of(fmt)
    slots = rows.slot_to_row(torch.randperm(PAGES * PAGE_SIZE)[:tokens])
    slots[::7], slots[5], slots[6] = -1, len(pool) + 3, 2**31 - 2
    apart = slots.repeat_interleave(2).int()[::2]
    values = hard_rows(tokens, rank + rope + 16, seed)
    nope, keys = values[:, :rank], values[:, rank + 8 : rank + 8 + rope] if rope else None
    expected = memory.clone()
    kernels.store_rows(pool, apart, nope, keys, fmt, 1.0)
    reference_pool = rows.layer_view(expected, LAYER)
    inside = torch.where(slots < len(pool), slots, -1)
    reference.store_rows(reference_pool, inside, nope, keys, fmt, 1.0)
    assert_same_bytes(memory, expected, "memory")
    found = gathered(kernels, pool, apart, fmt)
    assert_same_values(found, gathered(reference, reference_pool, inside, fmt))
    assert not found[5:7].any()


@pytest.mark.quick
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_there_and_back(runs, name):
    round_trip(name)


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("name", LAYOUTS)
def test_schedules(runs, name, seed):
    with runs.using(seed=seed, quantum=[200, 5, 1][seed - 1]):
        round_trip(name, seed=seed)


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


def test_every_triton_kernel_runs_here(runs):
    """Cases of this folder launch all kernels of the package; a kernel that is added needs one."""
    kernel = re.compile(r"@(?:triton|gluon)\.jit(?:\(.*?\))?\ndef (\w*kernel)\(", re.DOTALL)
    files = Path(sgl_kvpool.__file__).parent.rglob("*.py")
    found = {name for path in files for name in kernel.findall(path.read_text())}
    launched = set()
    tiles = {tile.kernel: tile for layout, tile in test_ptx_decode.SMALLEST if layout == "fp4"}
    for tile in tiles.values():
        runs.launched.clear()
        test_ptx_decode.test_every_tile(runs, MLAKVCacheLayout.FP4, tile)
        launched |= {name for name, _ in runs.launched}
    round_trip("fp4")
    launched |= {name for name, _ in runs.launched}
    assert found == launched
