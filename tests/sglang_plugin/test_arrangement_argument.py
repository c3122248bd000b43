"""`--kv-cache-arrangement`: the ways to request it, and what is refused.

A2 is an item of the vLLM checklist of tests/connectors.
"""

import copy
import pickle
from types import SimpleNamespace

import pytest

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.sglang_plugin.options import ARRANGEMENT, LAYOUT, OPTIONS, arrangement_of, layout_of

ENV = "KVPOOL_KV_CACHE_ARRANGEMENT"
ARRANGEMENTS = ["layer_major", "token_major", "page_major"]
MOVED = ARRANGEMENTS[1:]


# -------------------------------------------------------------------- ways to request it


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("layout", ["bf16", "fp4"])
def test_flag(arranged, arrangement, layout):
    args = arranged(arrangement, layout=layout)
    assert arrangement_of(args) is KVArrangement(arrangement)
    assert layout_of(args) == layout


@pytest.mark.parametrize("arrangement", [None, "auto"])
@pytest.mark.parametrize("backend", ["kvpool_mla", "torch_native", "triton", "fa4", "intel_amx"])
def test_a2_auto_is_layer_major(arranged, arrangement, backend):
    args = arranged(arrangement, "--attention-backend", backend)
    assert arrangement_of(args) is KVArrangement.LAYER_MAJOR


def test_environment_and_yaml(arranged, monkeypatch, tmp_path):
    config = tmp_path / "server.yaml"
    config.write_text("kv-cache-arrangement: page_major\n")
    assert arrangement_of(arranged(None, "--config", str(config))) == "page_major"
    monkeypatch.setenv(ENV, "token_major")
    assert arrangement_of(arranged(None)) == "token_major"
    assert arrangement_of(arranged("token_major")) == "token_major"


def test_engine_keyword(resolve, checkpoints, monkeypatch):
    """Both keywords; tests/engine covers what the Engine passes on."""
    from sglang.srt.entrypoints import engine

    engine.load_plugins()

    def build(**keywords):
        return engine.Engine.server_args_class(model_path=checkpoints["mla"], device="cpu", **keywords)

    for value in ("page_major", KVArrangement.PAGE_MAJOR):
        args = build(kv_cache_layout=MLAKVCacheLayout.FP4, kv_cache_arrangement=value)
        args.resolve_once()
        assert (layout_of(args), arrangement_of(args)) == ("fp4", "page_major")
        assert type(vars(args)[ARRANGEMENT.attribute]) is str  # pickled into processes without our enum
    with pytest.raises(
        ValueError,
        match="^kv_cache_arrangement='head_major' is not a KV cache arrangement; choose one of: auto",
    ):
        build(kv_cache_arrangement="head_major")
    monkeypatch.setenv(ENV, "token_major")
    with pytest.raises(
        ValueError, match=rf"'page_major' as argument.*kv_cache_arrangement=.*'token_major'.*{ENV}"
    ):
        build(kv_cache_layout="fp4", kv_cache_arrangement="page_major")


@pytest.mark.parametrize("written", ["layer_major", "auto"])
def test_flag_against_environment(arranged, monkeypatch, written):
    monkeypatch.setenv(ENV, "token_major")
    text = rf"the KV cache arrangement is '{written}' as argument.*'token_major' in the environment \({ENV}\)"
    with pytest.raises(ValueError, match=text):
        arranged(written)


@pytest.mark.parametrize("name", ["head_major", "nhd"])
def test_unknown_names(arranged, monkeypatch, name):
    text = "is not a KV cache arrangement.*: auto, layer_major, token_major, page_major$"
    with pytest.raises(ValueError, match=f"^--kv-cache-arrangement '{name}' {text}"):
        arranged(name)
    monkeypatch.setenv(ENV, name)
    with pytest.raises(ValueError, match=f"^{ENV}='{name}' {text}"):
        arranged(None)


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


def test_help_shows_the_argument(resolve):
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert "--kv-cache-arrangement {auto,layer_major,token_major,page_major}" in parser.format_help()
    assert ENV in parser.format_help()


def test_it_travels_to_other_processes(arranged):
    args = arranged("page_major")
    for other in (pickle.loads(pickle.dumps(args)), copy.deepcopy(args)):
        assert (layout_of(other), arrangement_of(other)) == ("bf16", "page_major")


def test_copies_that_lost_it_are_refused(arranged, monkeypatch):
    """As with copies that lost the layout, which is checked first."""
    args = arranged("token_major")
    monkeypatch.setenv("KVPOOL_KV_CACHE_LAYOUT", "bf16")
    with pytest.raises(
        ValueError, match=rf"does not record a KV cache arrangement.*{ENV}=auto\|layer_major\|"
    ):
        copy.copy(args).resolve_once()
    monkeypatch.setenv(ENV, "token_major")
    record = copy.copy(args)
    record.resolve_once()
    assert arrangement_of(record) == "token_major"


def test_the_options_are_told_apart():
    flags = ["--kv-cache-layout", "--kv-cache-arrangement", "--kv-host-layout", "--kv-host-engine"]
    flags.append("--kv-host-sharing")
    assert [option.flag for option in OPTIONS] == flags
    words = ["KV cache layout", "KV cache arrangement", "KV host layout", "KV host engine"]
    words.append("KV host sharing")
    assert [option.words for option in OPTIONS] == words
    for field in ("name", "env", "flag", "attribute", "help"):
        assert len({getattr(option, field) for option in OPTIONS}) == len(OPTIONS)
    assert LAYOUT.attribute == "_kvpool_kv_cache_layout"


def test_demo_servers_do_not_inherit_the_variables_of_options():
    from sgl_kvpool import env
    from sgl_kvpool.demo.server import Server

    assert {option.env for option in OPTIONS} <= set(env.NOT_INHERITED)
    for option in OPTIONS:
        assert f"-u {option.env} " in Server(["--port", "1"], "log").shell_command


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize("arrangement", MOVED)
@pytest.mark.parametrize(
    "argv",
    [
        ("--disaggregation-mode", "prefill"),
        ("--disaggregation-mode", "decode"),
    ],
)
def test_disaggregation_refuses_other_arrangements(arranged, arrangement, argv):
    text = f"^{' '.join(argv)} does not work with --kv-cache-arrangement {arrangement}: .*one of the two"
    with pytest.raises(ValueError, match=text):
        arranged(arrangement, *argv)


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


@pytest.mark.parametrize(
    "flag", ["--attention-backend", "--prefill-attention-backend", "--decode-attention-backend"]
)
@pytest.mark.parametrize(
    ("arrangement", "backend"),
    [
        *(("token_major", name) for name in ("intel_amx", "fa4")),
        *(("page_major", name) for name in ("flashinfer", "torch_native", "triton", "intel_amx")),
    ],
)
def test_backends_that_cannot_read_an_arrangement(arranged, flag, arrangement, backend):
    reason = {"token_major": "its kernels are not known", "page_major": "a slot times a stride"}[arrangement]
    text = f"^{flag} {backend} cannot read rows of --kv-cache-arrangement {arrangement}: {reason}.*kvpool_mla"
    with pytest.raises(ValueError, match=text):
        arranged(arrangement, flag, backend)


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
