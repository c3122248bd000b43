"""Sparse attention of two batches that overlap, by SGLang's backend and executor, against the whole batch."""

import dsa_case
import pytest
import torch
from dsa_case import HEADS, RANK, SparseKernel
from test_dsa_backend import LENGTHS, PAIRS, hooked, run  # noqa: F401  # a fixture

pytestmark = pytest.mark.usefixtures("published", "hooked")


FLASHMLA = [("fp8_block_scale", "DECODE")]


def halves_of(batch, both, monkeypatch):
    """The halves of a batch, as SGLang's ModelRunner splits it."""
    from sglang.srt.batch_overlap import two_batch_overlap as tbo
    from sglang.srt.layers.dp_attention import DpPaddingMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.runtime_context import get_flags

    monkeypatch.setattr(get_flags().moe, "tbo_token_distribution_threshold", 0.0)
    tokens = len(batch.input_ids)
    batch.dp_padding_mode, batch.positions = DpPaddingMode.SUM_LEN, torch.zeros(tokens)
    if batch.forward_mode.is_decode():
        batch.extend_num_tokens = None
    each = tbo.get_token_num_per_seq(batch.forward_mode, batch.spec_info)
    lengths = batch.extend_seq_lens_cpu
    batch.tbo_split_seq_index = tbo.compute_split_seq_index(batch.forward_mode, tokens, lengths, each)
    with forward_context(ForwardContext(attn_backend=both)):
        tbo.TboForwardBatchPreparer.prepare(batch)
    return batch.tbo_children


#: A half without prefixes attends keys as computed, so all requests of a batch have a prefix, or none.
BATCHES = [("EXTEND", [0, 0, 0]), ("EXTEND", [8, 29, 6]), ("DECODE", [8, 39, 6])]


@pytest.mark.parametrize(
    ("layout", "mode", "prefixes"),
    # Decode over rows that SGLang reads needs FlashMLA.
    [(layout, *batch) for layout in PAIRS for batch in BATCHES if (layout, batch[0]) not in FLASHMLA],
)
def test_halves_compute_what_the_whole_computes(layout, mode, prefixes, monkeypatch):
    from sglang.srt.batch_overlap.operations import YieldOperation, execute_overlapped_operations
    from sglang.srt.layers.attention.tbo_backend import TboAttnBackend
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context, get_attn_backend

    SparseKernel(monkeypatch)
    case = dsa_case.Case(layout, LENGTHS, prefixes, *PAIRS[layout])
    wanted = run(case, mode)
    fresh = torch.cat([own[prefix:] for own, prefix in zip(case.slots, case.prefixes, strict=True)])
    for buffer in case.pool.kv_buffer:
        buffer.view(torch.uint8)[fresh] = 0xFF
    children = [dsa_case.make_backend(case.pool, *PAIRS[layout]) for _ in range(2)]
    for child in children:
        for name in ("req_to_token_pool", "req_to_token"):
            setattr(child, name, getattr(case.backend, name))
    both = TboAttnBackend(case.backend, children)
    batch = case.batch(mode)
    halves = halves_of(batch, both, monkeypatch)
    assert [half.batch_size for half in halves] in ([1, 2], [2, 1])
    keys = torch.cat([k[p:] for k, p in zip(case.keys, case.prefixes, strict=True)])
    lists = case.chosen()

    def attend(state, forward_batch, **_):
        own = slice(*forward_batch.tbo_parent_token_range)
        q, k = case.q[own], keys[own]
        backend = get_attn_backend()
        forward = backend.forward_decode if mode == "DECODE" else backend.forward_extend
        out = forward(
            q[..., :RANK].reshape(len(q), -1), k[..., :RANK], k[..., :RANK], case.layer, forward_batch,
            q_rope=q[..., RANK:], k_rope=k[..., RANK:], topk_indices=lists[own],
        )  # fmt: skip
        return {"forward_batch": forward_batch, "out": out.view(len(q), HEADS, RANK)}

    stages = [attend, YieldOperation(), attend]  # two layers, of which the second repeats the first
    with forward_context(ForwardContext(attn_backend=both)):
        both.init_forward_metadata(batch)
        inputs = [{"forward_batch": half} for half in halves]
        found = execute_overlapped_operations(inputs, [stages] * 2, [0, 1])
    torch.testing.assert_close(torch.cat([half["out"] for half in found]), wanted)
