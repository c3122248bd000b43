"""The steps of the GPU engines on streams, without a GPU: every wait, every failure, and what is counted."""

import dataclasses

import numpy as np
import pytest
from emulated import CALLER, COMPUTE, calls, slots_of, small_slots, tools
from test_plan import LAYERS, PAGES, ROW, TOKENS, distinct, side

from sgl_kvpool.transfer.channel import TransferChannel
from sgl_kvpool.transfer.engines import GPU_ENGINES, KernelEngine, StagedEngine
from sgl_kvpool.transfer.plan import TransferPlan
from sgl_kvpool.transfer.slots import Transfer

pytestmark = pytest.mark.usefixtures("nothing_left_out")

#: Kinds of steps, as csrc/emulated_engines.cpp numbers them.
WORK, RECORD, WAIT = 0, 1, 2
#: Pages: more than the slots of a page buffer hold.
MANY = 40


def steps_enqueued():
    """Steps of all streams that were not played yet, and which work among them touches the same bytes.

    `[steps, 5]` int64: stream, kind, event, generation, wait; `[work, work]` bool.
    """
    count = calls().enqueued(0, 0)
    steps = np.empty((count, 5), dtype=np.int64)
    assert calls().enqueued(steps.ctypes.data, count) == count
    work = int((steps[:, 1] == WORK).sum())
    conflicts = np.empty((work, work), dtype=bool)
    calls().conflicts(conflicts.ctypes.data)
    return steps, conflicts


def orders(steps, without=None):
    """Which work is done before which, `[work, work]` bool, by the rules of CUDA's streams and events.

    A step follows those before it on its stream; a wait also follows the record of its event with its
    generation, if that was not played before. `without`: number of a wait that is left out.
    """
    count = len(steps)
    before = np.zeros((count, count), dtype=bool)
    stream, kind, event, generation, number = steps.T
    for row in range(1, count):
        before[row - 1, row] = stream[row - 1] == stream[row]
    for row in np.flatnonzero(kind == WAIT):
        if without is None or number[row] != without:
            records = (kind == RECORD) & (event == event[row]) & (generation == generation[row])
            before[records, row] = True
    for through in range(count):  # transitive closure
        before |= before[:, through, None] & before[through]
    work = kind == WORK
    return before[np.ix_(work, work)]


class Server:
    """A pool, a host tier, and a model that writes rows, with the waits of SGLang's streams."""

    def __init__(self, monkeypatch, arrangement="layer_major"):
        sizes = {"layers": 5, "tokens": 2, "row": 16}
        self.page_bytes = 5 * 2 * 16
        small_slots(monkeypatch, self.page_bytes, 3)
        monkeypatch.setattr("sgl_kvpool.transfer.engines._GROUP_BYTES", 2 * 2 * 16)
        self.device, self.on_device = side(arrangement, 0, pages=MANY, **sizes)
        self.host, self.on_host = side("page_major", 0, pages=MANY, **sizes)
        self.store = StagedEngine(TransferPlan(self.device, self.host, "kv"), tools(self.page_bytes), True)
        self.load = StagedEngine(TransferPlan(self.host, self.device, "kv"), tools(self.page_bytes), False)
        self.lists = [slots_of(range(n, MANY, 2), 2) for n in (0, 1)]
        self.host_pages = [np.arange(n, MANY, 2) for n in (1, 0)]
        self.rounds = 0

    def write(self, value_of):
        """The model sets all rows, page by page, and SGLang's transfer stream waits for it."""
        for tensor in self.device.tensors:
            for page in range(MANY):
                calls().fill(tensor[page].data_ptr(), tensor.shape[1], value_of(page), COMPUTE)
        calls().order(COMPUTE, CALLER)

    def round(self, seed):
        """Run two stores, overwrite the rows, run two loads; return whether all bytes are right.

        Bytes differ by page and round, so that a wrong order does not look right by chance.
        """
        self.rounds += 1

        def value_of(page):
            return (page * 3 + self.rounds * 41) % 120

        self.on_device[...], self.on_host[...] = 121, 122
        self.write(value_of)
        for pages, host_pages in zip(self.lists, self.host_pages, strict=True):
            self.store.copy(Transfer(host_pages, pages, to_host=True))
        calls().order(CALLER, COMPUTE)  # SGLang reuses the slots once the stores are over
        self.write(lambda page: 123)
        for pages, host_pages in zip(self.lists, self.host_pages, strict=True):
            load = Transfer(host_pages, pages, to_host=False)
            for part in range(5):
                self.load.copy(load, part)
        self.enqueued = steps_enqueued()
        calls().play(seed)
        expected = np.array([value_of(page) for page in range(MANY)])
        stored = np.empty(MANY)
        for pages, host_pages in zip(self.lists, self.host_pages, strict=True):
            stored[host_pages] = expected[pages.page_indices()]
        shape = (1, MANY, *([1] * (self.on_host.ndim - 2)))
        there = (self.on_host == stored.reshape(shape)).all()
        return bool(there and (self.on_device == expected.reshape(shape)).all())


@pytest.mark.parametrize("arrangement", ["layer_major", "page_major"])
def test_every_allowed_order_gives_the_same_bytes(monkeypatch, arrangement):
    server = Server(monkeypatch, arrangement)
    assert all(server.round(seed) for seed in range(60))


def test_every_wait_is_needed(monkeypatch):
    """With a wait left out, some order that CUDA would allow corrupts pages, if the wait prevents a race.

    Some waits prevent none here: for an event of an earlier round, or where another wait orders the same
    work. Which these are follows from the steps and the bytes that they touch.
    """
    server = Server(monkeypatch)
    server.round(0)  # from here on all events have been recorded
    calls().leave_out(-1)
    assert server.round(1)
    count = calls().leave_out(-1)
    steps, conflicts = server.enqueued
    assert sorted(steps[steps[:, 4] >= 0, 4]) == list(range(count))
    ordered = orders(steps)
    assert (conflicts <= (ordered | ordered.T | np.eye(len(ordered), dtype=bool))).all()
    needed = 0
    for left_out in range(count):
        prevents_a_race = bool((conflicts & ordered & ~orders(steps, without=left_out)).any())
        needed += prevents_a_race
        corrupted = False
        for seed in range(100):
            calls().leave_out(left_out)
            if not server.round(seed):
                corrupted = True
                break
        assert corrupted == prevents_a_race, f"wait {left_out} of {count}"
    calls().leave_out(-1)
    assert needed > count / 2


def test_a_load_whose_beginning_failed_begins_anew(monkeypatch):
    server = Server(monkeypatch)
    real, asked = calls(), []

    class Fails:
        def __getattr__(self, name):
            return getattr(real, name)

        def begin(self, *arguments):
            asked.append(arguments)
            if len(asked) == 1:
                raise RuntimeError("sgl-kvpool: cudaEventRecord: failed on purpose")
            real.begin(*arguments)

    server.load.tools = dataclasses.replace(server.load.tools, calls=Fails())
    load = Transfer(server.host_pages[0], server.lists[0], to_host=False)
    with pytest.raises(RuntimeError, match="on purpose"):
        server.load.copy(load, 0)
    for part in range(1, 5):
        server.load.copy(load, part)
    assert len(asked) == 2
    calls().play(1)


# ---------------------------------------------------------------------------------------- channels


def test_a_channel_counts_a_load_once(counting):
    device, on_device = side("layer_major", distinct)
    host, on_host = side("page_major", -18, pages=PAGES + 2)
    shared = tools(LAYERS * TOKENS * ROW)

    def moved(engine):
        labels = {"direction": "to_device", "engine": engine}
        return tuple(counting(f"sgl_kvpool_transfer_{what}_total", **labels) for what in ("bytes", "seconds"))

    channel = TransferChannel(
        TransferPlan(host, device, "kv"), "to_device", lambda plan: KernelEngine(plan, shared, False)
    )
    before = moved("kernel")
    on_host[...] = distinct(on_host.shape)
    lists = [(np.array([1, 8]), slots_of([2, 5])), (np.array([3]), slots_of([0]))]
    for numbers, pages in lists:
        load = Transfer(numbers, pages, to_host=False)
        for part in range(LAYERS):
            channel.run(load, part)
        calls().play(1)
        assert np.array_equal(
            on_device[:, pages.page_indices()], on_host[:, numbers].reshape(LAYERS, len(numbers), -1)
        )
    # A transfer is counted by the next one, so that no call waits for the last.
    after = moved("kernel")
    assert after[0] - before[0] == 2 * LAYERS * TOKENS * ROW
    assert after[1] - before[1] == pytest.approx(1.5e-3)


@pytest.mark.parametrize("engine", GPU_ENGINES)
def test_torch_follows_a_failure_and_the_engine_is_used_again(monkeypatch, counting, failures, engine):
    """A kernel or copy of a store or load fails: the bytes are right, and the engine does the next one."""
    small_slots(monkeypatch, LAYERS * TOKENS * ROW, 2)
    monkeypatch.setattr("sgl_kvpool.transfer.engines._GROUP_BYTES", 2 * TOKENS * ROW)
    device, on_device = side("layer_major", 0)
    host, on_host = side("page_major", 0, pages=PAGES + 2)
    shared = tools(LAYERS * TOKENS * ROW)
    failed = {"backup": 0, "load": 0}
    for direction in ("to_host", "to_device"):
        to_host = direction == "to_host"
        kind = "backup" if to_host else "load"
        plan = TransferPlan(device, host, "kv") if to_host else TransferPlan(host, device, "kv")
        channel = TransferChannel(
            plan, direction, lambda plan, h=to_host: GPU_ENGINES[engine](plan, shared, h)
        )
        for seed, steps in enumerate((0, 1, 2, 3, 5, 100)):
            on_device[...], on_host[...] = distinct(on_device.shape), distinct(on_host.shape)[::-1]
            numbers, pages = np.array([8, 0, 3, 5, 6]), slots_of([1, 2, 6, 0, 4])
            expected = (on_host if to_host else on_device).copy()
            if to_host:
                expected[:, numbers] = on_device[:, pages.page_indices()].reshape(LAYERS, 5, -1)
            else:
                expected[:, pages.page_indices()] = on_host[:, numbers].reshape(LAYERS, 5, -1)
            before = failures()
            calls().fail_after(steps)
            transfer = Transfer(numbers, pages, to_host=to_host)
            for part in [None] if to_host else range(LAYERS):
                channel.run(transfer, part)
            calls().play(seed)
            assert np.array_equal(on_host if to_host else on_device, expected)
            if failures() == before:
                assert steps >= 1  # the transfer has fewer steps
                continue
            assert failures() == {**before, kind: before.get(kind, 0) + 1}
            failed[kind] += 1
            calls().fail_after(-1)
            before = failures()
            both = np.array([1, 7]), slots_of([2, 5])
            # Kept until all is played.
            again = [Transfer(*both, to_host=to_host) for _ in range(3)]
            for transfer in again:
                for part in [None] if to_host else range(LAYERS):
                    channel.run(transfer, part)
            assert calls().play(seed) > 0
            assert failures() == before
    # A store by one kernel or one batch of copies has one step.
    assert failed["backup"] >= (3 if engine == "staged" else 1)
    assert failed["load"] >= 3
