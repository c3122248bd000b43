"""kvpool_mla on CUDA in SGLang's `HybridLinearAttnBackend`: steps, graphs, attributes that SGLang reads."""

from types import SimpleNamespace

import pytest
import torch
from cases import crossed
from hybrid_case import LAYOUTS, MLA_LAYERS, PLACED, HybridCase, radix_attention
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.attention.linear import lightning_backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from test_backend import HEADS

pytestmark = pytest.mark.usefixtures("published")

KINDS = ["kda", "lightning"]


def wrapped(layout, lengths, prefixes, monkeypatch, **given):
    case = HybridCase(layout, lengths, prefixes, monkeypatch, **given)
    case.wrap()
    return case


@pytest.mark.parametrize(
    ("mode", "lengths", "prefixes"),
    [("DECODE", [1, 40, 7], [0, 39, 6]), ("EXTEND", [9, 40, 5], [0, 30, 4]), ("MIXED", [9, 40], [8, 30])],
)
@pytest.mark.parametrize(
    # Without rotary values, as Bailing's third version allows.
    ("layout", "kind", "placed", "rope"),
    [*crossed(LAYOUTS, KINDS, PLACED, [64]), ("fp4", "kda", PLACED[1], 0)],
)
def test_steps(layout, mode, lengths, prefixes, kind, placed, rope, monkeypatch):
    case = wrapped(layout, lengths, prefixes, monkeypatch, kind=kind, rope=rope, **placed)
    names = {"kda": "KDAAttnBackend", "lightning": "LightningAttentionBackend"}
    assert type(case.linear).__name__ == names[kind]
    fresh = [mode != "DECODE"] * len(lengths)
    if mode == "EXTEND":
        fresh[-1] = False  # one new token at the end goes through decode
    case.assert_right(case.run(mode, split=True), fresh_as_computed=fresh)
    case.assert_stored()


@pytest.mark.parametrize("kind", KINDS)
def test_verification(kind, monkeypatch):
    case = wrapped("fp4", [4, 40, 7], [0, 36, 3], monkeypatch, kind=kind, **PLACED[4])
    case.linear.init_forward_metadata = lambda batch: None  # would plan its own tables of drafts
    case.assert_right(case.run("TARGET_VERIFY", split=True), fresh_as_computed=False)
    case.assert_stored()


@pytest.mark.parametrize("kind", KINDS)
def test_attributes_that_sglang_reads_from_the_wrapper(kind, monkeypatch):
    """Model runner, graph runners, speculative workers and models see the wrapper, never our backend."""
    case = wrapped("fp4", [9], [8], monkeypatch, kind=kind)
    outer, ours = case.backend, case.full
    assert outer.full_attn_layers == list(MLA_LAYERS)
    assert outer.token_to_kv_pool is case.pool
    assert outer.req_to_token_pool is case.table
    assert outer.kv_index_translator is case.runner.kv_index_translator
    # kvpool_mla counts on the device; only lightning attention needs lengths on the host.
    assert ours.needs_cpu_seq_lens is False
    assert outer.needs_cpu_seq_lens is (kind == "lightning")
    for name in ("max_context_len", "extend_dummy_seqs_capped_by_req_pool", "data_type", "verify_mask"):
        assert getattr(outer, name) == getattr(ours, name), name
    assert outer.max_context_len == case.runner.model_config.context_len
    assert outer.use_mha is outer.supports_ragged_verify_graph is False
    assert outer.get_cuda_graph_seq_len_fill_value() == 1
    # Each of our layers reads the request table, so the reads end with the last layer.
    for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2):
        assert outer.shared_read_ends(mode).value >= SharedReadEnds.POST_REPLAY.value
    assert outer.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.POST_REPLAY
    assert outer.shared_read_ends(ForwardMode.EXTEND) is SharedReadEnds.UNKNOWN
    outer.on_after_cuda_graph_warmup()
    for graph in (None, 4):
        outer.update_verify_buffers_to_fill_after_draft(SimpleNamespace(), graph)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["DECODE", "TARGET_VERIFY"])
def test_graphs(kind, mode, monkeypatch):
    """Capture, then replays with other lengths, requests and slots in the same tensors."""
    prefixes = [3, 39, 6] if mode == "DECODE" else [0, 36, 3]
    case = wrapped("fp4", [4, 40, 7], prefixes, monkeypatch, kind=kind, **PLACED[3])
    outer = case.backend
    outer.init_cuda_graph_state(4, 16)
    batch = case.batch(mode)
    batch.num_padding = 0
    batch.seq_lens_cpu = batch.seq_lens.clone()  # lightning attention needs it
    outer.init_forward_metadata_out_graph(batch, in_capture=True)
    outer.init_forward_metadata_in_graph(batch)
    address = case.full.forward_metadata.kv_lens.data_ptr()
    for layer in MLA_LAYERS:
        case.layer_step(batch, layer)
    rows = case.full._rows_to_write.of(batch)
    # SGLang refills the tensors.
    order = [2, 0, 1]
    for name in ("slots", "lengths", "prefixes", "rows"):
        setattr(case, name, [getattr(case, name)[i] for i in order])
    case.keys = {layer: [keys[i] for i in order] for layer, keys in case.keys.items()}
    fresh = case.batch(mode)
    for name in ("seq_lens", "req_pool_indices", "out_cache_loc"):
        getattr(batch, name).copy_(getattr(fresh, name))
    outer.init_forward_metadata_out_graph(batch)
    outer.init_forward_metadata_in_graph(batch)
    assert case.full.forward_metadata.kv_lens.data_ptr() == address
    found = {layer: case.layer_step(batch, layer, split=True) for layer in MLA_LAYERS}
    assert case.full._rows_to_write.of(batch) is not rows
    case.assert_right(found, fresh_as_computed=False)
    case.assert_stored()


@pytest.mark.parametrize("kind", KINDS)
def test_breakable_graphs_of_prefill(kind, monkeypatch):
    """With KDA, the wrapper keeps state tables from capture; our backend is planned anew for every batch."""
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as module

    monkeypatch.setattr(module, "check_cuda_graph_backend", lambda *a: True)
    case = wrapped("fp4", [9, 40, 5], [0, 30, 4], monkeypatch, kind=kind, **PLACED[3])
    outer = case.backend
    assert outer.use_captured_forward_metadata_for_breakable_cuda_graph is (kind == "kda")
    if kind == "lightning":
        return
    assert outer.prefill_cuda_graph_max_batch_size == case.linear.prefill_graph_max_seqs
    # The tables are in pinned memory.
    monkeypatch.setattr(case.linear, "init_prefill_graph_metadata", lambda batch: "tables")
    monkeypatch.setattr(case.linear, "refresh_prefill_graph_metadata", lambda tables, batch: None)
    captured = case.batch("EXTEND")
    tables = outer.init_forward_metadata_for_breakable_cuda_graph_capture(captured)
    for layer in MLA_LAYERS:
        case.layer_step(captured, layer)
    planned = case.full._extend
    batch = case.batch("EXTEND")
    replay = outer.prepare_forward_metadata_for_breakable_cuda_graph_replay
    replay(tables, batch, static_forward_batch=captured)
    assert case.full._extend is None
    found = {layer: case.layer_step(batch, layer, split=True) for layer in MLA_LAYERS}
    assert case.full._extend is not planned
    case.assert_right(found, fresh_as_computed=[True, True, False])
    case.assert_stored()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lightning_attention_is_not_told_the_dtype_of_rows(layout, monkeypatch):
    """That dtype would be applied to its float32 queries, and so to the results, in decodes."""
    dtypes = []

    def kernel(q, **named):
        dtypes.append(q.dtype)
        return q

    monkeypatch.setattr(lightning_backend, "seg_la_fwd", kernel)
    case = wrapped(layout, [9, 40], [8, 39], monkeypatch, kind="lightning")
    # Stubs for code that needs the states' extra buffers.
    monkeypatch.setattr(case.linear, "_track_mamba_state_decode", lambda *a: None)
    batch = case.batch("DECODE")
    case.backend.init_forward_metadata(batch)
    module = radix_attention(2, head_dim=16, v_head_dim=16)
    q = torch.randn(2, HEADS, 16)
    found = case.backend.forward(q, q, q, module, batch)
    assert dtypes == [torch.float32]
    assert torch.equal(found, q.flatten(1))
    assert case.runner.kv_cache_dtype_str != "auto"  # the runner's own value is unchanged
