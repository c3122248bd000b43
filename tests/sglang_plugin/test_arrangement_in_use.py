"""The pool that a scheduler builds in an arrangement, and who reads it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.sglang_plugin.hooks import pools


@pytest.fixture
def built(published, arranged, monkeypatch):
    """`built(arrangement, ...)`: the pool that SGLang builds with our hooks, and its line in the log."""
    from sglang.srt.mem_cache import kv_cache_configurator  # noqa: F401  takes get_spec by name, before it is patched

    def build(
        arrangement, *, draft=False, backends=("torch_native", None), other=None, reader=None, sizes=(12, 4)
    ):
        monkeypatch.setattr(runtime_context, "attention_backends", lambda: backends)
        spec = SimpleNamespace(speculative_draft_attention_backend=reader)
        monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)
        args = arranged(arrangement)
        kvc = SimpleNamespace(
            server_args=args,
            use_mla_backend=True,
            is_draft_worker=draft,
            loc_space_scale=1,
            model=torch.nn.Module(),
            model_config=model_config_of(args),
        )
        mla = {"kind": "mla", "default": MLATokenToKVPool}
        bound = pools._resolve_kv_pool_class(lambda self, *, kind, default: default, kvc, **mla)
        changed = {"options": replace(bound.keywords["options"], arrangement=other)} if other else {}
        pool = bound(*sizes, torch.bfloat16, 512, 64, 3, "cpu", False, **changed)
        lines = []
        # Not caplog: SGLang replaces all log handlers when it resolves arguments.
        monkeypatch.setattr(pools.logger, "info", lambda text, *values: lines.append(text % values))
        assert pools._build_token_to_kv_pool(lambda self, **_: pool, kvc, sizes=None) is pool
        (line,) = lines
        return pool, line

    return build


def test_a_pool_whose_longest_prompts_would_wait(built, monkeypatch):
    """test_budget.py has the bounds; a draft's pool is as large as the target's."""
    said = []
    monkeypatch.setattr(pools.logger, "warning", lambda text, *values: said.append(text % values))
    for draft in (False, True):
        built("auto", draft=draft, sizes=(1024, 64))
    assert len(said) == 1
    assert said[0].startswith("sgl-kvpool: a prompt of 960 tokens or more would wait for ever, and later")


def test_drafts_keep_layer_major(built):
    pool, line = built("token_major", draft=True)
    assert pool.kv_cache_arrangement is KVArrangement.LAYER_MAJOR
    assert line.endswith("arrangement layer_major (draft model)")


def test_the_pool_is_told_its_readers(built):
    """With the scheduler's backends: a model runner may have changed those of the arguments."""
    with pytest.raises(ValueError, match="intel_amx cannot read token_major rows"):
        built("token_major", backends=("torch_native", "intel_amx"))


def test_a_draft_pool_is_told_the_drafts_reader(built):
    """--speculative-draft-attention-backend reads only the draft's pool."""
    text = "^--speculative-draft-attention-backend some_backend cannot read rows"
    with pytest.raises(ValueError, match=text):
        built("auto", draft=True, reader="some_backend")
    built("auto", draft=False, reader="some_backend")
    built("auto", draft=True, reader="flashinfer", backends=("some_backend", None))


def test_a_pool_of_another_arrangement_is_noticed(built):
    with pytest.raises(RuntimeError, match="is token_major, but SGLang built a page_major pool"):
        built("token_major", other="page_major", backends=("kvpool_mla", "kvpool_mla"))
