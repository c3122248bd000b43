"""Our backends in SGLang's own factories of attention backends, for targets and drafts."""

import inspect
import sys
from contextlib import nullcontext
from functools import partial, partialmethod
from types import SimpleNamespace
from unittest import mock

import pytest
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative import draft_utils
from sglang.srt.speculative import eagle_worker_v2 as eagle
from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController
from test_dcp_pool import as_rank

from sgl_kvpool.sglang_plugin import hook_groups, hook_points
from sgl_kvpool.sglang_plugin.hooks import attention, dense_ranks, drafts

OURS = "kvpool_mla"


class Backend:
    """Replaces the CUDA backends, which need a device; keeps its arguments."""

    prefill_attention_backend_str = decode_attention_backend_str = None

    def __init__(self, *args, **kwargs):
        self.arguments = (args, kwargs)


class Steps(Backend):
    def __init__(self, *args):
        super().__init__(*args)
        self.attn_backends = [Backend(), Backend()]


@pytest.fixture(autouse=True)
def cuda_backends(monkeypatch):
    cuda, draft = (f"sgl_kvpool.srt.attention.{name}" for name in ("cuda", "draft"))
    monkeypatch.setitem(sys.modules, cuda, SimpleNamespace(KVPoolMLACudaBackend=Backend))
    monkeypatch.setitem(sys.modules, draft, SimpleNamespace(KVPoolMultiStepDraftBackend=Steps))


def runner(draft_backend=None, **changes):
    fields = {
        "draft_attention_backend": draft_backend,
        "is_draft_worker": True,
        "use_mla_backend": True,
        "device": "cuda",
        "model_config": SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["LlamaForCausalLMEagle3"]), hf_text_config=None
        ),
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.fixture
def factory(published, monkeypatch):
    """`factory(runner)`: SGLang's factory with our hook, on a server whose backends are ours."""
    original = inspect.unwrap(draft_utils.DraftBackendFactory._create_backend)
    hooked = partialmethod(partial(drafts._create_draft, original))
    monkeypatch.setattr(draft_utils.DraftBackendFactory, "_create_backend", hooked)
    monkeypatch.setattr(draft_utils, "attention_backends", lambda: (OURS, OURS))
    return lambda runner, steps=3: draft_utils.DraftBackendFactory(runner, 1, steps)


def test_backends_that_were_named_are_sglangs(factory, monkeypatch):
    for create in ("decode", "prefill"):
        method = f"_create_triton_{create}_backend"
        made = Steps() if create == "decode" else Backend()
        monkeypatch.setattr(draft_utils.DraftBackendFactory, method, lambda self, made=made: ("triton", made))
    made = factory(runner("triton"))
    for backend in (made.create_decode_backend(), made.create_draft_extend_backend()):
        assert backend.prefill_attention_backend_str == "triton"
    with pytest.raises(ValueError, match="EAGLE is not supported in decode attention backend unheard_of"):
        factory(runner("unheard_of")).create_decode_backend()


def test_drafts_of_another_kind_are_told_to_name_a_backend(factory):
    draft = runner(use_mla_backend=False)
    made = factory(draft)
    for create in (
        made.create_decode_backend,
        made.create_draft_extend_backend,
        lambda: attention.create_backend(draft),
    ):
        with pytest.raises(ValueError, match="LlamaForCausalLMEagle3.*--speculative-draft-attention-backend"):
            create()


def test_queries_that_are_scaled_by_their_position(published, monkeypatch):
    """SGLang multiplies them in the absorbed form, for backends that are not in its list."""
    monkeypatch.setattr(AttentionBackendRegistry, "_handlers", {})
    _, separate = attention.name_lists()
    before = list(separate)
    try:
        attention.register_names()
        plain = runner(is_draft_worker=False)
        attention.create_backend(plain)
        assert OURS in separate
        plain.model_config.hf_text_config = SimpleNamespace(
            llama_4_scaling={"original_max_position_embeddings": 8192, "beta": 0.1}
        )
        attention.create_backend(plain)
        attention.create_backend(plain)
        assert OURS not in separate
        assert AttentionBackendRegistry.get_handler(OURS) is attention._absorbed
    finally:
        separate[:] = before


def test_names_are_added_in_place_and_once(published):
    before = attention.name_lists()
    old = [list(names) for names in before]
    try:
        for names in before:
            names[:] = [name for name in names if name != OURS]
        (group,) = hook_groups.named("dense MLA on CUDA")
        points = group.declared.points.values()
        lists = [point for point in points if point.added and "FORWARD_ABSORB" in point.target]
        assert hook_points.check(lists) == []
        assert hook_points.check(lists, applied=True) == [f"{lists[0].target}: has no {OURS}"]
        attention.register_names()
        attention.register_names()
        assert all(names.count(OURS) == 1 for names in before)
        assert all(now is then for now, then in zip(attention.name_lists(), before, strict=True))
        assert hook_points.check(lists, applied=True) == []
    finally:
        for names, content in zip(before, old, strict=True):
            names[:] = content


#: Placement of a draft without groups of its own.
PLACED = SimpleNamespace(tp_group=None, disable_cp=False)


@pytest.fixture
def scope(published):
    """`scope(PLACED)`: SGLang's scope of a draft with our hook."""
    original = getattr(eagle.draft_tp_context, "__wrapped__", eagle.draft_tp_context)
    return partial(dense_ranks._draft_tp_context, original)


def test_drafts_are_built_and_run_as_on_one_rank(scope):
    """With SGLang's own scopes outside and inside, which are restored, also by an exception."""

    def found():
        parallel = get_parallel()
        return parallel.dcp_enabled, parallel.attn_dcp_size, parallel.attn_dcp_rank

    scoped = scope(PLACED)
    with as_rank(1, 2):
        with scoped, get_parallel().override(attn_cp_rank=0):
            assert found() == (False, 1, 0)
        assert found() == (True, 2, 1)
        with pytest.raises(ZeroDivisionError), scope(PLACED):
            print(1 / 0)
        assert found() == (True, 2, 1)


def test_sglang_makes_an_adaptive_targets_backends_in_the_scope_of_its_draft(scope, monkeypatch):
    """So its graphs would merge no ranks, and --speculative-adaptive is refused with --dcp-size."""
    ranks, worker = [], object.__new__(eagle.EAGLEWorkerV2)
    vars(worker).update(
        speculative_num_steps=3, speculative_num_draft_tokens=4, device="cpu", gpu_id=0,
        _draft_worker=mock.Mock(parallel_layout=PLACED), _target_worker=mock.Mock(),
        adaptive_controller=AdaptiveController(worker, mock.Mock(candidate_steps=[3, 1])),
    )  # fmt: skip
    worker._target_worker.model_runner._get_attention_backend = lambda **_: ranks.append(
        get_parallel().attn_dcp_size
    )
    for name, stand_in in (
        ("draft_tp_context", scope), ("speculative_moe_backend_context", nullcontext),
        ("speculative_moe_a2a_backend_context", nullcontext), ("check_cuda_graph_backend", mock.Mock()),
        ("get_available_gpu_memory", lambda *_: 0),
    ):  # fmt: skip
        monkeypatch.setattr(eagle, name, stand_in)
    monkeypatch.setattr(worker.__class__, "_override_worker_state", lambda *_, **__: nullcontext())
    with as_rank(1, 2):
        worker.init_cuda_graphs()
    assert ranks == [1]
