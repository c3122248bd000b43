"""Names that modules of this package import from SGLang, read from their source.

Each of these names is a hook point: if SGLang lacks one, the module cannot be imported, or fails when the
function with the import is called. Each check reads the source, so there is no second list to maintain.
"""

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGE = _ROOT.name
_SGLANG = "sglang"
#: Floors that import SGLang and that other modules import; lower floors work without SGLang.
_FLOORS = (f"{_PACKAGE}.srt.", f"{_PACKAGE}.sglang_plugin.")


class Imports(NamedTuple):
    """What one module imports at import time or in functions, and which modules of `ours`, this package.

    Dotted names in SGLang are modules, names imported from them, and attributes of either that the source
    uses (``ForwardMode.EXTEND``). Imports under TYPE_CHECKING are left out.
    """

    at_import: frozenset[str]
    in_functions: frozenset[str]
    ours: frozenset[str]


def sglang_names(modules: Iterable[str]) -> tuple[str, ...]:
    """Dotted names in SGLang that some modules of this package need; sorted.

    For modules that these import at import time, only the names needed at import time are included.
    """
    listed = set(modules)
    names: set[str] = set()
    seen: set[str] = set()
    remaining = set(listed)
    while remaining:
        module = remaining.pop()
        seen.add(module)
        found = imports_of(module)
        names |= found.at_import
        if module in listed:
            names |= found.in_functions
        remaining |= {name for name in found.ours if name.startswith(_FLOORS)} - seen
    return tuple(sorted(names))


def importing_sglang(*packages: str) -> list[str]:
    """Names below this package of the modules of some of its packages that import SGLang; sorted."""
    paths = (path for package in packages for path in sorted((_ROOT / package).rglob("*.py")))
    names = (".".join(path.relative_to(_ROOT).with_suffix("").parts) for path in paths)
    found = {name: imports_of(f"{_PACKAGE}.{name}") for name in (n.removesuffix(".__init__") for n in names)}
    return [name for name, imports in found.items() if imports.at_import | imports.in_functions]


@cache
def imports_of(module: str) -> Imports:
    """Imports of a module of this package, given its full name; AssertionError if there is no such module."""
    reader = _Reader()
    path = _path(module)
    assert path is not None, module
    reader.visit(ast.parse(path.read_text(encoding="utf-8")))
    return reader.found()


def _path(module: str) -> Path | None:
    base = _ROOT.joinpath(*module.split(".")[1:])
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


class _Reader(ast.NodeVisitor):
    def __init__(self) -> None:
        self._depth = 0
        self._names: tuple[set[str], set[str]] = (set(), set())  # at import, in functions
        self._ours: set[str] = set()
        #: Local name -> dotted name in SGLang; None for a name that is also bound to something else.
        self._dotted: dict[str, str | None] = {}
        self._attributes: set[tuple[str, str, bool]] = set()

    def found(self) -> Imports:
        for local, attribute, in_function in self._attributes:
            dotted = self._dotted.get(local)
            if dotted is not None:
                self._names[in_function].add(f"{dotted}.{attribute}")
        at_import, in_functions = map(frozenset, self._names)
        return Imports(at_import, in_functions, frozenset(self._ours))

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def _visit_function(self, node: ast.AST) -> None:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _visit_function

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] == _SGLANG:
                self._add(alias.name, alias.asname or _SGLANG, alias.name if alias.asname else _SGLANG)
            elif not self._depth and alias.name.startswith(f"{_PACKAGE}."):
                self._ours.add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        root = (node.module or "").partition(".")[0]
        for alias in node.names:
            dotted = f"{node.module}.{alias.name}"
            if root == _SGLANG:
                self._add(dotted, alias.asname or alias.name, dotted)
            elif not self._depth and root == _PACKAGE:
                self._ours.add(dotted if _path(dotted) is not None else str(node.module))

    def _add(self, dotted: str, local: str, dotted_local: str) -> None:
        self._names[self._depth > 0].add(dotted)
        known = self._dotted.setdefault(local, dotted_local)
        if known != dotted_local:
            self._dotted[local] = None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name):
            self._attributes.add((node.value.id, node.attr, self._depth > 0))
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._dotted[node.id] = None

    def visit_arg(self, node: ast.arg) -> None:
        self._dotted[node.arg] = None
        self.generic_visit(node)
