"""The CPU codec has no slow path in it: the benchmark's gates, halved for a machine that is busy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_gathers_reach_half_of_the_gates(tmp_path):
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "bench_codec.py", "--quick", "--json", report],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    gated = [row for row in json.loads(report.read_text())["results"] if row["gate"]]
    assert {row["layout"] for row in gated} == {"fp4", "fp8", "fp8_block_scale"}
    for row in gated:
        assert row["operation"] == "gather"
        assert row["ratio_to_copy"] > row["target"] / 2, row
