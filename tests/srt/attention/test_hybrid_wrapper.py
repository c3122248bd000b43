"""kvpool_mla inside SGLang's `HybridLinearAttnBackend`: calls that reach it, attributes that SGLang reads."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import crossed
from hybrid_case import LAYOUTS, MLA_LAYERS, PLACED, HybridCase, radix_attention
from pools import memory
from test_backend import HEADS, RANK

from sgl_kvpool.srt.pool.row_pool import RowPool

pytestmark = pytest.mark.usefixtures("published")

KINDS = ["kda", "lightning"]


def wrapped(layout, lengths, prefixes, monkeypatch, *, kind="kda", on_cuda=True, **placed):
    case = HybridCase(layout, lengths, prefixes, monkeypatch, on_cuda=on_cuda, kind=kind, **placed)
    case.wrap()
    return case


@pytest.mark.parametrize("on_cuda", [False, True])
@pytest.mark.parametrize(
    ("mode", "lengths", "prefixes"),
    [("DECODE", [1, 40, 7], [0, 39, 6]), ("EXTEND", [9, 40, 5], [0, 30, 4]), ("MIXED", [9, 40], [8, 30])],
)
@pytest.mark.parametrize(("layout", "kind", "placed"), crossed(LAYOUTS, KINDS, PLACED))
def test_steps(layout, mode, lengths, prefixes, on_cuda, kind, placed, monkeypatch):
    case = wrapped(layout, lengths, prefixes, monkeypatch, kind=kind, on_cuda=on_cuda, **placed)
    names = {"kda": "KDAAttnBackend", "lightning": "LightningAttentionBackend"}
    assert type(case.linear).__name__ == names[kind]
    fresh = [mode != "DECODE"] * len(lengths)
    if mode == "EXTEND":
        fresh[-1] = not on_cuda  # on CUDA, one new token at the end goes through decode
    case.assert_right(case.run(mode, split=True), fresh_as_computed=fresh)
    case.assert_stored()


@pytest.mark.parametrize("on_cuda", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["DECODE", "EXTEND"])
def test_models_without_rotary_values(layout, mode, on_cuda, monkeypatch):
    """NoPE with `qk_rope_head_dim` 0, as Bailing's third version allows."""
    prefixes = [8, 29] if mode == "DECODE" else [6, 21]
    case = wrapped(layout, [9, 30], prefixes, monkeypatch, on_cuda=on_cuda, rope=0, **PLACED[1])
    assert case.pool.row_format.rope is None
    case.assert_right(case.run(mode, split=True), fresh_as_computed=mode == "EXTEND")
    case.assert_stored()


@pytest.mark.parametrize("on_cuda", [False, True])
def test_row_numbers_are_worked_out_once_per_step(on_cuda, monkeypatch):
    """And again in the next step: SGLang refills the same tensor of slots."""
    case = wrapped("fp4", [30, 9], [29, 8], monkeypatch, on_cuda=on_cuda, **PLACED[4])
    asked, original = [], RowPool.slot_to_row
    monkeypatch.setattr(RowPool, "slot_to_row", lambda self, s: asked.append(1) or original(self, s))
    batch = case.batch("DECODE")
    for _ in range(2):
        case.backend.init_forward_metadata(batch)
        for layer in MLA_LAYERS:
            case.layer_step(batch, layer)
    assert len(asked) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_verification(kind, monkeypatch):
    case = wrapped("fp4", [4, 40, 7], [0, 36, 3], monkeypatch, kind=kind, **PLACED[4])
    case.linear.init_forward_metadata = lambda batch: None  # would plan its own tables of drafts
    case.assert_right(case.run("TARGET_VERIFY", split=True), fresh_as_computed=False)
    case.assert_stored()


@pytest.mark.parametrize("on_cuda", [False, True])
@pytest.mark.parametrize("mode", ["DECODE", "EXTEND"])
def test_other_layers_go_to_the_linear_backend(on_cuda, mode, monkeypatch):
    case = wrapped("fp4", [9, 40], [8, 39], monkeypatch, kind="lightning", on_cuda=on_cuda)
    seen = []
    method = f"forward_{mode.lower()}"
    monkeypatch.setattr(case.linear, method, lambda **named: seen.append(named["layer"].layer_id) or "states")
    batch = case.batch(mode)
    case.backend.init_forward_metadata(batch)
    before = [part.copy() for part in memory(case.pool)]
    for layer in (0, 2, 7):
        module = radix_attention(layer, head_dim=16, v_head_dim=16)
        q = torch.full((2, HEADS * 16), float("nan"))
        assert case.backend.forward(q, q, q, module, batch) == "states"
    assert seen == [0, 2, 7]
    assert all(map(np.array_equal, before, memory(case.pool)))


def test_an_idle_rank_does_not_reach_our_backend(monkeypatch):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    case = wrapped("fp4", [9], [8], monkeypatch)
    batch = SimpleNamespace(forward_mode=ForwardMode.IDLE, logical_forward_mode=ForwardMode.IDLE)
    q = torch.empty(0, HEADS * (RANK + 64))
    assert case.backend.forward(q, q, q, case.layers[3], batch).shape == (0, HEADS * RANK)


@pytest.mark.parametrize("kind", KINDS)
def test_attributes_that_sglang_reads_from_the_wrapper(kind, monkeypatch):
    """Model runner, graph runners, speculative workers and models see the wrapper, never our backend."""
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

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


def test_on_a_cpu(monkeypatch):
    case = wrapped("fp4", [9], [8], monkeypatch, on_cuda=False)
    assert case.backend.get_cpu_graph_seq_len_fill_value() == 1
    assert case.backend.get_cuda_graph_seq_len_fill_value() == 1
    assert case.backend.verify_mask is None
    case.backend.init_mha_chunk_metadata(None)  # no MHA form on a CPU


def test_chunks_of_the_multi_head_form_are_planned(monkeypatch):
    """SGLang passes both arguments by position, whether or not the caller gave the second."""
    case = wrapped("fp4", [9], [8], monkeypatch)
    planned = []
    case.full.mha_chunk_kv_cache = SimpleNamespace(update_wrapper=lambda *a: planned.append(a))
    case.backend.init_mha_chunk_metadata("batch")
    case.backend.init_mha_chunk_metadata("batch", True)
    assert planned == [("batch", False), ("batch", True)]


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
    outer.prepare_forward_metadata_for_breakable_cuda_graph_replay(
        tables, batch, static_forward_batch=captured
    )
    assert case.full._extend is None
    found = {layer: case.layer_step(batch, layer, split=True) for layer in MLA_LAYERS}
    assert case.full._extend is not planned
    case.assert_right(found, fresh_as_computed=[True, True, False])
    case.assert_stored()


def test_one_of_two_backends(monkeypatch):
    """Another backend for prefill: SGLang's `HybridAttnBackend` is between the wrapper and our backend."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    case = HybridCase("bf16", [9, 40], [8, 39], monkeypatch, on_cuda=True, **PLACED[2])
    seen = []
    prefill = SimpleNamespace(
        needs_cpu_seq_lens=False,
        token_to_kv_pool=case.pool,
        init_forward_metadata=lambda batch: seen.append("planned"),
        forward_extend=lambda q, k, v, layer, *a, **more: seen.append(layer.layer_id),
    )
    outer = case.wrap(HybridAttnBackend(case.runner, prefill, case.full))
    assert outer.needs_cpu_seq_lens is False
    assert outer.max_context_len == case.runner.model_config.context_len
    case.assert_right(case.run("DECODE", split=True), fresh_as_computed=False)
    case.run("EXTEND")
    assert seen == ["planned", *MLA_LAYERS]
    case.assert_stored()


# -------------------------------------------------------------------- states have no layout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lightning_attention_is_not_told_the_dtype_of_rows(layout, monkeypatch):
    """That dtype would be applied to its float32 queries, and so to the results, in decodes."""
    from sglang.srt.layers.attention.linear import lightning_backend

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


def test_lightning_attention_beside_another_pool_is_left_alone():
    from sgl_kvpool.sglang_plugin.hooks import pools

    backend = SimpleNamespace(linear_attn_backend=SimpleNamespace(kv_cache_dtype_str="fp8_e4m3"))
    runner = SimpleNamespace(token_to_kv_pool=object())
    assert pools._wrap_for_model(lambda *a: backend, runner, None) is backend
    assert backend.linear_attn_backend.kv_cache_dtype_str == "fp8_e4m3"
    plain = SimpleNamespace()
    assert pools._wrap_for_model(lambda *a: plain, runner, None) is plain
