"""SGLang's two-batch overlap around kvpool_mla: both halves of a batch in flight, against the whole batch."""

import itertools
import types

import codec_oracle as oracle
import graph_runners as runners
import pytest
import torch
from engine_cases import quick
from test_cuda_backend_gpu import Case

pytest.importorskip("sglang")
pytestmark = pytest.mark.gpu

#: The second half of three requests begins at the second, eight bytes behind an address of 16.
LENGTHS = {
    "DECODE": ([30, 300, 7], [29, 299, 6]),
    "TARGET_VERIFY": ([30, 300, 7], [26, 296, 3]),
    "EXTEND": ([9, 140, 25, 31], [0, 100, 4, 0]),
}


def in_halves(self, input_ids, positions, forward_batch):
    """`Body.forward` with the halves of a split batch, by SGLang's executor: one stage per layer."""
    from sglang.srt.batch_overlap.operations import YieldOperation, execute_overlapped_operations

    halves = forward_batch.tbo_children
    if halves is None:
        return runners.Body.forward(self, input_ids, positions, forward_batch)

    def of(layer):
        def attend(state, forward_batch, hidden):
            hidden = self.attend(layer, hidden, forward_batch.input_ids, forward_batch)
            return {"forward_batch": forward_batch, "hidden": hidden}

        return attend

    stages = [step for layer in self.layers for step in (of(layer), YieldOperation())][:-1]
    inputs = [{"forward_batch": half, "hidden": None} for half in halves]
    found = execute_overlapped_operations(inputs, [stages] * 2, [0, 1])
    return torch.cat([half["hidden"] for half in found])


class Halves(Case):
    """A case with SGLang's backend for two batches, whose parts come from our constructor."""

    def _backend(self, most_queries):
        from sglang.srt.layers.attention.tbo_backend import TboAttnBackend

        return TboAttnBackend.init_new(lambda: super(Halves, self)._backend(most_queries))


@pytest.fixture
def overlapped(monkeypatch):
    """`overlapped(mode, layout, threshold=)`: arguments, case and model of a server that splits batches."""
    from sglang.srt.runtime_context import get_flags

    def make(mode, layout, threshold=0.0, **graphs):
        args = runners.publish_one_rank(
            speculative=mode == "TARGET_VERIFY", enable_two_batch_overlap=True, **graphs
        )
        monkeypatch.setattr(get_flags().moe, "tbo_enabled", True)
        monkeypatch.setattr(get_flags().moe, "tbo_token_distribution_threshold", threshold)
        if threshold:  # the second half reads what the first has stored
            monkeypatch.setenv("KVPOOL_PREFILL_READS_ROWS", "1")
        case, model = Halves(layout, *LENGTHS[mode]), runners.Model((1, 2))
        model.model.forward = types.MethodType(in_halves, model.model)
        runners.store_prefixes(case, model.model.layers[1])
        return args, case, model

    return make


def split(case, batch, mode):
    """The batch with its halves, as SGLang's ModelRunner splits it."""
    from sglang.srt.batch_overlap import two_batch_overlap as tbo
    from sglang.srt.layers.dp_attention import DpPaddingMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    batch.dp_padding_mode = DpPaddingMode.SUM_LEN
    batch.seq_lens_cpu = batch.seq_lens.cpu()
    batch.tbo_split_seq_index = tbo.compute_split_seq_index(
        batch.forward_mode,
        len(batch.input_ids),
        batch.extend_seq_lens_cpu,
        tbo.get_token_num_per_seq(batch.forward_mode, batch.spec_info),
    )
    with forward_context(ForwardContext(attn_backend=case.backend)):
        tbo.TboForwardBatchPreparer.prepare(batch)
    return batch


def halves_against_the_whole(overlapped, layout, mode, threshold=0.0):
    _, case, model = overlapped(mode, layout, threshold)
    wanted, rows = runners.eager(case, model, runners.batch_of(case, mode))
    batch = split(case, runners.batch_of(case, mode), mode)
    sizes = [half.batch_size for half in batch.tbo_children]
    found = runners.computed(case, model, batch)
    torch.testing.assert_close(found.hidden_states, wanted.hidden_states, rtol=2e-2, atol=1e-2)
    assert all(map(torch.equal, runners.stored_rows(case), rows))
    return sizes


@pytest.mark.quick
def test_halves_that_share_a_request(overlapped):
    """SGLang cuts a long prompt: the second half attends what the first has stored."""
    assert halves_against_the_whole(overlapped, "fp4", "EXTEND", threshold=0.49) == [3, 2]


def replayed(overlapped, layout, mode, requests=4):
    """Three requests, padded: SGLang captures even numbers."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    args, case, model = overlapped(mode, layout, requests=(requests,))
    runner = DecodeCudaGraphRunner(runners.model_runner(case, args, model))
    wanted, rows = runners.eager(case, model, runners.batch_of(case, mode))
    batch = runners.batch_of(case, mode)
    batch.tbo_split_seq_index = 1
    batch.seq_lens_cpu = batch.seq_lens.cpu()
    assert runner.can_run_graph(batch)
    found = runner.execute(batch)  # SGLang waits for the sizes of the halves
    assert (runner.raw_bs, runner.bs) == (3, requests)
    torch.testing.assert_close(found.hidden_states, wanted.hidden_states, rtol=2e-2, atol=1e-2)
    assert all(map(torch.equal, runners.stored_rows(case), rows))


@pytest.mark.quick
def test_halves_in_a_graph_of_six_requests(overlapped):
    replayed(overlapped, "fp4", "DECODE", requests=6)


@pytest.mark.parametrize(
    ("layout", "mode"),
    quick(itertools.product(oracle.LAYOUTS, LENGTHS), itertools.product(["fp4"], LENGTHS)),
)
def test_halves_of_a_batch(overlapped, layout, mode):
    sizes = halves_against_the_whole(overlapped, layout, mode)
    assert sizes == ([2, 2] if mode == "EXTEND" else [1, 2])
    if mode != "EXTEND":
        replayed(overlapped, layout, mode)
