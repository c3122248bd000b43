"""SGLang's HybridCacheController and our host tier on a cuda pool, beside the replays of a decode graph."""

import gc

import pytest
import torch

pytest.importorskip("emulated_cuda.operators")
from engine_cases import quick
from test_cuda_backend_gpu import PAGE, Case, publish_alone, published_on_cuda  # noqa: F401

from emulated_cuda import order
from emulated_cuda.memory import ALLOCATOR
from sgl_kvpool import metrics
from sgl_kvpool.transfer.host_options import HostTierOptions

pytestmark = pytest.mark.gpu
#: Pages of the requests of the graph, and pages that are moved.
USED, MOVED = 7, 3
GUARD = 0xEE


@pytest.fixture
def controller_of(process_group, monkeypatch):
    """`controller_of(pool, io_backend, forward, drafts)`: SGLang's, which waits for the stream `forward`."""
    from host_tier import controller_over
    from sglang.srt.runtime_context import get_parallel, restore_context, snapshot_context

    from sgl_kvpool.sglang_plugin import hook_groups

    hook_groups.apply(hook_groups.named("host tier, host tier of hybrid models"))
    monkeypatch.setattr("sgl_kvpool.transfer.gpu_engine.KERNEL_BLOCKS", 3)
    before, tiers = snapshot_context(), []

    def build(pool, io_backend, forward, drafts=()):
        label = {"kernel": "page_first", "direct": "page_first_direct"}[io_backend]
        get_parallel().clear_stamp()
        publish_alone(
            enable_hierarchical_cache=True, hicache_ratio=2.0, page_size=PAGE, hicache_mem_layout=label,
            hicache_io_backend=io_backend,
        )  # fmt: skip
        controller = controller_over(pool, process_group, io_backend, drafts=drafts)
        tiers.append(controller.mem_pool_host.anchor_entry.host_pool)
        controller.write_fence_stream = controller.load_fence_stream = forward
        return controller

    yield build
    torch.cuda.synchronize()
    for tier in tiers:
        tier.destroy()
    assert not ALLOCATOR.registered
    get_parallel().clear_stamp()  # SGLang's restore leaves the rank
    publish_alone()
    restore_context(before)


class Server:
    """A decode graph of three requests, and a controller over the rest of their pool."""

    def __init__(self, controller_of, layout, arrangement, engine, io_backend, host="same"):
        options = HostTierOptions(layout=host, engine=engine)
        self.case = Case(layout, [30, 300, 7], [29, 299, 6], arrangement, used_pages=USED, host_tier=options)
        self.pool = self.case.pool
        self.forward = torch.cuda.Stream()
        self.controller = controller_of(self.pool, io_backend, self.forward)
        self.tier = self.controller.mem_pool_host.anchor_entry.host_pool
        self.allocator = self.controller.mem_pool_device_allocator
        self.allocator.alloc(USED * PAGE)
        self.wanted = self.case.run("DECODE").clone()
        self._capture()
        self.forward.wait_stream(torch.cuda.current_stream())

    def _capture(self):
        case, batch = self.case, self.case.batch("DECODE")
        self.batch = batch  # which the graph reads
        case.backend.init_cuda_graph_state(3, 3)
        case.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        q, k, ropes = case.given
        gc.collect()  # else engines of earlier tests may be destroyed within the capture, which refuses that
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            case.backend.init_forward_metadata_in_graph(batch)
            self.found = case.backend.forward(q, k, k, case.layer, batch, **ropes)
        self.outputs = []

    def decode(self):
        """A step of the model, on its stream."""
        with torch.cuda.stream(self.forward):
            self.graph.replay()
            self.outputs.append(self.found.clone())

    def write(self, slots, values):
        """The model stores rows, one value for each layer; GUARD if None."""
        self.forward.wait_stream(torch.cuda.current_stream())  # as for every batch: its slots are made there
        with torch.cuda.stream(self.forward):
            rows = self.pool.slot_to_row(slots)
            for layer in range(3):
                stored = self.pool.kv_buffer[layer].view(torch.uint8)
                stored[rows] = values[layer] if values is not None else GUARD

    def read(self, slots):
        """The model reads rows of every layer, which wait for a load."""
        self.forward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.forward):
            rows = self.pool.slot_to_row(slots)
            return [self.pool.get_row_buffer(layer)[rows] for layer in range(3)]

    def unharmed(self):
        torch.cuda.synchronize()
        return all(torch.equal(out, self.wanted) for out in self.outputs)


def moved(server):
    """Back up rows, evict them and load them elsewhere, while the model decodes; both rows."""
    controller = server.controller
    row_bytes = server.pool.row_format.row_bytes
    values = torch.randint(0, 256, (3, MOVED * PAGE, 1, row_bytes), dtype=torch.uint8, device="cuda")
    taken = server.allocator.alloc(MOVED * PAGE)
    torch.cuda.synchronize()
    server.write(taken, values)
    server.decode()
    kept = controller.write(taken, node_id=1)
    server.decode()
    controller.ack_write_queue.pop().finish_event.synchronize()
    other = server.allocator.alloc(PAGE)  # so that the pages are loaded elsewhere
    server.allocator.free(taken)
    server.write(taken, None)
    found = controller.load(kept, node_id=1)
    server.decode()
    controller.layer_done_counter.set_consumer(controller.start_loading())
    server.decode()
    read = server.read(found)
    server.decode()
    controller.ack_load_queue.pop()
    torch.cuda.synchronize()
    server.allocator.free(other)
    return values, read


@pytest.mark.parametrize(
    ("layout", "arrangement", "engine", "io_backend"),
    [
        pytest.param("fp4", "layer_major", "staged", "kernel", marks=pytest.mark.quick),
        pytest.param("fp8_block_scale", "token_major", "copy_engine", "direct", marks=pytest.mark.quick),
        pytest.param("fp4_fp8_rope", "page_major", "kernel", "kernel", marks=pytest.mark.quick),
        ("bf16", "token_major", "staged", "direct"),
        ("fp8", "page_major", "auto", "direct"),
        ("fp4", "token_major", "kernel", "direct"),
        ("bf16", "layer_major", "copy_engine", "kernel"),
        ("fp8", "layer_major", "kernel", "kernel"),
        ("fp4", "page_major", "copy_engine", "kernel"),
        ("fp8_block_scale", "page_major", "auto", "kernel"),
    ],
)
def test_pages_move_while_the_model_decodes(controller_of, layout, arrangement, engine, io_backend):
    server = Server(controller_of, layout, arrangement, engine, io_backend)
    names = {engine} if engine != "auto" else {"staged", "copy_engine"}
    assert set(server.tier._channels.engines.split(" and ")) <= names
    for _ in range(2):
        values, read = moved(server)
        assert all(torch.equal(a, b) for a, b in zip(values, read, strict=True))
        server.controller.layer_done_counter.set_consumer(-1)
    assert server.unharmed()
    assert len(server.outputs) == 10


@pytest.mark.parametrize("engine", ["staged", "kernel"])
@pytest.mark.parametrize(("layout", "host"), [("bf16", "fp4"), ("fp8", "fp4_fp8_rope")])
def test_rows_are_converted_while_the_model_decodes(controller_of, layout, host, engine):
    """`check_tier` compares rows with the codec in torch."""
    from sgl_kvpool.srt.self_check.host_tier import check_tier

    server = Server(controller_of, layout, "layer_major", engine, "kernel", host)
    server.decode()
    assert check_tier(server.controller, lambda good: good) == "2 pages to the host tier and back"
    server.decode()
    assert server.unharmed()


def sparse_model(controller_of, engine, io_backend="kernel"):
    """A controller, the pools of a sparse model and its draft, and a stream; one layer has no index keys."""
    from pools import dsa_pool

    made = {"device": "cuda", "size": 8 * PAGE, "start_layer": 0, "host_tier": HostTierOptions(engine=engine)}
    target = dsa_pool("fp4", layer_num=4, skip_topk_layers=[False, True, False, False], **made)
    draft = dsa_pool("fp4", layer_num=1, **made)
    forward = torch.cuda.Stream()
    return controller_of(target, io_backend, forward, (draft,)), (target, draft), forward


def loaded(controller, pools, forward):
    """Back up two pages, overwrite them and load them elsewhere; the index keys that the model then reads."""
    allocator, target = controller.mem_pool_device_allocator, pools[0]
    taken = allocator.alloc(2 * PAGE)
    keys = [pages for pool in pools for pages in pool.index_pages]
    torch.cuda.synchronize()
    for number, pages in enumerate(keys):
        pages[taken[::PAGE] // PAGE] = number + 1
    forward.wait_stream(torch.cuda.current_stream())
    kept = controller.write(taken, node_id=1)
    controller.ack_write_queue.pop().finish_event.synchronize()
    for pages in keys:
        pages.fill_(GUARD)
    forward.wait_stream(torch.cuda.current_stream())
    new = controller.load(kept, node_id=1)
    controller.layer_done_counter.set_consumer(controller.start_loading())
    forward.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(forward):
        places = new[::PAGE] // PAGE
        found = [target.get_index_k_with_scale_buffer(layer)[places] for layer in (0, 2, 3)]
        found.append(pools[1].index_pages[0][places])  # behind the target, as SGLang's drafts
    torch.cuda.synchronize()
    return found


@pytest.mark.parametrize(
    ("engine", "io_backend"),
    quick([("staged", "kernel"), ("kernel", "kernel"), ("copy_engine", "direct")], [("staged", "kernel")]),
)
def test_index_keys_arrive_before_the_event_of_their_layer(controller_of, monkeypatch, engine, io_backend):
    """For the metrics a load is one transfer of rows and keys in turn; it is counted in the next load."""
    counted = []
    monkeypatch.setattr(metrics, "transferred", lambda *transfer: counted.append(transfer))
    controller, pools, forward = sparse_model(controller_of, engine, io_backend)
    for _ in range(2):
        found = loaded(controller, pools, forward)
        assert all((keys == number + 1).all() for number, keys in enumerate(found))
    size_bytes = 2 * controller.mem_pool_host.anchor_entry.host_pool.page_bytes
    assert [each[:3] for each in counted if each[0] == "to_device"] == [("to_device", engine, size_bytes)]


# ------------------------------------------------------------------------------------------- mistakes


problems = ALLOCATOR.taken_problems


@pytest.fixture
def server(controller_of):
    return Server(controller_of, "fp4", "token_major", "kernel", "kernel")


@pytest.mark.quick
def test_a_reader_that_does_not_wait_for_its_layer(server, monkeypatch):
    """`wait_until` (srt/pool/mla.py): rows of a layer may still be loading."""
    monkeypatch.setattr(type(server.controller.layer_done_counter), "wait_until", lambda self, layer: None)
    with pytest.raises(order.OrderFault, match=r"reads on stream .* what .*copy_pages_kernel.* wrote"):
        moved(server)
    problems()


@pytest.mark.quick
@pytest.mark.parametrize("fence", ["write_fence_stream", "load_fence_stream"])
def test_a_transfer_that_does_not_wait_for_the_model(server, fence):
    setattr(server.controller, fence, None)
    try:
        moved(server)
    except order.OrderFault:
        assert fence == "load_fence_stream"
    assert "nothing orders the two" in problems()


@pytest.mark.quick
@pytest.mark.parametrize(("engine", "recorded"), [("kernel", True), ("kernel", False), ("staged", True)])
def test_page_lists_are_kept_until_they_were_read(controller_of, monkeypatch, engine, recorded):
    """SGLang's `_record_stream` (l2_transfer.py), when the list is gone before the transfer has ended.

    `staged` reads it on a stream of its own, for which the recorded one waits.
    """
    server = Server(controller_of, "fp4", "layer_major", engine, "kernel")
    if not recorded:
        engine = type(server.controller.l2_transfer_engine)
        monkeypatch.setattr(engine, "_record_stream", staticmethod(lambda *args: None))
    server.controller.write(server.allocator.alloc(MOVED * PAGE), node_id=1)
    gc.collect()
    assert ("its stream was not recorded (record_stream)" in problems()) != recorded


@pytest.mark.quick
@pytest.mark.parametrize("engine", ["staged", "kernel"])
def test_index_keys_that_arrive_behind_the_event_of_their_layer(controller_of, monkeypatch, engine):
    """`_parts_of` (srt/host/rows.py): with the rows of the last layer, which nothing but its event orders."""
    controller, pools, forward = sparse_model(controller_of, engine)
    tier = controller.mem_pool_host.anchor_entry.host_pool
    parts_of = tier._parts_of

    def late(layer_id, is_draft):
        *keys, rows = parts_of(layer_id, is_draft)
        if layer_id == 3:
            keys = [key for layer in range(4) for key in parts_of(layer, is_draft)[:-1]]
        return [*keys, rows] if is_draft or layer_id == 3 else [rows]

    monkeypatch.setattr(tier, "_parts_of", late)
    with pytest.raises(order.OrderFault, match=r"reads on stream .* what .* wrote"):
        loaded(controller, pools, forward)
    problems()
