"""`scripts/bench_arrangements.py`: the refusal of a device that is not there."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_arrangements.py"


def test_cuda_without_a_gpu_is_refused_before_a_file_is_made(tmp_path):
    results = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--device", "cuda", "--json", results],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert done.stderr.endswith("error: --device cuda: torch sees no GPU\n")
    assert not results.exists()
