"""Decode on the CPU costs time for the rows referred to, not for the pool."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_pool_100_times_larger_costs_the_same(tmp_path):
    """Medians of interleaved runs. A cost in proportion to the pool would show as a ratio near 100."""
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "bench_host_attention.py", "--quick", "--json", report],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(report.read_text())["results"]
    assert [row["layout"] for row in results] == ["bf16", "fp8", "fp8_block_scale", "fp4", "fp4_fp8_rope"]
    for row in results:
        assert row["pool_slots"][1] == 100 * row["pool_slots"][0]
        assert row["large_over_small"] < 5, row
