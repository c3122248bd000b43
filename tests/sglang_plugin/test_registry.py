"""What modules declare of SGLang, and what is derived from them."""

import inspect
import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest

from sgl_kvpool.commands.doctor.probes import hook_groups
from sgl_kvpool.sglang_plugin import registry
from sgl_kvpool.sglang_plugin.hook_groups import GROUPS
from sgl_kvpool.sglang_plugin.registry import HookPoint, around, declared

NAMES = {group.name for group in hook_groups()}


@pytest.fixture
def scratch(monkeypatch):
    """A group of this test; what it declares is forgotten."""
    monkeypatch.setattr(registry, "_declared", registry._declared.copy())
    return "scratch"


def test_every_declaration_names_a_hook_group():
    assert all(group.declared is registry.declared(group.name) for group in GROUPS)  # imports the hooks
    assert registry._declared.keys() <= NAMES
    assert len({target for group in GROUPS for target in group.declared.hooks}) > 40


def test_parameters_are_those_of_the_hook_and_what_it_reads(scratch):
    @around("sglang.one", scratch, reads=("b", "c"))
    def one(original, self, a, *args, d=None, **kwargs): ...

    @around("sglang.other", scratch, reads=("b",))
    def other(original, cls, *, a, **kwargs): ...

    assert list(declared(scratch).points.values()) == [
        HookPoint("sglang.one", ("self", "a", "b", "c", "d")),
        HookPoint("sglang.other", ("a", "b")),
    ]
    assert declared(scratch).hooks == {"sglang.one": one, "sglang.other": other}
    assert declared(scratch).modules == (__name__,)
    with pytest.raises(AssertionError, match=r"sglang\.one"):
        around("sglang.one", scratch)(other)


def overriding():
    """(class of SGLang's, method) for each method of SGLang that a class of ours overrides."""
    for name in {name for group in GROUPS for name in group.modules if name.startswith("srt.")}:
        for ours in vars(import_module(f"sgl_kvpool.{name}")).values():
            lines = ours.__mro__ if isinstance(ours, type) else ()
            theirs = [one for one in lines if one.__module__.startswith("sglang.")]
            for owner in (one for one in lines if one.__module__.startswith("sgl_kvpool.")):
                for member, value in vars(owner).items():
                    is_method = inspect.isroutine(value) or isinstance(value, property)
                    if is_method and not member.startswith("__"):
                        yield from ((one, member) for one in theirs if member in vars(one))


def test_every_method_that_overrides_sglangs_is_a_hook_point():
    """If SGLang renames it, its mark alone tells that ours is no longer called."""
    points = [point.target.rpartition(".") for group in GROUPS for point in group.points()]
    owners = {method: [] for _, _, method in points}
    for owner, _, method in points:
        owners[method].append(pkgutil.resolve_name(owner) if "." in owner else None)
    found = {*overriding()}
    missing = {
        f"{cls.__qualname__}.{method}"
        for cls, method in found
        if not any(isinstance(one, type) and issubclass(one, cls) for one in owners.get(method, ()))
    }
    assert missing == set()
    assert len(found) > 50


@pytest.mark.slow
def test_a_module_that_cannot_be_imported_is_a_line_of_its_groups():
    """The base class of our pool is gone, in a process that has not imported our module."""
    code = (
        "import sglang.srt.mem_cache.memory_pool as m; del m.MLATokenToKVPool;"
        "from sgl_kvpool.sglang_plugin.hook_groups import POOLS;"
        "from sgl_kvpool.sglang_plugin.hook_points import check;"
        "print('\\n'.join(check(POOLS.points())))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    base = "sglang.srt.mem_cache.memory_pool"
    assert f"{base}.MLATokenToKVPool: not there (AttributeError: " in done.stdout
    ours = "sgl_kvpool.srt.pool.mla: cannot be imported (ImportError: cannot import name 'MLATokenToKVPool' "
    assert any(line.startswith(ours) for line in lines)
