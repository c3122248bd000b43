"""Values are checked by one rule at every door: flag, YAML, Engine keyword and environment variable."""

import argparse
import copy
import functools
import pickle
from decimal import Decimal
from fractions import Fraction

import msgspec
import numpy
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang import Engine
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.entrypoints import engine
from sglang.srt.server_args import ServerArgs, prepare_server_args

from sgl_kvpool.refusal import Refusal
from sgl_kvpool.sglang_plugin import options as record
from sgl_kvpool.sglang_plugin.options import ERROR_SAMPLE, LAYOUT, OPTIONS
from sgl_kvpool.sglang_plugin.rules import arguments as argument_rules

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PLAIN = ("--model-path", "dummy", "--device", "cpu")
TIER = "enable_hierarchical_cache"


@pytest.fixture
def doors(resolve, monkeypatch, tmp_path):
    """Door -> function that takes an option and a value, and returns the value that the server has."""
    engine.load_plugins()

    def flag(option, value, beside):
        return prepare_server_args([*PLAIN, f"{option.flag}={value}", *beside])

    def config(option, value, beside):
        file = tmp_path / "server.yaml"
        file.write_text(yaml.safe_dump({option.name.replace("_", "-"): value}))
        return prepare_server_args([*PLAIN, "--config", str(file), *beside])

    def keyword(option, value, beside):
        fields = {} if option is LAYOUT else {LAYOUT.name: "bf16"}
        fields |= {"model_path": "dummy", "device": "cpu", TIER: True, "enable_metrics": True}
        fields[option.name] = value
        return engine.Engine.server_args_class(**fields)

    def variable(option, value, beside):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(option.env, value)
            server_args = prepare_server_args([*PLAIN, *beside])
            return argument_rules.check(server_args).requests(option)

    def through(door):
        def run(option, value):
            monkeypatch.setattr(record, "_requested", set())
            beside = () if option is LAYOUT else (LAYOUT.flag, "bf16")
            found = door(option, value, (*beside, "--enable-hierarchical-cache", "--enable-metrics"))
            return found if isinstance(found, str) else argument_rules.check(found).requests(option)

        return run

    return {door.__name__: through(door) for door in (flag, config, keyword, variable)}


every_option = pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
DOORS = ["flag", "config", "keyword", "variable"]


@every_option
@pytest.mark.parametrize("door", DOORS)
def test_values_are_stripped_and_shown_by_their_repr(doors, option, door):
    given_as = {"keyword": f"{option.name}=", "variable": f"{option.env}="}.get(door, f"{option.flag} ")
    for value in option.choices:
        assert doors[door](option, f" {value}\t") == value
        with pytest.raises(Refusal) as refused:
            doors[door](option, f"{value} x")
        choices = ", ".join(option.choices)
        text = f"{given_as}{value + ' x'!r} is not a {option.words}; choose one of: {choices}"
        assert str(refused.value) == text


@pytest.mark.parametrize("door", ["config", "keyword"])
def test_numbers_may_be_numbers(doors, door):
    assert doors[door](ERROR_SAMPLE, 64) == "64"


@every_option
@pytest.mark.parametrize("door", DOORS[:3])
def test_argument_and_environment_are_equal(doors, option, door, monkeypatch):
    one, other = option.values[:2]
    monkeypatch.setenv(option.env, one)
    assert doors[door](option, one) == one
    for value in (other, option.default):
        with pytest.raises(Refusal) as refused:
            doors[door](option, value)
        text = f"the {option.words} is {value!r} as argument ({option.flag} or {option.name}=) but {one!r}"
        assert str(refused.value).startswith(f"{text} in the environment ({option.env}); ")


@every_option
def test_values_travel_to_other_processes_and_copies_that_lost_them_are_refused(resolve, option, monkeypatch):
    """Shallow copies of a msgspec Struct have only its fields."""
    value = option.values[-1]
    record.request(args := ServerArgs(model_path="dummy", device="cpu"), {option: value})
    for other in (pickle.loads(pickle.dumps(args)), copy.deepcopy(args)):
        assert option.resolve(other) == value
    for make in (
        lambda: copy.copy(args),
        lambda: msgspec.structs.replace(args, port=30001),
        lambda: ServerArgs(**msgspec.structs.asdict(args)),
    ):
        text = rf"does not record a {option.words}, .*{option.env}={'|'.join(option.choices)}$"
        with pytest.raises(Refusal, match=text.replace("|", r"\|")):
            option.resolve(make())
        for exported in (option.default, value):
            with monkeypatch.context() as patch:
                patch.setenv(option.env, exported)
                assert option.resolve(make()) == exported


ODD = st.one_of(
    *(st.binary(), st.booleans(), st.text(), st.lists(st.integers()), st.complex_numbers()),
    *(st.sampled_from((numpy.array(["fp4", "fp8"]), numpy.array([[1], [2]]), object(), Decimal(2), {1: 2})),),
)


@FEW
@given(value=st.one_of(ODD.filter(lambda value: not isinstance(value, str)), st.integers(), st.floats()))
def test_keywords_that_are_no_strings(doors, value):
    with pytest.raises(Refusal) as refused:
        doors["keyword"](LAYOUT, value)
    assert str(refused.value).startswith(f"kv_cache_layout={' '.join(repr(value).split())[:40]}")
    assert "\n" not in str(refused.value)


@functools.cache
def numeric_fields():
    """Fields of ServerArgs that SGLang's own parser converts to a number."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    converted = {
        action.dest
        for action in parser._actions
        if action.type in (int, float) and not action.nargs and not action.choices  # NPU's --fuseep-mode
    }
    return sorted(converted.intersection(field.name for field in record_fields(ServerArgs)))


@pytest.fixture
def engine_arguments(doors):
    """`ServerArgs` of `Engine(kv_cache_layout="fp4", ...)`."""

    def make(**fields):
        return Engine.server_args_class(model_path="dummy", device="cpu", kv_cache_layout="fp4", **fields)

    return make


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("page_size", value) for value in ("64", 64.0, True, 10**30)),
        *(("nnodes", None.__class__), ("hicache_size", 2.5), ("mem_fraction_static", 10**400)),
    ],
)
def test_numbers_of_an_engine_that_its_parser_would_not_make(engine_arguments, field, value):
    with pytest.raises(Refusal, match=r"^[^\n]*; give [^\n]*, or leave it out$") as refused:
        engine_arguments(**{field: value, TIER: True})
    shown = " ".join(repr(value).split())
    assert str(refused.value).startswith(f"--{field.replace('_', '-')} {shown[:40]}")


@FEW
@given(value=ODD, data=st.data())
def test_every_numeric_field_takes_numbers_only(engine_arguments, value, data):
    field = data.draw(st.sampled_from(numeric_fields()))
    with pytest.raises(Refusal, match=f"^--{field.replace('_', '-')} "):
        engine_arguments(**{field: value})


def test_numbers_of_any_type_are_numbers(engine_arguments):
    assert engine_arguments(page_size=numpy.int64(64)).page_size == 64
    assert engine_arguments(mem_fraction_static=numpy.float32(0.5)).mem_fraction_static == 0.5
    assert engine_arguments(mem_fraction_static=Fraction(1, 2)).mem_fraction_static == 0.5
    assert engine_arguments(mem_fraction_static=1, hicache_size=0).mem_fraction_static == 1


def test_without_a_layout_an_engine_passes_on_what_it_is_given(doors):
    assert Engine.server_args_class(model_path="dummy", device="cpu", dcp_size="2").dcp_size == "2"
