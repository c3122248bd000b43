"""Print the statements of the package's functions that no run of pytest with `--executed FILE` has executed.

`python scripts/unexecuted_lines.py FILE transfer/gpu_engine.py` prints those of modules. Without modules it
compares those of `CUDA` with the reasons in tests/emulated_cuda/unexecuted.txt, and fails if they differ.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sgl_kvpool"
#: Lines `MODULE FUNCTION: STATEMENT`, below the reason why no test executes them, which begins with `#`.
REASONS = ROOT / "tests" / "emulated_cuda" / "unexecuted.txt"
#: Modules of which a server executes other lines on CUDA than on a CPU.
CUDA = (
    *("attention/decode.py", "attention/decode_checks.py", "attention/decode_launch.py"),
    *("codec/__init__.py", "codec/checks.py", "codec/triton.py"),
    *(
        f"srt/attention/{name}.py"
        for name in ("cuda", "decode_verify", "draft", "extend", "prefill", "sparse")
    ),
    *("srt/host/memory.py", "srt/self_check/attention.py", "transfer/gpu_engine.py"),
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DECLARATIONS = (ast.Pass, ast.Global, ast.Nonlocal)


def statements(source: str) -> Iterator[tuple[str, range]]:
    """Function and lines of the statements in functions, without docstrings and GPU kernels.

    Lines of a block are those of its head.
    """
    for function, node in _functions(ast.parse(source)):
        for child in ast.walk(node):
            is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.stmt) and child is not node and not is_text:
                body = getattr(child, "body", None)
                last = body[0].lineno - 1 if body else child.end_lineno or child.lineno
                decorated = getattr(child, "decorator_list", None)
                if not decorated and not isinstance(child, _DECLARATIONS):
                    yield function, range(child.lineno, max(last, child.lineno) + 1)


def _functions(node: ast.AST, within: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions outside of other functions, by their qualified names."""
    for child in ast.iter_child_nodes(node):
        name = within + getattr(child, "name", "")
        if not isinstance(child, _FUNCTIONS):
            yield from _functions(child, f"{name}." if isinstance(child, ast.ClassDef) else within)
        elif not any("jit" in ast.unparse(one) for one in child.decorator_list):
            yield name, child


def unexecuted(module: str, executed: set[int]) -> dict[int, str]:
    """Statements of a module that did not run, by line, as `MODULE FUNCTION: STATEMENT`."""
    source = (PACKAGE / module).read_text()
    text = source.splitlines()
    return {
        lines[0]: f"{module} {function}: {text[lines[0] - 1].strip()}"
        for function, lines in statements(source)
        if executed.isdisjoint(lines)
    }


def reasons() -> dict[str, str]:
    """Reason of each statement in the committed list."""
    found, reason = {}, ""
    for line in filter(None, REASONS.read_text().splitlines()):
        if line.startswith("#"):
            reason = line
        else:
            found[line] = reason
    return found


def main(arguments: list[str]) -> int:
    executed = json.loads(Path(arguments[0]).read_text())
    modules = arguments[1:]
    found = {
        (module, line): text
        for module in modules or CUDA
        for line, text in sorted(unexecuted(module, set(executed.get(module, []))).items())
    }
    known = {} if modules else reasons()
    for (module, line), text in found.items():
        if text not in known:
            print(f"{module}:{line}: {text.partition(': ')[2]}")
    gone = [] if modules else sorted(known.keys() - set(found.values()))
    for text in gone:
        print(f"{text}: was executed; remove it from {REASONS.name}")
    return int(bool(gone or (not modules and set(found.values()) - known.keys())))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
