"""The transfer kernels as nvcc compiles them, on ptxrun, byte for byte against torch's conversions."""

import codec_oracle as oracle
import engine_cases
import numpy as np
import ptxrun_builds
import pytest
import torch
from engine_cases import ARRANGEMENTS, CONVERSIONS, LAYERS
from ptxrun_engines import Kernels

from sgl_kvpool.transfer.engines import GPU_ENGINES
from sgl_kvpool.transfer.plan import TransferPlan
from sgl_kvpool.transfer.slots import Transfer, packed_view

pytestmark = [
    pytest.mark.skipif(ptxrun_builds.nvcc() is None, reason="needs nvcc"),
    pytest.mark.usefixtures("few_blocks"),
]
#: How each layout stores latents: `Latent` of row_conversion.h.
IDS = oracle.by_latent({"bf16": 0, "e4m3 / k_scale": 1, "e4m3 in tiles": 2, "e2m1": 3})
LAYOUTS = oracle.LAYOUTS


def round_trip(engine, own, other, arrangement, page_size, *, seed=0, change=str, **options):
    """`engine_cases.round_trip` on ptxrun; returns the launches."""
    with Kernels(change, seed=seed) as kernels:
        engine_cases.round_trip(
            engine, own, other, arrangement, page_size, device=torch.device("cpu"),
            make_tools=kernels.tools, finish=lambda: kernels.play(seed), memories=kernels.memories, **options,
        )  # fmt: skip
    return kernels.launched


@pytest.mark.parametrize("engine", ["staged", "kernel"])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_comes_back(layout, arrangement, engine):
    launched = round_trip(engine, layout, layout, arrangement, 2)
    assert {kind for kind, _ in launched} == {16}


@pytest.mark.parametrize(
    ("own", "other", "arrangement", "engine"),
    engine_cases.quick(
        [
            (*pair, arrangement, engine)
            for pair in CONVERSIONS
            for arrangement in ARRANGEMENTS
            for engine in ("staged", "kernel")
        ],
        [(*pair, ARRANGEMENTS[i % 3], ("staged", "kernel")[i % 2]) for i, pair in enumerate(CONVERSIONS)],
    ),
)
def test_rows_change_their_format_on_the_way(own, other, arrangement, engine):
    """Values with NaN and infinities; k_scales other than 1."""
    launched = round_trip(engine, own, other, arrangement, 3)
    assert {kind for kind, _ in launched} == {(IDS[own], IDS[other]), (IDS[other], IDS[own])}


@pytest.mark.parametrize("geometry", [(128, 64), (256, 0), (384, 64), (640, 64)])
@pytest.mark.parametrize(("own", "other"), CONVERSIONS)
def test_warps_with_idle_lanes(own, other, geometry):
    """Latents of 8, 16, 24 and 40 blocks, one for each lane at a time."""
    round_trip("staged", own, other, "layer_major", 3, geometry=geometry)


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize(("own", "other"), [("fp4", "fp4"), *CONVERSIONS])
def test_schedules(own, other, seed):
    round_trip("staged", own, other, ARRANGEMENTS[seed % 3], 5, seed=seed)


#: Arrangement and page size of copy runs of one row, which are 1, 3, 5 or 7 words, so that most lanes of a
#: warp are idle; and of 131 rows, which are two or more chunks, the last of them shorter.
RUNS = {"a row": ("token_major", 31), "chunks": ("layer_major", 131)}
#: A warp copies a chunk of this many words at once (`kChunkBytes` of cuda_steps.cuh).
CHUNK_WORDS = 32 * 4


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("engine", ["staged", "kernel"])
@pytest.mark.parametrize(
    ("row_bytes", "word_bytes"),
    [pytest.param(n, w, marks=pytest.mark.quick) for n, w in ((16, 16), (24, 8), (20, 4), (7, 1))],
)
def test_words_of_every_width(row_bytes, word_bytes, engine, run):
    pages, (arrangement, page_size) = 6, RUNS[run]
    run_words = (1 if run == "a row" else page_size) * row_bytes // word_bytes
    assert (run_words > CHUNK_WORDS) == (run == "chunks")
    caches, on_device = engine_cases.device_pool(arrangement, pages, page_size, row_bytes, "cpu")
    (group,) = caches.groups
    memory = torch.full((pages + 2, group.bytes_per_page), 0xEE, dtype=torch.uint8)
    host = packed_view(memory, group)
    generator = torch.Generator().manual_seed(row_bytes)
    for layer in on_device:
        layer.copy_(torch.randint(0, 256, layer.shape, dtype=torch.uint8, generator=generator))
    before = [layer.clone() for layer in on_device]
    expected = memory.clone().view(pages + 2, LAYERS, page_size, row_bytes)
    with Kernels() as kernels:
        kernels.memories += [*caches.tensors, memory]
        there = GPU_ENGINES[engine](
            TransferPlan(caches, host, "kv"), kernels.tools(group.bytes_per_page), True
        )
        slots, numbers = engine_cases.slots_of([5, 0, 3], page_size, "cpu"), np.array([1, 7, 4])
        there.copy(Transfer(numbers, slots, to_host=True))
        kernels.play()
        for i, layer in enumerate(before):
            expected[numbers, i] = layer[[5, 0, 3]]
        assert torch.equal(memory.view(expected.shape), expected)
        back = GPU_ENGINES[engine](
            TransferPlan(host, caches, "kv"), kernels.tools(group.bytes_per_page), False
        )
        slots = engine_cases.slots_of([2, 4, 5], page_size, "cpu")
        load = Transfer(numbers, slots, to_host=False)
        for part in range(LAYERS):
            back.copy(load, part)
        kernels.play()
        for i, layer in enumerate(before):
            layer[[2, 4, 5]] = expected[numbers, i]
        assert all(torch.equal(a, b) for a, b in zip(before, on_device, strict=True))
    assert {kind for kind, _ in kernels.launched} == {word_bytes}
