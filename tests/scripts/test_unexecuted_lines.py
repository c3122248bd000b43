"""`--executed FILE` and scripts/unexecuted_lines.py: lines that ran, and statements that did not."""

import json
import sys

import pytest
from executed_lines import PACKAGE, ExecutedLines

from scripts import unexecuted_lines

SOURCE = '''
import triton

LIMIT = 3

@triton.jit
def kernel(x):
    x = x + 1

class A:
    def f(self, x):
        """Text."""
        if (
            x
        ):
            return 1
        def g():
            pass
            return x
        return g
'''


def test_statements_of_functions_without_kernels_and_docstrings():
    found = {(name, lines[0], lines[-1]) for name, lines in unexecuted_lines.statements(SOURCE)}
    assert found == {("A.f", *lines) for lines in [(13, 15), (16, 16), (17, 17), (19, 19), (20, 20)]}


def test_the_list_of_statements_names_statements_and_reasons():
    """`unexecuted_lines.py FILE` says whether no test executes them."""
    for text, reason in unexecuted_lines.reasons().items():
        module = text.partition(" ")[0]
        assert module in unexecuted_lines.CUDA
        assert text in unexecuted_lines.unexecuted(module, set()).values()
        assert len(reason) > 10, text


@pytest.mark.skipif(sys.gettrace() is not None, reason="another program traces this process")
def test_lines_of_two_runs_add_up(tmp_path, monkeypatch, capsys):
    from sgl_kvpool.codec import checks

    k = type("K", (), {"is_cuda": False})
    file = tmp_path / "executed.json"
    for value in ("0", "1"):
        monkeypatch.setenv("KVPOOL_CHECK_FINITE", value)
        executed = ExecutedLines()
        executed.start()
        try:
            checks.finite(k, None, type("F", (), {"nope": None, "rope": None}), None)
        except AttributeError:
            pass
        finally:
            executed.stop()
        executed.add_to(file)
    first = (PACKAGE / "codec/checks.py").read_text().splitlines()
    lines = [first[number - 1].strip() for number in json.loads(file.read_text())["codec/checks.py"]]
    assert "if not env.flag(env.CHECK_FINITE):" in lines
    assert "return" in lines
    assert any(line.startswith("segments = ") for line in lines)
    unexecuted_lines.main([str(file), "codec/checks.py"])
    printed = capsys.readouterr().out
    assert "return  # a graph capture cannot sync" in printed
    assert "env.flag(env.CHECK_FINITE)" not in printed
