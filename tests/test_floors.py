"""Imports between the package's floors, beyond what import-linter's contracts in pyproject.toml say."""

import graphlib
import sys
import tomllib

import grimp
from live_processes import ran

from scripts import ROOT

PACKAGE = ROOT / "sgl_kvpool"
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
#: Subpackages and modules that work without SGLang, from import-linter's forbidden contract.
WITHOUT_SGLANG = next(contract for contract in CONTRACTS if contract["type"] == "forbidden")["source_modules"]
#: Blocks SGLang: finders in `sys.meta_path` are asked before files are searched.
BLOCKED = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sglang":
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
for name in sys.argv[1:]:
    importlib.import_module(name)
assert "sglang" not in sys.modules
"""


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for folder in (PACKAGE, ROOT / "scripts") for path in folder.rglob("*.py")}


def test_lower_floors_without_sglang():
    """import-linter reads the source; this test imports."""
    names = [name for name in MODULES if any(f"{name}.".startswith(f"{floor}.") for floor in WITHOUT_SGLANG)]
    assert {floor for floor in WITHOUT_SGLANG if not any(name.startswith(floor) for name in names)} == set()
    done = ran(sys.executable, "-c", BLOCKED, *names)
    assert done.returncode == 0, done.stderr


def test_no_two_modules_import_each_other():
    """Inside functions too, directly or through others."""
    graph = grimp.build_graph("sgl_kvpool")
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    graphlib.TopologicalSorter(imported).prepare()  # raises CycleError
