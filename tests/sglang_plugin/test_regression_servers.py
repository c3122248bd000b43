"""SGLang's own resolution, for Hopper, of every server that scripts/h100_regression.py starts.

Tests set Hopper's compute capability, and that the platform can snapshot states.
"""

import json

import pytest
from regression.environment import OPTIONAL_MODULES, Machine
from regression.request import Request
from regression.shapes import random_shapes, write_checkpoint
from regression.steps import Options, all_steps

MACHINE = Machine(("NVIDIA H100",) * 2, frozenset(OPTIONAL_MODULES), has_plugin=True, has_fa3=True)
STEPS = {
    step.name: step
    for step in all_steps(MACHINE, Options(models="MODELS"))
    if step.name.startswith(("serve-", "memory-", "tp2-"))
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The checkpoints that the steps `model-*` write."""
    root = tmp_path_factory.mktemp("models")
    for shape in random_shapes(MACHINE):
        write_checkpoint(*shape.writer, root / shape.name)
    return root


@pytest.mark.parametrize("name", STEPS)
def test_every_server_is_accepted(name, resolve, models, monkeypatch):
    import torch
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.arg_groups.overrides import resolving_view

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(mamba_hook, "_platform_supports_mamba_cache_extra_buffer", lambda: True)
    request = Request(**json.loads(STEPS[name].files["request.json"]))
    for key, value in request.environment.items():
        monkeypatch.setenv(key, value)
    flag, model, *argv = request.arguments
    assert flag == "--model-path"
    found = resolving_view(resolve(model.replace("MODELS", str(models)), *argv, device="cuda"))
    kvpool = request.layout is not None
    sparse = request.model == "v32"
    # Stock servers: SGLang selects fa3 on Hopper, and triton where CUDA is missing.
    wanted = ("dsa",) if sparse else ("kvpool_mla",) if kvpool else ("fa3", "triton")
    assert found.attention_backend in wanted
    assert found.page_size == 64
    assert found.tp_size == (2 if name.startswith("tp2") else 1)
    assert found.enable_hierarchical_cache is not name.startswith("memory")
    assert (found.max_total_tokens is None) is name.startswith("memory")
    # The longest prompt and the tokens generated after it fit.
    longest = max(
        [*map(len, request.prompts), request.hit_tokens, request.request_tokens + request.new_tokens]
    )
    assert longest + 32 < found.context_length
    if found.max_total_tokens is not None:
        assert 3 * request.hit_tokens < found.max_total_tokens < request.evict_tokens
        assert found.hicache_ratio * found.max_total_tokens > request.evict_tokens + 3 * request.hit_tokens
