"""The transfer engines on a GPU: bytes, registrations; needs no SGLang. `emulated_cuda` has their order."""

import ctypes
import dataclasses
import itertools
import re

import numpy as np
import pytest
import torch
from codec_oracle import LAYOUTS
from engine_cases import ADJACENT, ARRANGEMENTS, CONVERSIONS, device_pool, quick, round_trip, slots_of

from sgl_kvpool import compiler
from sgl_kvpool.transfer.channel import TransferChannel
from sgl_kvpool.transfer.engines import GPU_ENGINES, EngineTools
from sgl_kvpool.transfer.gpu_engine import PageBuffer, RegisteredChunks, gpu_calls
from sgl_kvpool.transfer.plan import TransferPlan
from sgl_kvpool.transfer.slots import Transfer, packed_view

pytestmark = pytest.mark.gpu
PAGE_SIZES = [1, 2, 61, 64]
#: Engines that convert rows.
KERNELS = ("staged", "kernel")
ENGINES = list(itertools.product(ARRANGEMENTS, GPU_ENGINES))


DEVICE = torch.device("cuda", 0)


@pytest.fixture
def stream():
    """Transfers never run on the default stream, which batches of copies refuse."""
    made = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(made):
        yield made
    made.synchronize()


def pinned(pages, page_bytes):
    return torch.empty(pages, page_bytes, dtype=torch.uint8, pin_memory=True)


def tools(page_bytes, host, *chunks):
    return EngineTools(gpu_calls(), DEVICE, PageBuffer(page_bytes, DEVICE, gpu_calls()), *chunks)


def comes_back(*case, make_tools=tools, make_host=pinned, **more):
    """`round_trip`, by default over pinned memory."""
    more |= {"make_tools": make_tools, "make_host": make_host}
    round_trip(*case, device=DEVICE, finish=torch.cuda.synchronize, **more)


@pytest.mark.parametrize(
    ("layout", "arrangement", "page_size", "engine"),
    quick(
        itertools.product(LAYOUTS, ARRANGEMENTS, PAGE_SIZES, GPU_ENGINES),
        # Every engine with every arrangement.
        [(LAYOUTS[i % len(LAYOUTS)], one, 2, engine) for i, (one, engine) in enumerate(ENGINES)],
    ),
)
def test_every_bit_comes_back(stream, layout, arrangement, page_size, engine):
    comes_back(engine, layout, layout, arrangement, page_size)


#: Each pair of layouts with each engine and page size, and so with each arrangement.
NARROWER = [
    (*pair, ARRANGEMENTS[(i + j + k) % 3], page_size, engine)
    for i, pair in enumerate(CONVERSIONS)
    for j, page_size in enumerate(PAGE_SIZES)
    for k, engine in enumerate(KERNELS)
]


@pytest.mark.parametrize(
    ("own", "other", "arrangement", "page_size", "engine"),
    quick(NARROWER, [NARROWER[n] for n in (2, 27, 42)]),  # pages of 2 tokens, in each arrangement
)
def test_narrow_rows_are_the_references(stream, own, other, arrangement, page_size, engine):
    comes_back(engine, own, other, arrangement, page_size)


@pytest.mark.parametrize("engine", KERNELS)
@pytest.mark.parametrize("geometry", [(128, 64), (256, 0), (384, 64), (640, 64)])
@pytest.mark.parametrize(("own", "other"), CONVERSIONS)
def test_warps_with_idle_lanes(stream, own, other, geometry, engine):
    """Latents of fewer than 32 blocks, of more, and of a number that is not a multiple of 32."""
    comes_back(engine, own, other, "layer_major", 3, geometry=geometry)


@pytest.mark.quick
@pytest.mark.parametrize("engine", ["staged", "copy_engine"])
def test_copies_keep_to_one_registration(stream, engine):
    """Host memory in chunks of three pages, each registered by itself, and lists of more pages in a row."""
    cudart = torch.cuda.cudart()
    registered, kept = [], []

    def registered_in_chunks(pages, page_bytes):
        assert page_bytes % 4096 == 0  # or two chunks would share a page of the operating system
        memory = torch.empty((pages + 1) * page_bytes, dtype=torch.uint8)
        kept.append(memory)
        memory = memory[-memory.data_ptr() % 4096 :][: pages * page_bytes]
        for first in range(0, pages, 3):
            address = memory.data_ptr() + first * page_bytes
            size = min(3, pages - first) * page_bytes
            assert int(cudart.cudaHostRegister(address, size, 0)) == 0
            registered.append(address)
        return memory.view(pages, page_bytes)

    def make(page_bytes, host):
        return tools(page_bytes, host, RegisteredChunks(host.data_ptr(), 3 * page_bytes))

    try:
        # 128 rows of fp4 in 7 layers: 91 pages of the operating system.
        options = {"lists": ADJACENT, "make_tools": make, "make_host": registered_in_chunks}
        comes_back(engine, "fp4", "fp4", "page_major", 128, **options)
    finally:
        torch.cuda.synchronize()
        for address in registered:
            assert int(cudart.cudaHostUnregister(address)) == 0


@pytest.mark.quick
def test_a_failed_copy_is_carried_out_by_torch(stream):
    """A copy that CUDA refuses leaves no error for the next call.

    Copies on the legacy stream are refused. A bad address would not be refused when enqueued: a batch is
    given no direction and takes the address for host memory.
    """
    if not gpu_calls().has_batches():
        pytest.skip("single copies cannot be refused without breaking the CUDA context")
    caches, on_device = device_pool("layer_major", 5, 2, 416, DEVICE)
    (group,) = caches.groups
    memory = pinned(6, group.bytes_per_page)
    host = packed_view(memory, group)
    shared, plan = tools(group.bytes_per_page, memory), TransferPlan(caches, host, "kv")
    channel = TransferChannel(plan, "to_host", lambda plan: GPU_ENGINES["copy_engine"](plan, shared, True))
    for layer in on_device:
        layer.fill_(5)
    calls = gpu_calls()

    class Refused:
        """The engine's calls, with copies moved to the legacy stream."""

        refused = 0

        def __getattr__(self, name):
            return getattr(calls, name)

        def copy_pages(self, *arguments):
            Refused.refused += 1
            calls.copy_pages(*arguments[:-1], 0)

    channel.engine.tools = dataclasses.replace(shared, calls=Refused())
    lists = (np.array([4, 0]), slots_of([1, 3], 2, DEVICE))
    memory.fill_(0)
    channel.run(Transfer(*lists, to_host=True))
    torch.cuda.synchronize()
    assert Refused.refused == 1
    assert (memory[[4, 0]] == 5).all()
    assert not memory[[1, 2, 3, 5]].any()
    torch.zeros(1, device=DEVICE).add_(1).item()  # the CUDA context is intact
    # And the engine is used again.
    channel.engine.tools = shared
    memory.fill_(0)
    channel.engine.copy(Transfer(*lists, to_host=True))
    torch.cuda.synchronize()
    assert (memory[[4, 0]] == 5).all()


@pytest.mark.quick
def test_batches_are_used_where_cuda_has_them():
    """From CUDA 12.8 on, of headers, runtime and driver (`has_batches` of csrc/cuda_steps.cuh)."""
    nvcc = compiler._version(str(compiler.cuda_toolkit()[0] / "bin" / "nvcc"))
    driver = ctypes.c_int()
    assert ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(driver)) == 0
    versions = {
        "nvcc": tuple(map(int, re.search(r"release (\d+)\.(\d+)", nvcc).groups())),
        "torch": tuple(map(int, torch.version.cuda.split(".")[:2])),
        "driver": (driver.value // 1000, driver.value % 1000 // 10),
    }
    if min(versions.values()) < (12, 8):
        pytest.skip(f"batches of copies need CUDA 12.8: {versions}")
    assert gpu_calls().has_batches(), versions
