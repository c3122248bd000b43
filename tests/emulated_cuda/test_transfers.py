"""The compiled transfer engines on the emulated device: missing waits, and calls that CUDA refuses."""

import dataclasses
import itertools
import os
import re
import traceback

import numpy as np
import pytest
import torch
from engine_cases import device_pool, slots_of
from test_cuda_backend_gpu import no_waits

pytest.importorskip("emulated_cuda.operators")
from emulated import small_slots

from emulated_cuda import errors, order
from emulated_cuda.errors import CudaError
from emulated_cuda.memory import ALLOCATOR
from emulated_cuda.runtime import RUNTIME
from sgl_kvpool.srt.host.memory import pin
from sgl_kvpool.transfer.channel import EngineRequest, TransferChannel, channels_of
from sgl_kvpool.transfer.engines import GPU_ENGINES, EngineTools
from sgl_kvpool.transfer.gpu_engine import PageBuffer, RegisteredChunks, gpu_calls
from sgl_kvpool.transfer.plan import TransferPlan
from sgl_kvpool.transfer.slots import Transfer, packed_view

pytestmark = [pytest.mark.gpu, pytest.mark.quick]
#: Pages: twice the slots of a page buffer, and more.
PAGES, PAGE_SIZE, ROW_BYTES, LAYERS = 10, 2, 416, 3
DEVICE = torch.device("cuda", 0)


faults = ALLOCATOR.taken_problems


def without_waits(is_left_out):
    """Within the block, the calls of `cudaStreamWaitEvent` with these numbers do nothing."""
    made = itertools.count()

    def some(*arguments):
        if not is_left_out(next(made)):
            RUNTIME.cudaStreamWaitEvent(*arguments)

    return RUNTIME.replacing("cudaStreamWaitEvent", some)


class Tier:
    """A pool, a pinned host tier, and a model on a stream of its own."""

    def __init__(self, engine):
        caches, self.layers = device_pool("layer_major", PAGES, PAGE_SIZE, ROW_BYTES, DEVICE, LAYERS)
        (group,) = caches.groups
        self.memory = torch.empty(PAGES, group.bytes_per_page, dtype=torch.uint8, pin_memory=True)
        self.memory.fill_(1)
        host = packed_view(self.memory, group)
        self.there, self.back = TransferPlan(caches, host, "kv"), TransferPlan(host, caches, "kv")
        calls, made = gpu_calls(), []
        for plan, to_host in ((self.there, True), (self.back, False)):
            buffer = PageBuffer(group.bytes_per_page, DEVICE, calls) if engine == "staged" else None
            made.append(GPU_ENGINES[engine](plan, EngineTools(calls, DEVICE, buffer), to_host))
        self.store, self.load = made
        self.slots, self.pages = slots_of(range(PAGES), PAGE_SIZE, DEVICE), np.arange(PAGES)
        self.compute, self.transfer = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()

    def stored(self, value=7, waits=True):
        """The model writes, and a store follows."""
        with torch.cuda.stream(self.compute):
            for layer in self.layers:
                layer.fill_(value)
        with torch.cuda.stream(self.transfer):
            if waits:
                self.transfer.wait_stream(self.compute)
            self.store.copy(Transfer(self.pages, self.slots, to_host=True))

    def loaded(self, waits=True):
        """The model reads, a load follows, and the model reads again."""
        with torch.cuda.stream(self.compute):
            self.layers[0].clone()
        with torch.cuda.stream(self.transfer):
            if waits:
                self.transfer.wait_stream(self.compute)
            transfer = Transfer(self.pages, self.slots, to_host=False)
            for part in range(LAYERS):
                self.load.copy(transfer, part)
            done = self.transfer.record_event()
        self.compute.wait_event(done)
        with torch.cuda.stream(self.compute):
            return [layer.clone() for layer in self.layers]

    def holds(self, value):
        """Whether all rows of the pool and all pages have a value, once everything has ended."""
        torch.cuda.synchronize()
        return bool((self.memory == value).all()) and all(bool((x == value).all()) for x in self.layers)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Buffer slots of one page, groups of two layers, kernels of three blocks."""
    small_slots(monkeypatch, LAYERS * PAGE_SIZE * ROW_BYTES, 1)
    monkeypatch.setattr("sgl_kvpool.transfer.engines._GROUP_BYTES", 2 * PAGE_SIZE * ROW_BYTES)
    monkeypatch.setattr("sgl_kvpool.transfer.gpu_engine.KERNEL_BLOCKS", 3)


# --------------------------------------------------------------------------------------- missing waits


@pytest.mark.parametrize("engine", GPU_ENGINES)
def test_nothing_is_missing(engine):
    tier = Tier(engine)
    for value in (7, 8):
        tier.stored(value)
        assert tier.holds(value)
        for layer in tier.layers:
            layer.fill_(0)
        torch.cuda.synchronize()
        seen = tier.loaded()
        assert tier.holds(value)
        assert all(bool((layer == value).all()) for layer in seen)


@pytest.mark.parametrize("engine", GPU_ENGINES)
def test_a_transfer_waits_for_the_model(engine):
    """SGLang's wait before the call, and the event after it."""
    tier = Tier(engine)
    tier.stored(waits=False)
    assert "nothing orders the two" in faults()
    tier.loaded(waits=False)
    found = faults()
    assert "nothing orders the two" in found
    assert "read on stream" in found


#: Which waits `staged` makes, in the order of `cudaStreamWaitEvent`; loads have two groups of layers.
KINDS = {"entry": lambda n: n == 0, "drained": lambda n: n % 2 == 1, "filled": lambda n: n and n % 2 == 0}


@pytest.mark.parametrize(
    ("direction", "kind", "fault"),
    [
        ("store", "entry", "reads on stream .* what fill_ .* wrote"),
        ("store", "drained", "writes on stream .* what a copy .* read"),
        ("store", "filled", "reads on stream .* what .*copy_pages_kernel.* wrote"),
        ("load", "drained", "writes on stream .* what .*copy_pages_kernel.* read"),
        ("load", "filled", "reads on stream .* what a copy .* wrote"),
    ],
)
def test_every_wait_of_the_staged_engine(direction, kind, fault):
    """Without `cudaStreamWaitEvent` (csrc/cuda_steps.cuh), for each kind of wait (csrc/staging.h).

    A load's wait for `entry` matters to single copies only: batches of loads may begin earlier anyway.
    """
    tier = Tier("staged")
    tier.stored()
    torch.cuda.synchronize()
    tier.loaded()
    torch.cuda.synchronize()
    with without_waits(KINDS[kind]):
        tier.stored() if direction == "store" else tier.loaded()
    assert re.search(fault, faults())


@pytest.mark.parametrize("engine", GPU_ENGINES)
def test_an_engine_on_a_wrong_stream(engine):
    """Its end is not the event that SGLang records behind it."""
    tier = Tier(engine)
    other = torch.cuda.Stream()
    for made in (tier.store, tier.load):
        made.tools = dataclasses.replace(made.tools, current_stream=lambda: other.cuda_stream)
    try:
        tier.loaded()
        found = ""
    except order.OrderFault as fault:  # what the model reads
        found = str(fault)
    assert "nothing orders the two" in found + faults()


def test_a_page_is_loaded_after_its_backup_was_acknowledged():
    """A batch may read host pages before earlier steps of its stream, unless the host has waited for them."""
    tier = Tier("staged")
    tier.stored()
    tier.loaded()
    assert re.search("reads on stream .* what a copy .* wrote on stream", faults())


def test_pages_are_written_when_the_host_has_waited():
    tier = Tier("copy_engine")
    seen = tier.memory.numpy()
    tier.stored()
    assert (seen == 1).all()
    with pytest.raises(order.OrderFault, match="the host"):
        tier.memory.sum()
    tier.transfer.synchronize()
    assert (seen == 7).all()


# ----------------------------------------------------------------------------------- refused by CUDA


def in_a_fork(check):
    """Run a function in a process of its own: the engines never again try batches that were refused."""
    if not (pid := os.fork()):
        status = 1
        try:
            check()
            assert not ALLOCATOR.problems
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("error", [CudaError.NOT_SUPPORTED, CudaError.CALL_REQUIRES_NEWER_DRIVER])
@pytest.mark.parametrize("engine", ["staged", "copy_engine"])
def test_without_batches_copies_are_submitted_one_by_one(engine, error):
    def check():
        tier = Tier(engine)
        assert gpu_calls().has_batches()
        with RUNTIME.failing("cudaMemcpyBatchAsync", error):
            tier.stored(3)
            assert tier.holds(3)
        assert not gpu_calls().has_batches()
        RUNTIME.calls.clear()
        tier.loaded()
        assert tier.holds(3)
        assert "cudaMemcpyAsync" in RUNTIME.calls
        assert "cudaMemcpyBatchAsync" not in RUNTIME.calls
        assert errors.taken() == CudaError.SUCCESS

    in_a_fork(check)


def test_a_load_without_batches_begins_behind_the_callers_stream():
    """Single copies are in the order of their stream, so that `entry` orders a load after a store."""

    def check(waits=True):
        tier = Tier("staged")
        with RUNTIME.failing("cudaMemcpyBatchAsync", CudaError.NOT_SUPPORTED):
            tier.stored(3)
            with without_waits(lambda number: not (waits or number)):
                tier.loaded()
        assert bool(re.search("reads on stream .* what a copy .* wrote on stream", faults())) != waits

    in_a_fork(check)
    in_a_fork(lambda: check(waits=False))


@pytest.mark.parametrize(
    ("engine", "function"),
    [
        *(("staged", f"cuda{name}") for name in ("LaunchKernelExC", "EventRecord", "StreamWaitEvent")),
        *((engine, "cudaMemcpyBatchAsync") for engine in ("staged", "copy_engine")),
        ("kernel", "cudaLaunchKernelExC"),
    ],
)
@pytest.mark.parametrize("after", [0, 3])
def test_torch_repeats_a_transfer_that_fails(engine, function, after, failures):
    """At the first call or in the midst; the copies that were submitted do not disturb it."""
    tier = Tier(engine)
    there = TransferChannel(tier.there, "to_host", lambda plan: tier.store)
    back = TransferChannel(tier.back, "to_device", lambda plan: tier.load)
    for layer in tier.layers:
        layer.fill_(9)
    torch.cuda.synchronize()
    with torch.cuda.stream(tier.transfer):
        with RUNTIME.failing(function, CudaError.LAUNCH_FAILURE, after=after, count=1):
            there.run(Transfer(tier.pages, tier.slots, to_host=True))
        assert tier.holds(9)
        tier.memory.fill_(4)
        transfer = Transfer(tier.pages, tier.slots, to_host=False)
        with RUNTIME.failing(function, CudaError.LAUNCH_FAILURE, after=after, count=1):
            for part in range(LAYERS):
                back.run(transfer, part)
        assert tier.holds(4)
    failed = failures()
    assert set(failed) <= {"backup", "load"}
    assert after or failed == {"backup": 1.0, "load": 1.0}


def test_without_memory_for_a_page_buffer_auto_takes_torch(monkeypatch, failures):
    tier = Tier("kernel")
    request = EngineRequest("auto", RegisteredChunks(), gpu_calls)
    plans = [(tier.there, tier.back)]
    size = tier.memory.shape[1]
    assert channels_of(plans, size, request).engines == "staged"
    monkeypatch.setattr(ALLOCATOR, "total_bytes", ALLOCATOR.allocated_bytes + 1000)
    assert channels_of(plans, size, request).engines == "torch"
    assert failures() == {"engine_build": 1.0}
    with pytest.raises(torch.OutOfMemoryError):
        channels_of(plans, size, EngineRequest("staged", RegisteredChunks(), gpu_calls))


# ------------------------------------------------------------------------------------- registration

CHUNK = 64 << 10


@pytest.fixture
def pageable():
    memory = torch.empty((9 * CHUNK) + 4096, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 4096 :][: 8 * CHUNK].fill_(3)


def unregister(memory):
    torch.cuda.synchronize()
    for address in sorted(ALLOCATOR.registered):
        assert int(torch.cuda.cudart().cudaHostUnregister(address)) == 0
    assert not memory.is_pinned()


def test_registered_memory_is_pinned(pageable):
    assert not pageable.is_pinned()
    pin(pageable, CHUNK, chunk_bytes=2 * CHUNK)
    assert len(ALLOCATOR.registered) == 4
    assert pageable.is_pinned()
    with no_waits():
        there = pageable.to("cuda", non_blocking=True)
    with pytest.raises(order.OrderFault, match="writes on the host"):
        pageable[5:9].fill_(1)
    assert bool((there == 3).all())
    unregister(pageable)


@pytest.mark.parametrize(("refused", "chunks"), [(0, 0), (1, 8), (3, 8)])
def test_refused_registrations(pageable, refused, chunks, failures):
    """A refused chunk leaves nothing registered, and no error for the next kernel; smaller ones follow."""
    some = {"count": 1} if chunks else {}
    with RUNTIME.failing("cudaHostRegister", CudaError.OUT_OF_MEMORY, after=refused, **some):
        found = pin(pageable, CHUNK, chunk_bytes=4 * CHUNK if refused == 1 else 2 * CHUNK)
    assert len(ALLOCATOR.registered) == chunks
    assert (found is None) == (not chunks)
    assert failures() == ({} if chunks else {"registration": 1.0})
    torch.zeros(1, device="cuda")
    unregister(pageable)
