"""`--kv-cache-arrangement`: the ways to request it, and what is refused.

A2 is an item of the vLLM checklist of tests/connectors.
"""

from types import SimpleNamespace

import pytest

from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.sglang_plugin.options import OPTIONS, arrangement_of, layout_of

ENV = "KVPOOL_KV_CACHE_ARRANGEMENT"
ARRANGEMENTS = ["layer_major", "token_major", "page_major"]
# -------------------------------------------------------------------- ways to request it


@pytest.mark.parametrize("arrangement", [None, "auto"])
@pytest.mark.parametrize("backend", ["kvpool_mla", "torch_native", "triton", "fa4", "intel_amx"])
def test_a2_auto_is_layer_major(arranged, arrangement, backend):
    args = arranged(arrangement, "--attention-backend", backend)
    assert arrangement_of(args) is KVArrangement.LAYER_MAJOR


@pytest.mark.parametrize("layout", [(), ("--kv-cache-layout", "auto")])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_an_arrangement_needs_a_layout(resolve, checkpoints, arrangement, layout):
    text = f"--kv-cache-arrangement {arrangement}.*add --kv-cache-layout bf16, which keeps SGLang's rows"
    with pytest.raises(ValueError, match=text):
        resolve(checkpoints["mla"], *layout, "--kv-cache-arrangement", arrangement)


def test_an_exported_arrangement_needs_a_layout(resolve, checkpoints, monkeypatch):
    monkeypatch.setenv(ENV, "token_major")
    with pytest.raises(ValueError, match=rf"--kv-cache-arrangement token_major \(or {ENV}\).*leave it out"):
        resolve(checkpoints["mla"])
    monkeypatch.setenv("KVPOOL_KV_CACHE_LAYOUT", "fp8")
    assert arrangement_of(resolve(checkpoints["mla"])) == "token_major"


def test_arrangement_auto_needs_no_layout(resolve, checkpoints):
    args = resolve(checkpoints["mla"], "--kv-cache-arrangement", "auto")
    assert layout_of(args) is None
    assert arrangement_of(args) is KVArrangement.LAYER_MAJOR


def test_nothing_resolved_is_layer_major():
    assert arrangement_of(SimpleNamespace()) is KVArrangement.LAYER_MAJOR


def test_demo_servers_do_not_inherit_the_variables_of_options():
    from sgl_kvpool import env
    from sgl_kvpool.demo.server import Server

    assert {option.env for option in OPTIONS} <= set(env.NOT_INHERITED)
    for option in OPTIONS:
        assert f"-u {option.env} " in Server(["--port", "1"], "log").shell_command


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize("arrangement", [None, "auto", "layer_major"])
@pytest.mark.parametrize("argv", [("--disaggregation-mode", "prefill"), ("--enable-hierarchical-cache",)])
def test_disaggregation_and_host_tier_take_layer_major(arranged, arrangement, argv):
    assert arrangement_of(arranged(arrangement, *argv)) == "layer_major"


def test_where_the_layout_is_the_obstacle_it_is_named(arranged):
    with pytest.raises(ValueError, match="does not work with --kv-cache-layout fp4"):
        arranged("token_major", "--enable-hisparse", "--disaggregation-mode", "prefill", layout="fp4")
    with pytest.raises(
        ValueError, match=r"triton cannot read rows of --kv-cache-layout fp4;.*or use kvpool_mla$"
    ):
        arranged("token_major", "--attention-backend", "triton", layout="fp4")


@pytest.mark.parametrize("backend", ["kvpool_mla", "torch_native", "triton", "flashinfer", "fa3"])
def test_backends_that_take_the_row_stride(arranged, backend):
    assert arrangement_of(arranged("token_major", "--attention-backend", backend)) == "token_major"


def test_a_backend_changed_on_the_way_is_noticed(arranged, monkeypatch):
    from sglang.srt.arg_groups import overrides, resolution_hooks

    def meddle(server_args, previous):
        previous(server_args)
        overrides.declare_resolution(server_args, "other plugin", attention_backend="intel_amx")

    hooks = {**resolution_hooks._HOOKS, "handle_other_validations": [meddle]}
    monkeypatch.setattr(resolution_hooks, "_HOOKS", hooks)
    with pytest.raises(ValueError, match="intel_amx cannot read rows of --kv-cache-arrangement token_major"):
        arranged("token_major")
