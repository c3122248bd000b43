"""The CPU codec has no slow path in it: the benchmark's gates, halved for a machine that is busy."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Other work on the machine only lowers a ratio, for as long as it lasts: seen in CI, 0.025 where an idle
#: machine has 0.075. A slow path is slow in every run.
RUNS, PAUSE_S = 5, 15


def gathers(report):
    """Ratio to copy and least ratio of every gather that has a gate, by layout, from one run."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "bench_codec.py", "--quick", "--json", report],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    gated = [row for row in json.loads(report.read_text())["results"] if row["gate"]]
    assert {row["operation"] for row in gated} == {"gather"}
    return {row["layout"]: (row["ratio_to_copy"], row["target"] / 2) for row in gated}


@pytest.mark.slow
def test_gathers_reach_half_of_the_gates(tmp_path):
    seen = []
    for run in range(RUNS):
        if run:
            time.sleep(PAUSE_S)
        seen.append(gathers(tmp_path / "report.json"))
        assert set(seen[-1]) == {"fp4", "fp4_fp8_rope", "fp8", "fp8_block_scale"}
        best = {layout: max(found[layout][0] for found in seen) for layout in seen[-1]}
        if all(best[layout] > least for layout, (_, least) in seen[-1].items()):
            return
    pytest.fail(f"ratios to a copy and their least values in {RUNS} runs: {seen}")
