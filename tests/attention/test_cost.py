"""Decode on the CPU costs time for the rows referred to, not for the pool."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_kvpool.layout import MLAKVCacheLayout

ROOT = Path(__file__).resolve().parents[2]


#: Other work on the machine raises a ratio for as long as it lasts; a cost in proportion to the pool shows in
#: every run.
RUNS = 3


def ratios(report):
    """Time with the large pool over that with the small one, medians of interleaved runs, by layout."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench", "host_attention", "--quick", "--json", report],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(report.read_text())["results"]
    return {row["job"]["layout"]: row["large_over_small"] for row in results}


def test_a_pool_100_times_larger_costs_the_same(tmp_path):
    """A cost in proportion to the pool would show as a ratio near 100."""
    seen = []
    for _ in range(RUNS):
        seen.append(ratios(tmp_path / "report.json"))
        assert list(seen[-1]) == [layout.value for layout in MLAKVCacheLayout]
        if all(min(found[layout] for found in seen) < 5 for layout in seen[-1]):
            return
    pytest.fail(f"times with the large pool over those with the small one in {RUNS} runs: {seen}")
