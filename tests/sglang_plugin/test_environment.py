"""Environment variables: those of sgl-kvpool, and unknown names with its prefix."""

import os
import re
from pathlib import Path

import pytest

from sgl_kvpool import env
from sgl_kvpool.commands.doctor import probes
from sgl_kvpool.sglang_plugin.options import OPTIONS

ROOT = Path(__file__).resolve().parents[2]

#: The name that a user sets, and the nearest variable, which the message suggests.
WRONG_NAMES = {
    "KVPOOL_KV_CACHE_LAYUOT": "KVPOOL_KV_CACHE_LAYOUT",
    "KVPOOL_LAYOUT": "KVPOOL_KV_HOST_LAYOUT",
    "KVPOOL_FIXTOPK": "KVPOOL_FIX_TOPK",
    # Names of sgl-kvpool before its first release, and the SGLANG_ spelling that SGLang recommends for them.
    "SGL_KVPOOL_KV_CACHE_LAYOUT": "KVPOOL_KV_CACHE_LAYOUT",
    "SGLANG_KVPOOL_KV_CACHE_LAYOUT": "KVPOOL_KV_CACHE_LAYOUT",
    "SGLANG_KVPOOL_HOST_ENGINE": "KVPOOL_KV_HOST_ENGINE",
}


@pytest.fixture
def environment(monkeypatch):
    """`environment(name=value, ...)`: removes all variables of sgl-kvpool except these."""
    for name in [name for name in os.environ if "KVPOOL_" in name]:
        monkeypatch.delenv(name)

    def set_variables(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


def test_the_table_has_every_name_that_the_package_reads():
    """All constants are in the table, and no other module spells a name."""
    constants = {value for value in vars(env).values() if isinstance(value, str)}
    names = {name for name in constants if re.fullmatch(r"KVPOOL_.+", name)} | set(env.OPTIONS)
    assert names == set(env.VARIABLES)
    assert [option.env for option in OPTIONS] == list(env.OPTIONS)
    assert {*env.OPTIONS} <= {*env.NOT_INHERITED}  # by demo servers
    for file in (ROOT / "sgl_kvpool").rglob("*.py"):
        quoted = re.findall(r"""["'](KVPOOL_[A-Z_]+)["']""", file.read_text())
        assert file.name == "env.py" or not set(quoted) & set(env.VARIABLES), file
    assert sorted(env.EFFECTS) == sorted((*env.FLAGS, *env.CHOICES))


@pytest.mark.parametrize(("name", "meant"), WRONG_NAMES.items())
def test_the_nearest_name(environment, name, meant):
    environment(**{name: "fp4"})
    assert env.problems() == [
        f"{name}='fp4' is not a variable of sgl-kvpool; the nearest is {meant}: set that instead, "
        f"or unset {name}"
    ]


def test_a_name_that_is_near_none(environment):
    environment(KVPOOL_DCP_SIZE="2")
    assert env.problems() == ["KVPOOL_DCP_SIZE='2' is not a variable of sgl-kvpool; unset KVPOOL_DCP_SIZE"]


@pytest.mark.parametrize(
    "variables",
    [{}, {"SGL_KVPOOL_KV_CACHE_LAYOUT": ""}, {"_KVPOOL_CHILD_HOOK_GROUPS": "pools"}, {"TEST_KVPOOL_X": "1"}],
    ids=str,
)
def test_other_names_and_empty_values_are_ignored(environment, variables):
    environment(**variables)
    assert env.problems() == []
    assert probes.plugin().problems == []
