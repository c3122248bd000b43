"""The code of docs/connectors.md runs and prints what the page says."""

import subprocess
import sys
from pathlib import Path

import pytest
from fences import blocks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "connectors.md"


@pytest.mark.slow
def test_the_code_of_the_page_runs():
    pytest.importorskip("sglang")
    (code,) = (text for kind, text in blocks(PAGE.read_text()) if kind == "python")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = done.stdout.splitlines()
    assert first == "kv 9 19968 1"
    for text in ("run_bytes=416", "run_count=16", "run_stride_bytes=1248", "torch.Size([9, 16, 416])"):
        assert text in second
