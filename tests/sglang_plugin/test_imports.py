"""The imports from SGLang that we read from our modules' source, and the hook groups of these modules."""

import re
from pathlib import Path

import pytest

from sgl_kvpool.commands.doctor.probes import hook_groups
from sgl_kvpool.sglang_plugin.hook_groups import GROUPS
from sgl_kvpool.sglang_plugin.imports import imports_of

ROOT = Path(__file__).resolve().parents[2]


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in (ROOT / "sgl_kvpool").rglob("*.py")}
IMPORTING = {
    name: path
    for name, path in MODULES.items()
    if re.search(r"^\s*(from|import) sglang\b", path.read_text(), re.MULTILINE)
}


@pytest.mark.parametrize("module", sorted(IMPORTING))
def test_every_import_is_found(module):
    """But those for type checkers, which come last in the head of a module."""
    text = re.sub(r"^if TYPE_CHECKING:\n(?: .*\n|\n)+", "", IMPORTING[module].read_text(), flags=re.M)
    found = imports_of(module)
    for indent, of, names in re.findall(r"^( *)from (sglang[\w.]*) import \(?([^()#]+?)(?:\)|$)", text, re.M):
        names = {f"{of}.{name.split()[0]}" for name in names.strip(" ,\n").split(",")}
        assert names <= (found.in_functions if indent else found.at_import)


def test_every_module_that_imports_sglang_belongs_to_a_hook_group():
    listed = {module for group in hook_groups() for module in group.source_modules}
    assert listed <= MODULES.keys()
    importing = {name for name in IMPORTING if imports_of(name).at_import | imports_of(name).in_functions}
    # Modules that only hook and import nothing from SGLang are listed to be applied.
    hooks = {name for name in MODULES if name.startswith("sgl_kvpool.sglang_plugin.hooks.")}
    assert importing <= listed
    assert listed - importing <= hooks | {"sgl_kvpool.sglang_plugin.startup"}
    assert len(importing) > 40


#: Imports inside functions that lead from a group to modules of other groups, with the condition under which
#: a server reaches the function.
GUARDED = {
    ("hooks.pools", "srt.pool.dsa"): "a model with sparse attention",
    ("hooks.pools", "srt.pool.hybrid"): "a hybrid model",
    ("hooks.pools", "srt.pool.canary"): "the hook of its own group",
    ("hooks.pools", "srt.pool.error_sample"): "the hook of its own group",
    ("hooks.budget", "srt.attention.extend"): "CUDA",
    ("hooks.attention", "srt.attention.cpu"): "a CPU",
    ("hooks.attention", "srt.attention.cuda"): "CUDA",
}


def test_no_group_leads_to_modules_of_another_unguarded():
    """Otherwise a server would start, and fail when it calls the function."""
    always = {m for group in GROUPS[:4] for m in group.source_modules}
    assert [group.name for group in GROUPS[:4]] == ["arguments", "model rules", "launcher", "pools"]
    #: Groups whose servers always use the listed groups too.
    with_others = {"host tier of hybrid models": ("host tier", "hybrid models")}
    with_others["speculative decoding"] = ("dense MLA on CUDA",)  # refused on a CPU
    by_name = {group.name: group for group in GROUPS}
    unguarded = set()
    for group in GROUPS:
        own = always | set(group.source_modules)
        for other in with_others.get(group.name, ()):
            own |= set(by_name[other].source_modules)
        for module in group.source_modules:
            for imported in inner_imports(MODULES[module].read_text()):
                needs = imports_of(imported).at_import | imports_of(imported).in_functions
                if needs and imported not in own:
                    unguarded.add((short(module), short(imported)))
    assert unguarded == GUARDED.keys()


def short(module):
    return module.removeprefix("sgl_kvpool.").removeprefix("sglang_plugin.")


def inner_imports(text):
    found = re.findall(r"^ +from (sgl_kvpool[\w.]*) import (\w+)", text, re.MULTILINE)
    for module, name in found:
        yield f"{module}.{name}" if f"{module}.{name}" in MODULES else module
