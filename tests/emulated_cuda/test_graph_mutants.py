"""Mistakes around CUDA graphs, plans and replaced operators, made on purpose: the device notices each."""

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("sglang")
from graph_runners import Model, as_eager, batch_of, eager, model_runner, publish_one_rank
from test_cuda_backend_gpu import Case, no_waits
from test_graph_runners_gpu import LENGTHS, frozen_garbage  # noqa: F401
from test_prefills_in_flight_gpu import Absorbed, Mha, MhaChunks

from emulated_cuda import indexer_operators, launches, libraries
from emulated_cuda.accesses import UnmarkedWrite
from emulated_cuda.graphs import CaptureFault
from emulated_cuda.memory import ALLOCATOR, MemoryFault
from emulated_cuda.operators import HostWait
from emulated_cuda.order import OrderFault
from sgl_kvpool.srt.attention.cuda import KVPoolMLACudaBackend
from sgl_kvpool.srt.attention.decode_verify import DecodeBatch, KVLens

pytestmark = [pytest.mark.gpu, pytest.mark.quick]


def case_and_model():
    publish_one_rank()
    return Case("fp4", *LENGTHS["DECODE"]), Model()


def runner_of(case, model, requests=(4,)):
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    return DecodeCudaGraphRunner(model_runner(case, publish_one_rank(requests=requests), model))


@pytest.fixture(scope="module")
def captured():
    """A case, its model, and the runner that captured a graph for four requests."""
    case, model = case_and_model()
    return case, model, runner_of(case, model)


KERNELS = ["store_kernel", "gluon_decode_kernel", "merge_kernel"]


def test_kernels_of_a_decode_graph(captured):
    """One store, one decode and one merge; counts are SGLang's lengths."""
    (graph,) = captured[2].backend._graphs.values()
    kernels = [step.name for step in graph.steps if not (step.orders or step.name.startswith("aten."))]
    assert kernels == KERNELS


@pytest.mark.parametrize("kernel", [*KERNELS, "aten.mm.default"])
def test_a_step_left_out_of_a_graph(captured, monkeypatch, kernel):
    """Before any whole replay, since the graph's memory would keep its results."""
    case, model, runner = captured
    (graph,) = runner.backend._graphs.values()
    wanted = eager(case, model, batch_of(case, "DECODE"))
    steps = [step for step in graph.steps if step.name != kernel]
    assert len(steps) == len(graph.steps) - 1
    monkeypatch.setattr(graph, "steps", steps)
    with pytest.raises(AssertionError):
        as_eager(case, runner.execute(batch_of(case, "DECODE")), wanted)


def test_a_pageable_copy_per_replay(captured, monkeypatch):
    case, _, runner = captured

    def with_copy(self, batch, in_capture=False):
        lengths = torch.tensor([30, 300, 7, 1]).to("cuda")
        self.forward_metadata = DecodeBatch(lengths, batch.req_pool_indices)

    monkeypatch.setattr(KVPoolMLACudaBackend, "init_forward_metadata_out_graph", with_copy)
    batch = batch_of(case, "DECODE")
    with pytest.raises(HostWait, match=r"test_graph_mutants\.py.*the host waits"), no_waits():
        runner.execute(batch)


def test_a_host_read_in_a_capture(monkeypatch):
    fill = KVLens.fill

    def with_read(self, few, batch):
        fill(self, few, batch)
        self.longest = int(few.kv_lens.max())

    monkeypatch.setattr(KVLens, "fill", with_read)
    case, model = case_and_model()
    # SGLang raises what it catches as an Exception with its advice.
    with pytest.raises(Exception, match=r"test_graph_mutants\.py.*not permitted when stream is capturing"):
        runner_of(case, model, requests=(1,))


def test_counts_baked_at_capture(monkeypatch):
    """Lengths read at capture, when every request has one token. Unless kept, they are a use after free."""
    of, kept = KVLens.of, []

    def baked(self, batch):
        few = of(self, batch)
        kept.append(torch.tensor(few.kv_lens.tolist(), device="cuda"))
        return replace(few, kv_lens=kept[-1])

    case, model = case_and_model()
    with monkeypatch.context() as patch:
        patch.setattr(KVLens, "of", baked)
        runner = runner_of(case, model)
    wanted = eager(case, model, batch_of(case, "DECODE"))
    found = runner.execute(batch_of(case, "DECODE"))
    with pytest.raises(AssertionError, match="logits differ from the eager run"):
        as_eager(case, found, wanted)


def test_a_kernel_argument_on_the_cpu(captured, monkeypatch):
    """The checks of `mla_decode` name the tensor; without them the launch does."""
    case, model, _ = captured
    monkeypatch.setattr(case.backend._lists, "lse", case.backend._lists.lse.cpu())
    with pytest.raises(ValueError, match="lse is on cpu and row_buffer on cuda:0"):
        eager(case, model, batch_of(case, "DECODE"))
    monkeypatch.setattr("sgl_kvpool.codec.checks.output", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match=r"argument \d+ of kernel \w+ is a tensor of the host"):
        eager(case, model, batch_of(case, "DECODE"))


def test_use_after_free_of_a_graphs_tensor(captured):
    """Results of a replay are views of the graph's memory; last, because it resets the graph."""
    case, _, runner = captured
    found = runner.execute(batch_of(case, "DECODE"))
    runner.backend.cleanup()
    with pytest.raises(MemoryFault, match=r"test_graph_mutants\.py:\d+ uses memory of .* that was freed at"):
        found.hidden_states.sum()


@pytest.mark.parametrize("kind", [Mha, MhaChunks])
def test_one_pinned_buffer_for_all_plans(kind, monkeypatch):
    prefill, empty_like = kind(), torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda x, **options: x if options.get("pin_memory") else empty_like(x, **options)
    )
    prefill.enqueue(0)
    with pytest.raises(OrderFault, match=r"flashinfer.* writes on the host what a copy .* read on"):
        prefill.enqueue(1)


@pytest.mark.parametrize("kind", [Mha, MhaChunks, Absorbed])
def test_pinned_memory_of_a_plan_that_is_not_kept(kind, monkeypatch):
    for module in ("extend", "prefill"):
        monkeypatch.setattr(f"sgl_kvpool.srt.attention.{module}.keep_pinned", lambda wrapper: None)
    prefill = kind()
    prefill.enqueue(0)
    assert not ALLOCATOR.problems
    prefill.enqueue(1)
    problems = ALLOCATOR.taken_problems()
    assert problems
    for problem in problems.splitlines():
        assert re.search("allocated at .* a copy at .* may still use it: torch's allocator", problem)


def test_a_write_that_is_not_stated(monkeypatch):
    """Of an operator whose schema marks nothing, and of a launch."""
    pytest.importorskip("sgl_kernel")
    x, out = torch.ones(2, 3, 8, device="cuda"), torch.zeros(2, 8, device="cuda")
    monkeypatch.delitem(libraries.WRITES, "sgl_kernel::moe_sum_reduce")
    with pytest.raises(UnmarkedWrite, match="moe_sum_reduce.* writes its argument 1"):
        torch.ops.sgl_kernel.moe_sum_reduce(x, out, 2.0)

    launch, one = launches.launch, torch.ones(1, dtype=torch.int32, device="cuda")
    monkeypatch.setattr(launches, "launch", lambda *args, writes: launch(*args, writes=[]))
    with pytest.raises(UnmarkedWrite, match="topk ragged writes its argument 3"):
        indexer_operators._topk_ragged(out, one, None, one, torch.zeros(1, 64, device="cuda").int())


def in_a_branch(mistake=None):
    """A graph of 2 x + 1, of which a branch computes x + 1; its input and its result."""
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    before = side.record_event()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        here = torch.cuda.current_stream()
        if mistake == "waits for an event of before":
            here.wait_event(before)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            more = x + 1
        if mistake not in ("joins too late", "never joins"):
            here.wait_stream(side)
        y = x + more
        if mistake == "joins too late":
            here.wait_stream(side)
    return graph, x, y


@pytest.mark.parametrize("mistake", ["never joins", "waits for an event of before"])
def test_mistakes_with_the_streams_of_a_capture(mistake):
    message = "waits for work that is not captured" if "waits" in mistake else "does not wait for the work of"
    with pytest.raises(CaptureFault, match=message):
        in_a_branch(mistake)


def test_a_branch_of_a_graph():
    graph, x, y = in_a_branch()
    for value in (2.0, 5.0):
        graph.replay()
        assert y.tolist() == (2 * x + 1).tolist()
        x.fill_(value)
    graph, *_ = in_a_branch("joins too late")
    with pytest.raises(OrderFault, match="reads on .* what add at .* wrote on stream"):
        graph.replay()
    torch.cuda.synchronize()
