"""Print the lines of the package's functions that no run of pytest with `--executed FILE` has executed.

`python scripts/unexecuted_lines.py FILE attention/decode_launch.py transfer/gpu_engine.py`
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "sgl_kvpool"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def statements(source: str) -> Iterator[int]:
    """First lines of the statements in functions, without docstrings and GPU kernels."""
    for node in _functions(ast.parse(source)):
        for number, statement in enumerate(node.body):
            is_docstring = number == 0 and ast.get_docstring(node) is not None
            if not is_docstring:
                yield from _lines(statement)


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions outside of other functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FUNCTIONS):
            if not any("jit" in ast.unparse(one) for one in child.decorator_list):
                yield child
        else:
            yield from _functions(child)


def _lines(statement: ast.stmt) -> Iterator[int]:
    if not isinstance(statement, ast.Pass | ast.Global | ast.Nonlocal):
        yield statement.lineno
    for child in ast.walk(statement):
        if isinstance(child, ast.stmt) and child is not statement:
            first = getattr(child, "decorator_list", None)
            is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if not (is_text or first or isinstance(child, ast.Pass | ast.Global | ast.Nonlocal)):
                yield child.lineno


def main(arguments: list[str]) -> None:
    executed = json.loads(Path(arguments[0]).read_text())
    for name in arguments[1:] or sorted(executed):
        source = (PACKAGE / name).read_text()
        text = source.splitlines()
        for number in sorted(set(statements(source)) - set(executed.get(name, []))):
            print(f"{name}:{number}: {text[number - 1].strip()}")


if __name__ == "__main__":
    main(sys.argv[1:])
