"""The GPU engines without a GPU: numbers of copies, limits, refusals. Their bytes: tests/gpu, emulated."""

import itertools

import numpy as np
import pytest
import torch
from emulated import calls, tools
from engine_cases import slots_of
from test_plan import ARRANGEMENTS, LAYERS, PAGES, ROW, TOKENS, copies_of, distinct, side

from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.transfer import gpu_engine
from sgl_kvpool.transfer.channel import EngineRequest, channels_of
from sgl_kvpool.transfer.conversion import RowConversion
from sgl_kvpool.transfer.engines import GPU_ENGINES, CopyEngine, KernelEngine, StagedEngine
from sgl_kvpool.transfer.gpu_engine import CopyJob, RegisteredChunks
from sgl_kvpool.transfer.plan import CopyRun, TransferPlan
from sgl_kvpool.transfer.slots import Transfer

pytestmark = pytest.mark.usefixtures("nothing_left_out")


# ---------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize(
    ("pages", "chunk_pages", "copies"),
    [
        ([0, 1, 2, 3, 4, 5], 0, 1),
        ([0, 1, 2, 3, 4, 5], 2, 3),
        ([0, 1, 2, 3, 4, 5], 4, 2),
        ([3, 4, 5], 4, 2),
        ([5, 4, 3], 0, 3),
        ([0, 2, 4], 0, 3),
        ([1], 1, 1),
        ([], 4, 0),
    ],
)
@pytest.mark.parametrize("host_is_source", [True, False])
def test_neighbours_are_one_copy_but_never_across_registrations(pages, chunk_pages, copies, host_is_source):
    device, _ = side("page_major", 0)
    host, _ = side("page_major", 0)
    chunks = RegisteredChunks(host.tensors[0].data_ptr(), chunk_pages * LAYERS * TOKENS * ROW)
    plan = TransferPlan(*((host, device) if host_is_source else (device, host)), "kv")
    job = CopyJob(plan.copy_runs, chunks)
    numbers = np.array(pages, dtype=np.int64)
    address = numbers.ctypes.data
    found = calls().count_copies(job.address, address, address, len(numbers), int(host_is_source))
    assert found == copies


@pytest.mark.parametrize(("device", "host"), list(itertools.product(ARRANGEMENTS, ["page_major"])))
def test_neighbours_on_both_sides_are_one_copy(device, host):
    """The compiled list against the runs of ascending pages, joined by hand."""
    plan = TransferPlan(side(device, 0)[0], side(host, 0)[0], "kv")
    for pages in ([0, 1, 2], [1, 3, 4, 6], [5]):
        numbers = np.array(pages, dtype=np.int64)
        job = CopyJob(plan.copy_runs, RegisteredChunks())
        found = calls().count_copies(job.address, numbers.ctypes.data, numbers.ctypes.data, len(numbers), 0)
        expected = 0
        for run in plan.copy_runs:
            copies = sorted(copies_of([run], pages, pages))
            expected += len(copies) - sum(
                (source + size, target + size) == following[:2]
                for (source, target, size), following in itertools.pairwise(copies)
            )
        assert found == expected


# ---------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("run_bytes", "converts", "blocks"),
    [
        *((73728, False, 4), (2048, False, 4), (1152, False, 8), (416, False, 16), (4100, False, 16)),
        *((7, False, 16), (73728, True, 16)),
    ],
)  # fmt: skip
def test_blocks_of_a_kernel(run_bytes, converts, blocks):
    """As few as keep a link busy: a block of a copy has 16 warps with at most 2 KB of a run in flight."""
    conversion = None
    if converts:
        own, other = (MLAKVCacheLayout(name).row_format(512, 64) for name in ("bf16", "fp4"))
        conversion = RowConversion(source=own, target=other, k_scales=(1.0,))
    run = CopyRun(
        source_address=0, target_address=0, source_page_stride=0, target_page_stride=0, run_bytes=run_bytes
    )
    job = gpu_engine.KernelJob([run], torch.device("cpu"), conversion, [0])
    assert job._numbers[3] == blocks


def test_buffers_are_bounded():
    for page_bytes in (4096, 61 * 64 * 416, 61 * 64 * 1152, 16 << 20):
        assert gpu_engine.buffer_bytes(page_bytes) <= min(128 << 20, 128 * page_bytes)
    assert gpu_engine.buffer_bytes(40 << 20) == 8 * (40 << 20)
    given_tools = tools(61 * 64 * 416)
    assert given_tools.buffer.memory.nbytes * 2 == gpu_engine.buffer_bytes(61 * 64 * 416)
    assert len(given_tools.buffer.pages(61 * 64 * 416)) == 10


def test_bad_lists_are_refused_before_anything_is_enqueued():
    device, host = side("layer_major", 0)[0], side("page_major", 0, pages=PAGES + 2)[0]
    text = rf"pages .* requested; group kv has {PAGES + 2}$"
    for engine in GPU_ENGINES.values():
        made = engine(TransferPlan(device, host, "kv"), tools(LAYERS * TOKENS * ROW), True)
        for pages in ([0, PAGES + 2], [-1, 0]):
            with pytest.raises(ValueError, match=text):
                made.copy(Transfer(np.array(pages), slots_of([1, 2]), to_host=True))
        with pytest.raises(ValueError, match="2 (source|device) pages for 1 (target|host) pages"):
            made.copy(Transfer(np.array([0]), slots_of([1, 2]), to_host=True))
    assert calls().play(0) == 0


def test_no_pages_and_no_layers():
    """A copy of no pages, or between caches of no layers, writes no byte."""
    none, empty = slots_of([]), np.array([], dtype=np.int64)
    memory = []
    for layers, (name, engine) in itertools.product((LAYERS, 0), GPU_ENGINES.items()):
        device, on_device = side("layer_major", distinct, layers=layers)
        # The staged engine copies to page-major hosts only.
        arrangement = "page_major" if layers and name == "staged" else "layer_major"
        host, on_host = side(arrangement, -18, layers=layers)
        memory.append((on_device, on_host))
        for sides, to_host in (((device, host), True), ((host, device), False)):
            made = engine(TransferPlan(*sides, "kv"), tools(LAYERS * TOKENS * ROW), to_host)
            made.copy(Transfer(empty, none, to_host=to_host))
            if not layers:
                made.copy(Transfer(np.array([1]), slots_of([1]), to_host=to_host))
    calls().play(0)
    for on_device, on_host in memory:
        assert np.array_equal(on_device, distinct(on_device.shape))
        assert (on_host == -18).all()


def test_what_an_engine_cannot_do():
    own, other = (MLAKVCacheLayout(name).row_format(256, 64) for name in ("bf16", "fp4"))
    conversion = RowConversion(source=own, target=other, k_scales=(1.0,) * LAYERS)
    device, _ = side("layer_major", 0, row=own.row_bytes)
    plan = TransferPlan(device, side("page_major", 0, row=other.row_bytes)[0], "kv", conversion)
    with pytest.raises(ValueError, match="cannot encode or decode rows; use engine staged or kernel"):
        CopyEngine(plan, tools(64), True)
    with pytest.raises(ValueError, match="needs a page buffer"):
        StagedEngine(plan, tools(64, buffer=None), True)


def test_a_load_whose_channels_interleave_is_counted_once(counting):
    """Two channels of one tier, as the rows and the index keys of a sparse model."""
    device, on_device = side("layer_major", distinct)
    host, on_host = side("page_major", -18, pages=PAGES + 2)
    shared = tools(LAYERS * TOKENS * ROW)

    def moved(engine):
        labels = {"direction": "to_device", "engine": engine}
        return tuple(counting(f"sgl_kvpool_transfer_{what}_total", **labels) for what in ("bytes", "seconds"))

    plans = [(TransferPlan(device, host, "kv"), TransferPlan(host, device, "kv"))] * 2
    request = EngineRequest("auto", None, calls)
    channels = channels_of(plans, 0, request).to_device
    for channel in channels:
        channel.engine = KernelEngine(channel.plan, shared, False)
    before = moved("kernel")
    on_host[...] = distinct(on_host.shape)
    lists = [(np.array([1, 8]), slots_of([2, 5])), (np.array([3]), slots_of([0]))]
    for numbers, pages in lists:
        load = Transfer(numbers, pages, to_host=False)
        for part in range(LAYERS):
            for channel in channels:
                channel.run(load, part)
        calls().play(1)
        assert np.array_equal(on_device[:, pages.page_indices()], on_host[:, numbers])
    # A transfer is counted by the next one, so that no call waits for the last.
    after = moved("kernel")
    assert after[0] - before[0] == 2 * 2 * LAYERS * TOKENS * ROW
    assert after[1] - before[1] == pytest.approx(1.5e-3)
