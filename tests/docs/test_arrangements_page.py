"""The code of docs/arrangements.md runs, one block after the other, and prints what the page says."""

import subprocess
import sys
from pathlib import Path

import pytest
from fences import blocks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "arrangements.md"


@pytest.mark.slow
def test_the_code_of_the_page_runs():
    pytest.importorskip("sglang")
    code = [text for kind, text in blocks(PAGE.read_text()) if kind == "python"]
    assert len(code) == 2
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("kv 9 19968 ")
    assert lines[-3:] == [
        "(4, 3, 3, 64) ((0, 2),)",
        "True",
        "[('full', 2), ('sliding', 3), ('state', 4)]",
    ]
