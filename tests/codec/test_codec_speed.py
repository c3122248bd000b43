"""The CPU codec has no slow path in it: the benchmark's gates, halved for a machine that is busy."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from codec_oracle import NARROW, STORED

ROOT = Path(__file__).resolve().parents[2]
#: Other work on the machine lowers a ratio while it lasts (CI has shown 0.025, an idle machine 0.075). A slow
#: path is slow in every run.
RUNS, PAUSE_S = 10, 15


def gated(report):
    """Ratio to a copy and required ratio, by operation and layout, of one run, where there is a gate."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench", "codec", "--quick", "--json", report],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    rows = [row for row in json.loads(report.read_text())["results"] if "target" in row]
    return {
        (row["job"]["operation"], row["job"]["layout"]): (row["ratio_to_copy"], row["target"] / 2)
        for row in rows
    }


@pytest.mark.slow
def test_half_of_the_gates_is_reached(tmp_path):
    seen = []
    for run in range(RUNS):
        if run:
            time.sleep(PAUSE_S)
        seen.append(gated(tmp_path / "report.json"))
        assert set(seen[-1]) == {
            *(("gather", layout) for layout in NARROW),
            *(("encode", layout) for layout in NARROW if STORED[layout][0] == "e2m1"),
        }
        best = {what: max(found[what][0] for found in seen) for what in seen[-1]}
        if all(best[what] > least for what, (_, least) in seen[-1].items()):
            return
    pytest.fail(f"ratios to a copy and their least values in {RUNS} runs: {seen}")
