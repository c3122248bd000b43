"""When a scheduler checks itself, what it logs, and how it refuses."""

import logging
import re
from types import SimpleNamespace

import pytest
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from test_backend import Case

from sgl_kvpool.attention import cpu
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.sglang_plugin import hook_points
from sgl_kvpool.sglang_plugin.hooks import self_check
from sgl_kvpool.srt import peers
from sgl_kvpool.srt.host import agreement

UNTESTED = "SGLang 0.6.1 is not a version this release was tested with"


# ------------------------------------------------------------------ in a scheduler


@pytest.fixture
def scheduler(published, monkeypatch):
    """Scheduler attributes that the self-check reads: real pool, backend, request table and layer."""
    monkeypatch.setattr(hook_points, "version_problem", lambda: UNTESTED)
    monkeypatch.setattr(peers, "POOLS", set())
    monkeypatch.setattr("sglang.srt.runtime_context.attention_backends", lambda: ("kvpool_mla",) * 2)
    case = Case("fp4", [1], [0], monkeypatch)
    runner = case.runner
    runner.attn_backend = case.backend
    return SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner), tree_cache=SimpleNamespace(cache_controller=None)
    )


def test_success_is_one_line(scheduler, caplog):
    with caplog.at_level(logging.INFO):
        self_check.run(scheduler)
    (line,) = [record.getMessage() for record in caplog.records if "self-check" in record.getMessage()]
    assert re.fullmatch(
        r"sgl-kvpool: self-check passed in [0-4]\.\d\d s \(this SGLang is not a tested one\): "
        r"rows of 2 of 2 layers, attention of 3 requests with a largest error of \S+",
        line,
    )


@pytest.mark.parametrize(
    ("problem", "device", "why"),
    [
        (UNTESTED, "cpu", "this SGLang is not a tested one"),
        (UNTESTED, "cuda:0", "this SGLang is not a tested one"),
        (None, "cuda:0", "no committed test run of these kernels on such a GPU"),
        (None, "cpu", None),
    ],
)
def test_when_it_is_due(monkeypatch, problem, device, why):
    monkeypatch.setattr(hook_points, "version_problem", lambda: problem)
    assert self_check._why_due(device) == why


def test_a_backend_inside_another_is_found(scheduler, caplog):
    class Wrapper(AttentionBackend):
        def __init__(self, inner):
            self.full_attn_backend, self.itself = inner, self

    runner = scheduler.tp_worker.model_runner
    runner.attn_backend = Wrapper(Wrapper(runner.attn_backend))
    with caplog.at_level(logging.INFO):
        self_check.run(scheduler)
    assert caplog.text.count("attention of 3 requests") == 1


def test_a_difference_refuses_the_start(scheduler, monkeypatch):
    monkeypatch.setattr(cpu, "attend_lists", lambda out, *_, **__: out.zero_())
    with pytest.raises(Refusal) as found:
        self_check.run(scheduler)
    text = str(found.value)
    assert "\n" not in text
    assert text.startswith(
        "the self-check at start (this SGLang is not a tested one) found a difference: attention over rows "
        "of fp4, layer 6: value "
    )
    assert text.endswith("; serve without --kv-cache-layout, and report this line")


def test_a_check_that_cannot_be_run_refuses_the_start(scheduler):
    del scheduler.tp_worker.model_runner.attn_backend
    with pytest.raises(Refusal, match=r"could not be run: AttributeError\(.*attn_backend.*; serve without"):
        self_check.run(scheduler)


@pytest.mark.parametrize("local", [True, False])
def test_no_rank_begins_with_the_tier_alone(scheduler, monkeypatch, local):
    """A rank that finds a difference tells the others, which would wait in the tier's check otherwise."""
    asked = []
    monkeypatch.setattr(self_check, "_controller", lambda tree: "a controller")
    monkeypatch.setattr("sgl_kvpool.srt.self_check.check_tier", lambda *_: pytest.fail("began"))
    monkeypatch.setattr(agreement, "all_ranks", lambda controller, good: asked.append(good))
    if not local:
        monkeypatch.setattr(cpu, "attend_lists", lambda out, *_, **__: out.zero_())
    with pytest.raises(Refusal, match="failed on another rank" if local else "found a difference: attention"):
        self_check.run(scheduler)
    assert asked == [local]


def test_a_check_of_the_tier_that_fails_names_its_way_out(scheduler, monkeypatch):
    monkeypatch.setattr(self_check, "_controller", lambda tree: "a controller")
    monkeypatch.setattr(agreement, "all_ranks", lambda controller, good: good)
    text = "; serve without --enable-hierarchical-cache, or without --kv-cache-layout, and"
    with pytest.raises(Refusal, match=text):
        self_check.run(scheduler)
