"""`--kv-cache-arrangement`: the ways to request it, and what is refused.

A2 is an item of the vLLM checklist of tests/connectors.
"""

import pytest

from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.sglang_plugin.options import OPTIONS, config_of

ARRANGEMENTS = ["layer_major", "token_major", "page_major"]
# -------------------------------------------------------------------- ways to request it


@pytest.mark.parametrize("arrangement", [None, "auto"])
@pytest.mark.parametrize("backend", ["kvpool_mla", "torch_native", "triton", "fa4", "intel_amx"])
def test_a2_auto_is_layer_major(arranged, arrangement, backend):
    args = arranged(arrangement, "--attention-backend", backend)
    assert config_of(args).arrangement is KVArrangement.LAYER_MAJOR


@pytest.mark.parametrize("layout", [(), ("--kv-cache-layout", "auto")])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_an_arrangement_needs_a_layout(resolve, checkpoints, arrangement, layout):
    text = f"--kv-cache-arrangement {arrangement}.*add --kv-cache-layout bf16, which keeps SGLang's rows"
    with pytest.raises(ValueError, match=text):
        resolve(checkpoints["mla"], *layout, "--kv-cache-arrangement", arrangement)


def test_demo_servers_do_not_inherit_the_variables_of_options():
    from sgl_kvpool import env

    assert {option.env for option in OPTIONS} <= set(env.NOT_INHERITED)


# -------------------------------------------------------------------- refusals


def test_a_backend_changed_on_the_way_is_noticed(arranged, monkeypatch):
    from sglang.srt.arg_groups import overrides, resolution_hooks

    def meddle(server_args, previous):
        previous(server_args)
        overrides.declare_resolution(server_args, "other plugin", attention_backend="intel_amx")

    hooks = {**resolution_hooks._HOOKS, "handle_other_validations": [meddle]}
    monkeypatch.setattr(resolution_hooks, "_HOOKS", hooks)
    with pytest.raises(ValueError, match="intel_amx cannot read rows of --kv-cache-arrangement token_major"):
        arranged("token_major")
