"""Mistakes around CUDA graphs and overlap scheduling, made on purpose: the device notices each by name."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("sglang")
from graph_runners import Model, batch_of, eager, model_runner, publish_one_rank
from test_cuda_backend_gpu import Case
from test_graph_runners_gpu import LENGTHS, as_eager, frozen_garbage, no_waits  # noqa: F401
from test_overlap_gpu import Overlapped, overlapped

from emulated_cuda.memory import MemoryFault
from emulated_cuda.operators import HostWait
from emulated_cuda.order import OrderFault
from sgl_kvpool.srt.attention.cuda import KVPoolMLACudaBackend
from sgl_kvpool.srt.attention.decode_verify import DecodeBatch, KVLens

pytestmark = [pytest.mark.gpu, pytest.mark.quick]


def runner_of(case, model, requests=(4,)):
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    return DecodeCudaGraphRunner(model_runner(case, publish_one_rank(requests=requests), model))


@pytest.fixture(scope="module")
def captured():
    """A case, its model, and the runner that captured a graph for four requests."""
    publish_one_rank()
    case, model = Case("fp4", *LENGTHS["DECODE"]), Model()
    return case, model, runner_of(case, model)


def test_kernels_of_a_decode_graph(captured):
    """One store, one decode and one merge; counts are SGLang's lengths."""
    (graph,) = captured[2].backend._graphs.values()
    kernels = [name for name, _ in graph.steps if not name.startswith("aten.")]
    assert kernels == ["store_kernel", "gluon_decode_kernel", "merge_kernel"]


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
    publish_one_rank()
    case = Case("fp4", *LENGTHS["DECODE"])
    # SGLang raises what it catches as an Exception with its advice.
    with pytest.raises(Exception, match=r"test_graph_mutants\.py.*not permitted when stream is capturing"):
        runner_of(case, Model(), requests=(1,))


def test_counts_baked_at_capture(monkeypatch):
    """Lengths read at capture, when every request has one token. Unless kept, they are a use after free."""
    of, kept = KVLens.of, []

    def baked(self, batch):
        few = of(self, batch)
        kept.append(torch.tensor(few.kv_lens.tolist(), device="cuda"))
        return replace(few, kv_lens=kept[-1])

    publish_one_rank()
    case, model = Case("fp4", *LENGTHS["DECODE"]), Model()
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
    with pytest.raises(ValueError, match="lse is on cpu and pool on cuda:0"):
        eager(case, model, batch_of(case, "DECODE"))
    monkeypatch.setattr("sgl_kvpool.attention.decode_checks.output", lambda *args: None)
    with pytest.raises(RuntimeError, match=r"argument \d+ of kernel \w+ is a tensor of the host"):
        eager(case, model, batch_of(case, "DECODE"))


def test_use_after_free_of_a_graphs_tensor(captured):
    """Results of a replay are views of the graph's memory; last, because it resets the graph."""
    case, _, runner = captured
    found = runner.execute(batch_of(case, "DECODE"))
    runner.backend.cleanup()
    with pytest.raises(MemoryFault, match=r"test_graph_mutants\.py:\d+ uses memory of .* that was freed at"):
        found.hidden_states.sum()


# ----------------------------------------------------------------------------------- overlap scheduling


@pytest.fixture(scope="module")
def server():
    return overlapped("fp4")[2]


def test_a_request_table_written_before_the_last_layer_has_read_it(server, monkeypatch):
    """Every layer reads SGLang's request table, so `shared_read_ends` must not say PRE_REPLAY."""
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

    early = SharedReadEnds.PRE_REPLAY
    monkeypatch.setattr(KVPoolMLACudaBackend, "shared_read_ends", lambda self, mode: early)
    with pytest.raises(OrderFault, match=r"test_overlap_gpu\.py.*writes on .* what gluon_decode_kernel"):
        server.run([5, 9, 33])
    torch.cuda.synchronize()


def test_a_result_read_before_its_copy_is_done(server, monkeypatch):
    monkeypatch.setattr(Overlapped, "finish", lambda self, result: result.next_token_ids.tolist())
    with pytest.raises(OrderFault, match=r"reads on the host what copy to the host at .* wrote on stream"):
        server.run([5, 9, 33])
    torch.cuda.synchronize()


def test_a_forward_that_does_not_wait_for_the_scheduler(server, monkeypatch):
    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda self, other: None)
    with pytest.raises(OrderFault, match=r"reads on stream .* what .* at gpu/test_overlap_gpu\.py:\d+ wrote"):
        server.run([5, 9, 33])
    torch.cuda.synchronize()
