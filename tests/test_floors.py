"""Imports between the package's floors, beyond what import-linter's contracts in pyproject.toml say."""

import ast
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
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


def imported_by(text, name, modules, *, is_package=False):
    """Modules of the package that a module's text imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    # Whether an imported name is a submodule or a name of `__init__` follows from the modules that exist.
    # Importing a submodule also runs its parent packages, but a module's own parents are imported already.
    return {other for other in found if other in modules and other != name}


def circle(graph):
    """Modules of an import cycle, or None."""
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return error.args[1]
    return None


def test_no_circle_of_modules():
    graph = {name: imported_by(path.read_text(), name, MODULES) for name, path in MODULES.items()}
    # `from package import module` names the package too; the edge to the package is dropped.
    for name, others in graph.items():
        graph[name] = {o for o in others if not any(other.startswith(f"{o}.") for other in others)}
    assert sum(map(len, graph.values())) > 500
    assert circle(graph) is None


def test_a_circle_is_found():
    modules = {"p": "", "p.a": "", "p.b": ""}
    texts = {"p.a": "def f():\n    from p import b\n", "p.b": "import p.a\n"}
    graph = {name: imported_by(text, name, modules) - {"p"} for name, text in texts.items()}
    assert set(circle(graph)) == {"p.a", "p.b"}


@pytest.mark.parametrize("floor", WITHOUT_SGLANG)
def test_a_lower_floor_without_sglang(floor):
    """import-linter reads the source; this test imports."""
    names = [name for name in MODULES if name == floor or name.startswith(f"{floor}.")]
    assert names
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *names], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
