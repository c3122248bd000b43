"""The emulated device itself: what it forbids, and which mistakes it notices. Runs with `--emulated`."""

import gc

import pytest
import torch

emulated = pytest.importorskip("emulated_cuda.operators")
from emulated_cuda.graphs import CaptureFault  # noqa: E402
from emulated_cuda.memory import ALLOCATOR, MemoryFault  # noqa: E402
from emulated_cuda.order import OrderFault  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.quick]
ROWS, WIDTH = 4096, 416  # above the size up to which every byte has a clock of its own


@pytest.fixture
def stream():
    torch.cuda.synchronize()
    return torch.cuda.Stream()


@pytest.fixture
def strict():
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def pool():
    return torch.zeros(ROWS, WIDTH, dtype=torch.uint8, device="cuda")


def graph_of(step, warm=True):
    if warm:
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


# ----------------------------------------------------------------------------------- devices and waits


def test_tensors_of_two_devices_are_refused():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="cuda") + torch.ones(3)
    assert (torch.ones(3, device="cuda") * 2).cpu().tolist() == [2, 2, 2]


def test_numpy_of_a_device_tensor_is_refused():
    with pytest.raises(TypeError, match="cuda:0"):
        torch.ones(3, device="cuda").numpy()


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.tolist(),
        lambda x: bool((x > 0).any()),
        lambda x: torch.tensor([1, 2], device="cuda"),
        lambda x: torch.ones(2).to("cuda", non_blocking=True),
        lambda x: x.copy_(torch.ones(5)),
        lambda x: torch.repeat_interleave(torch.arange(5, device="cuda"), x.long()),
    ],
)
def test_waits_of_the_host_are_found(strict, wait):
    x = torch.ones(5, device="cuda")
    with pytest.raises(emulated.HostWait):
        wait(x)


def test_copies_from_pinned_memory_and_index_operators_do_not_wait(strict):
    pinned = torch.arange(5, dtype=torch.float32).pin_memory()
    assert pinned.is_pinned()
    assert not torch.ones(5).is_pinned()
    x = pinned.to("cuda", non_blocking=True)
    y = x[torch.zeros(3, dtype=torch.int64, device="cuda")]
    torch.cuda.set_sync_debug_mode("default")
    assert y.tolist() == [0, 0, 0]


# ------------------------------------------------------------------------------------ streams and events


@pytest.mark.parametrize("ordered_by", [None, "event", "wait_stream", "synchronize"])
def test_a_read_on_another_stream_needs_an_order(stream, ordered_by):
    x = pool()
    torch.cuda.synchronize()
    x[7:9].fill_(3)
    if ordered_by == "event":
        stream.wait_event(torch.cuda.current_stream().record_event())
    elif ordered_by == "wait_stream":
        stream.wait_stream(torch.cuda.current_stream())
    elif ordered_by == "synchronize":
        torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(stream):
        if ordered_by is None:
            with pytest.raises(OrderFault, match=r"test_device\.py.*reads on stream.*test_device\.py"):
                x.clone()
        else:
            x.clone()
    torch.cuda.synchronize()


def test_a_write_needs_an_order_after_reads(stream):
    x = pool()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        kept = x[5].clone()
    x[6].fill_(1)  # another row
    with pytest.raises(OrderFault, match="writes on the default stream what"):
        x[5].fill_(1)
    torch.cuda.current_stream().wait_stream(stream)
    x[5].fill_(1)
    torch.cuda.synchronize()
    assert not kept.any()


def test_rows_of_index_operators_are_told_apart(stream):
    """A pool is one storage that two streams use at once: only the rows of an index are touched."""
    x = pool()
    mine, other = (torch.tensor(rows, device="cuda") for rows in ([1, 5, 900], [2, 6, 901]))
    values = torch.ones(3, WIDTH, dtype=torch.uint8, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.index_copy_(0, mine, values)
    x[other] = values
    x[other].clone()
    with pytest.raises(OrderFault):
        x[mine].clone()
    torch.cuda.synchronize()


def test_pinned_memory_is_written_when_the_host_waits(stream):
    target = torch.zeros(4).pin_memory()
    with torch.cuda.stream(stream):
        source = torch.ones(4, device="cuda")
        target.copy_(source, non_blocking=True)
        done = stream.record_event()
    for read in (target.sum, target.tolist):
        with pytest.raises(OrderFault, match="reads on the host what copy to the host"):
            read()
    done.synchronize()
    assert target.tolist() == [1, 1, 1, 1]


def test_pinned_memory_must_not_change_before_it_was_read(stream):
    source = torch.zeros(4).pin_memory()
    with torch.cuda.stream(stream):
        source.to("cuda", non_blocking=True)
    with pytest.raises(OrderFault, match="writes on the host what"):
        source.fill_(1)
    stream.synchronize()
    source.fill_(1)


# ------------------------------------------------------------------------------------------------ memory


def test_memory_is_counted_and_freed_memory_is_poisoned():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x = torch.zeros(1000, dtype=torch.uint8, device="cuda")
    block = ALLOCATOR.of(x.on_cpu)
    assert torch.cuda.memory_allocated() == before + 1000
    del x
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() == before + 1000
    assert (block.bytes == 0xEE).all()


def test_empty_memory_is_poisoned():
    assert (torch.empty(64, dtype=torch.uint8, device="cuda").cpu() == 0xEE).all()


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_in_use_by_another_stream_needs_record_stream(stream, recorded):
    x = pool()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.clone()
    if recorded:
        x.record_stream(stream)
    del x
    gc.collect()
    problems = list(ALLOCATOR.problems)
    ALLOCATOR.problems.clear()
    torch.cuda.synchronize()
    assert len(problems) == (not recorded)


# ------------------------------------------------------------------------------------------------ graphs


def test_a_replay_repeats_operations_on_new_values():
    x, out = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")

    def step():
        out.copy_(x * 3 + 1)
        return out + 0

    graph, result = graph_of(step, warm=False)
    assert out.tolist() == [0, 0, 0, 0]  # a capture executes nothing
    x.fill_(2)
    graph.replay()
    assert out.tolist() == result.tolist() == [7, 7, 7, 7]


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.ones(3).to("cuda"),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: torch.ones(3).pin_memory(),
    ],
)
def test_what_a_capture_forbids(forbidden):
    x = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    with pytest.raises(CaptureFault, match="capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        forbidden(x)


def test_a_graph_that_uses_freed_memory_is_found():
    x = torch.ones(1000, device="cuda")
    held = [x]
    graph, out = graph_of(lambda: held[0] * 2)
    graph.replay()
    assert out[0].item() == 2
    del x
    held.clear()
    gc.collect()
    with pytest.raises(MemoryFault, match="freed"):
        graph.replay()


def test_tensors_of_a_graph_that_was_reset_are_found():
    x = torch.ones(1000, device="cuda")
    graph, out = graph_of(lambda: x * 2)
    graph.replay()
    graph.reset()
    with pytest.raises(MemoryFault, match="freed"):
        out.sum()


def test_another_stream_inside_a_capture_has_to_belong_to_it(stream):
    x = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    with (
        pytest.raises(CaptureFault, match="does not belong"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        torch.cuda.stream(stream),
    ):
        x.add_(1)


# ----------------------------------------------------------------------------------------------- launches


def test_kernels_run_in_the_order_of_their_stream(stream):
    """Rows that a store kernel writes on one stream, and another reads."""
    from sgl_kvpool import MLAKVCacheLayout
    from sgl_kvpool.codec import gather_rows, store_rows

    fmt = MLAKVCacheLayout("fp4").row_format(512, 64)
    rows = torch.zeros(ROWS, fmt.row_bytes, dtype=torch.uint8, device="cuda")
    k, rope = torch.randn(2, 512, device="cuda").bfloat16(), torch.randn(2, 64, device="cuda").bfloat16()
    slots, others = torch.tensor([3, 70], device="cuda"), torch.tensor([4, 71], device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    store_rows(rows, slots, k, rope, fmt)
    with torch.cuda.stream(stream):
        gather_rows(rows, others, fmt)
        with pytest.raises(OrderFault, match=r"gather.*reads|reads"):
            gather_rows(rows, slots, fmt)
    torch.cuda.synchronize()


def test_a_kernel_takes_no_tensor_of_the_host():
    from sgl_kvpool import MLAKVCacheLayout
    from sgl_kvpool.codec import triton as codec_triton

    fmt = MLAKVCacheLayout("fp4").row_format(128, 0)
    rows = torch.zeros(8, fmt.row_bytes, dtype=torch.uint8, device="cuda")
    with pytest.raises(RuntimeError, match="tensor of the host"):
        codec_triton.store_rows(rows, torch.tensor([1]), torch.ones(1, 128).bfloat16(), None, fmt, 1.0)
