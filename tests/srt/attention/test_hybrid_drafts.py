"""Drafts of hybrid models: one MLA layer, number 0, in a pool that is wrapped like the target's pool."""

import inspect

import pytest
import torch
from hybrid_case import LAYOUTS, PLACED, HybridCase
from test_backend import HEADS, RANK

pytestmark = pytest.mark.usefixtures("published")

OURS, LAYER = "kvpool_mla", 0
LINEAR = {"kda-v3": "KDAAttnBackend", "lightning": "LightningAttentionBackend"}


def draft_case(layout, lengths, prefixes, monkeypatch, *, kind="kda-v3", **placed):
    placed |= {"draft": True, "mla_layers": (LAYER,), "kind": kind}
    return HybridCase(layout, lengths, prefixes, monkeypatch, **placed)


@pytest.fixture
def factory(monkeypatch):
    """`factory(case, steps)`: SGLang's factory of draft backends, hooked, for a server with our pool."""
    from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend
    from sglang.srt.speculative import draft_utils

    from sgl_kvpool.sglang_plugin.hooks import drafts

    own = inspect.unwrap(draft_utils.DraftBackendFactory._create_backend)
    monkeypatch.setattr(
        draft_utils.DraftBackendFactory,
        "_create_backend",
        lambda self, *a, **named: drafts._create_draft(own, self, *a, **named),
    )
    monkeypatch.setattr(draft_utils, "attention_backends", lambda: (OURS, OURS))
    monkeypatch.setattr(FlashInferMLAAttnBackend, "__init__", flashinfer_part)

    def run(case, steps):
        case.runner.draft_attention_backend = None
        return draft_utils.DraftBackendFactory(case.runner, 1, steps)

    return run


def flashinfer_part(self, runner, skip_prefill=False, kv_indptr_buf=None, q_indptr_decode_buf=None):
    """Set the attributes that SGLang's constructor, which needs a GPU, would set."""
    self.device, self.skip_prefill, self.enable_chunk_kv = runner.device, skip_prefill, False
    self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
    self.kv_index_translator = runner.kv_index_translator
    self.max_context_len = runner.model_config.context_len
    self.prefill_wrapper_paged = None


@pytest.mark.parametrize("kind", LINEAR)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("placed", PLACED[:1] + PLACED[3:4])
def test_the_drafts_own_backend_is_wrapped(layout, kind, placed, monkeypatch):
    """A draft's prefill goes through the wrapper with layer 0 only, whatever the target's MLA layers are."""
    case = draft_case(layout, [9, 40], [3, 30], monkeypatch, kind=kind, **placed)
    outer = case.wrap()
    assert outer.full_attn_layers == [LAYER]
    assert type(case.linear).__name__ == LINEAR[kind]
    case.assert_right(case.run("EXTEND", split=True), fresh_as_computed=True)
    case.assert_stored()


@pytest.mark.parametrize("in_wrapper", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_extending(layout, in_wrapper, factory, monkeypatch):
    """SGLang uses our backend without the wrapper here; with the wrapper it would plan only our backend."""
    case = draft_case(layout, [4, 40, 7], [0, 36, 3], monkeypatch, **PLACED[4])
    if in_wrapper:
        case.wrap()
    else:
        case.backend = factory(case, 3).create_draft_extend_backend()
        assert not hasattr(case.backend, "linear_attn_backend")
        assert case.backend.decode_attention_backend_str == OURS
    assert case.backend.token_to_kv_pool is case.pool
    case.assert_right(case.run("DRAFT_EXTEND_V2", split=True), fresh_as_computed=False)
    case.assert_stored()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("placed", PLACED[:1] + PLACED[3:4])
def test_steps(layout, placed, factory, monkeypatch):
    """Step i stores the token at `seq_lens + i` and attends it; all steps are planned at once."""
    stored, steps = [5, 33], 3
    case = draft_case(layout, [n + steps for n in stored], stored, monkeypatch, **placed)
    container = factory(case, steps + 1).create_decode_backend()
    assert type(container).__name__ == "KVPoolMultiStepDraftBackend"
    assert container.kv_index_translator is case.runner.kv_index_translator
    assert [b.decode_attention_backend_str for b in container.attn_backends] == [OURS] * steps
    whole = {name: getattr(case, name) for name in ("lengths", "slots", "keys")}
    batch = case.batch("DECODE")
    batch.seq_lens = torch.tensor(stored)
    container.init_cuda_graph_state(2, 2)
    container.init_forward_metadata(batch)
    for step, backend in enumerate(container.attn_backends):
        case.prefixes = [n + step for n in stored]
        case.lengths = [n + step + 1 for n in stored]
        case.slots = [s[:n] for s, n in zip(whole["slots"], case.lengths, strict=True)]
        case.keys = {LAYER: [k[:n] for k, n in zip(whole["keys"][LAYER], case.lengths, strict=True)]}
        batch.out_cache_loc = torch.stack([s[-1] for s in case.slots])
        case.backend = backend
        found = {LAYER: case.layer_step(batch, LAYER, split=bool(step % 2))}
        assert found[LAYER].shape == (2, HEADS * RANK)
        case.assert_right(found, fresh_as_computed=False)
    case.assert_stored()
