"""--kv-cache-layout through SGLang's own argument parsing and resolution."""

import dataclasses
import inspect
import os
import pickle
import pkgutil
from importlib import import_module
from types import SimpleNamespace

import pytest
from codec_oracle import LAYOUTS
from sglang.srt.arg_groups import overrides, resolution_hooks
from sglang.srt.arg_groups.overrides import resolving_view as view
from sglang.srt.server_args import ServerArgs
from shown import SHOWN

from sgl_kvpool import env
from sgl_kvpool.sglang_plugin import rules
from sgl_kvpool.sglang_plugin.hooks.launching import (
    _configure_scheduler_process,
    _launch_scheduler_actors,
    _launch_scheduler_processes,
)
from sgl_kvpool.sglang_plugin.options import config_of
from sgl_kvpool.sglang_plugin.pool_request import PoolRequest
from sgl_kvpool.sglang_plugin.rules import arguments


def asked(server_args):
    layout = config_of(server_args).layout
    return layout and layout.value


@pytest.mark.parametrize("argv", [(), ("--kv-cache-layout", "auto")])
def test_auto_and_absent_are_sglang_as_it_is(resolve, checkpoints, argv):
    args = resolve(checkpoints["mla"], *argv)
    assert asked(args) is None
    assert view(args).kv_cache_dtype == "auto"
    assert view(args).attention_backend in ("intel_amx", "torch_native")  # depends on the CPU


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *((layout, "auto") for layout in LAYOUTS),
        *(("bf16", "bf16"), ("bf16", "bfloat16"), ("fp8", "fp8_e4m3"), ("fp4", "bfloat16")),
        # What SGLang is shown for a dense model, and the precision of the latent.
        *(("fp8_block_scale", "bfloat16"), ("fp8_block_scale", "fp8_e4m3")),
    ],
)
def test_a_layout_decides_dtype_and_backend(resolve, checkpoints, layout, dtype):
    args = resolve(checkpoints["mla"], "--kv-cache-layout", layout, "--kv-cache-dtype", dtype)
    assert asked(args) == layout
    assert view(args).kv_cache_dtype == SHOWN[layout]
    assert view(args).attention_backend == "kvpool_mla"
    assert args.kv_cache_dtype == dtype  # the user's value stays unchanged


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *(("bf16", "fp8_e4m3"), ("fp8", "fp8_e5m2"), ("fp8", "bfloat16"), ("fp8_block_scale", "fp8_e5m2")),
        *(("fp4", "fp4_mx_block16"), ("fp4", "nvfp4")),
    ],
)
def test_contradicting_dtypes(resolve, checkpoints, layout, dtype):
    with pytest.raises(ValueError, match=f"--kv-cache-dtype '{dtype}' contradicts") as error:
        resolve(checkpoints["mla"], "--kv-cache-layout", layout, "--kv-cache-dtype", dtype)
    # The message has the table of the dtypes that each layout accepts.
    assert "bf16: auto, bfloat16, bf16; fp8: auto, fp8_e4m3; fp8_block_scale: auto" in str(error.value)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        # Before SGLang queries a GPU, which is absent.
        ("dsa", "models with sparse attention, such as DeepseekV32.*GPUs only, and the device is cpu"),
        ("kda-alone", "all 6 layers of KimiLinearForCausalLM keep states instead"),
        ("kda-rank448", "kv_lora_rank=448 is not a positive multiple of 128"),
        ("gdn", "Qwen3NextForCausalLM uses MHA"),
        ("dots3", "Dots3NoteForCausalLM mixes MLA with sliding windows"),
        ("rank448", "kv_lora_rank=448 is not a positive multiple of 128"),
        ("rope32", r"qk_rope_head_dim=32 is not one of \(0, 64\)"),
    ],
)
def test_models_that_are_refused(resolve, checkpoints, model, text):
    with pytest.raises(ValueError, match=f"{text}.*without --kv-cache-layout"):
        resolve(checkpoints[model], "--kv-cache-layout", "fp4")


@pytest.mark.parametrize("flag", ["--attention-backend", "--speculative-draft-attention-backend"])
def test_our_backend_needs_a_layout(resolve, checkpoints, flag):
    with pytest.raises(ValueError, match=f"^{flag} kvpool_mla reads pools of sgl-kvpool; add"):
        resolve(checkpoints["mla"], flag, "kvpool_mla")


def test_what_was_decided_is_one_frozen_record(resolve, checkpoints):
    ranks = ("--enable-hierarchical-cache", "--tp-size", "2")
    args = resolve(checkpoints["mla"], "--kv-cache-layout", "fp4", *ranks)
    (name,) = (name for name in vars(args) if name.startswith("_kvpool"))
    record = getattr(pickle.loads(pickle.dumps(args)), name)
    assert record == getattr(args, name)
    assert (record.layout, record.host_tier.sharing) == ("fp4", "node")
    assert record.hook_groups == "pools, dense MLA on a CPU, host tier"
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.layout = None


def test_every_rule_is_in_a_list():
    """A rule takes a server, and nothing else; two are called by the rules of other servers too.

    A generator lists obstacles, which a rule refuses.
    """
    from sgl_kvpool.sglang_plugin.hooks import server_args

    tables = (server_args.RULES_BEFORE, server_args.RULES_OF_BACKENDS, server_args.RULES_AFTER)
    listed = {rule for table in tables for _, rule in table} | {*arguments.RULES, *arguments.RULES_OF_STOCK}
    written = set()
    for module in pkgutil.iter_modules(rules.__path__, f"{rules.__name__}."):
        for name, function in inspect.getmembers(import_module(module.name), inspect.isfunction):
            is_rule = not name.startswith("_") and not inspect.isgeneratorfunction(function)
            if is_rule and [*inspect.signature(function).parameters] == ["server"]:
                written.add(function)
    assert {rule.__name__ for rule in written - listed} == {"check_ranks", "check_stock"}


def test_children_are_told_around_the_spawn_only(resolve, checkpoints, monkeypatch):
    seen = []

    def spawn(cls, server_args, *args, **kwargs):
        seen.append((os.environ.get(env.CHILD_HOOK_GROUPS), env.CHILD_REFUSAL in os.environ))
        return SimpleNamespace(wait_for_ready=None), []

    plain = resolve(checkpoints["mla"])
    packed = resolve(checkpoints["mla"], "--kv-cache-layout", "fp4")
    for args in (plain, packed, plain):
        _launch_scheduler_processes(spawn, object, args, None, None)
        assert not {env.CHILD_HOOK_GROUPS, env.CHILD_REFUSAL} & set(os.environ)
    assert seen == [(None, False), ("pools, dense MLA on a CPU", True), (None, False)]


def test_any_launchers_schedulers_get_the_last_resolved_arguments(resolve, checkpoints, monkeypatch, capsys):
    """As SMG's gRPC servicer, which spawns them itself; a scheduler of other arguments ends."""

    def end(status):
        raise SystemExit(status)

    def configure(args):
        return _configure_scheduler_process(lambda args, gpu: "went on", pickle.loads(pickle.dumps(args)), 0)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.delenv(env.CHILD_HOOK_GROUPS, raising=False)
    packed = resolve(checkpoints["mla"], "--kv-cache-layout", "fp4")
    assert os.environ[env.CHILD_HOOK_GROUPS] == "pools, dense MLA on a CPU"
    assert configure(packed) == "went on"
    plain = resolve(checkpoints["mla"])
    assert env.CHILD_HOOK_GROUPS not in os.environ
    assert configure(plain) == "went on"
    with pytest.raises(SystemExit):
        configure(packed)
    text = "the hook groups None, but its arguments need 'pools, dense MLA on a CPU'"
    assert text in capsys.readouterr().err
    resolve(checkpoints["mla"], "--kv-cache-layout", "fp4")
    with pytest.raises(SystemExit):
        configure(plain)


def test_ray_is_refused_where_its_arguments_do_not_say_so(resolve, checkpoints):
    packed = resolve(checkpoints["mla"], "--kv-cache-layout", "fp4")
    with pytest.raises(ValueError, match="RayEngine does not work with KV cache layout fp4"):
        _launch_scheduler_actors(print, object, packed)
    assert _launch_scheduler_actors(lambda *a: "launched", object, resolve(checkpoints["mla"])) == "launched"


def test_a_record_resolved_without_the_plugin_is_refused():
    configurator = SimpleNamespace(server_args=ServerArgs(model_path="dummy"))
    with pytest.raises(RuntimeError, match="resolved before SGLang's plugins were loaded"):
        PoolRequest(configurator)


def test_reading_rows_in_prefill_needs_our_prefill(resolve, checkpoints, monkeypatch):
    monkeypatch.setenv("KVPOOL_PREFILL_READS_ROWS", "1")
    argv = ("--kv-cache-layout", "bf16", "--prefill-attention-backend", "torch_native")
    with pytest.raises(ValueError, match="does nothing for the prefill attention backend torch_native"):
        resolve(checkpoints["mla"], *argv)


@pytest.mark.parametrize(
    ("changed", "argv", "text"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, ["fp4"], "fp8_e4m3, but layout fp4 declares bfloat16"),
        (
            {"attention_backend": "intel_amx"},
            ["bf16", "--kv-cache-arrangement", "token_major"],
            "intel_amx cannot read rows of --kv-cache-arrangement token_major",
        ),
    ],
)
def test_what_changes_on_the_way_is_noticed(resolve, checkpoints, monkeypatch, changed, argv, text):
    """By a model rule or another plugin, for example; SGLang would write rows of another dtype."""

    def meddle(server_args, previous):
        previous(server_args)
        overrides.declare_resolution(server_args, "other plugin", **changed)

    hooks = {**resolution_hooks._HOOKS, "handle_other_validations": [meddle]}
    monkeypatch.setattr(resolution_hooks, "_HOOKS", hooks)
    with pytest.raises(ValueError, match=text):
        resolve(checkpoints["mla"], "--kv-cache-layout", *argv)
