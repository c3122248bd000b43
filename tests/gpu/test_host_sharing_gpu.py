"""Two ranks that share a host tier on one GPU: each registers the mapping, stores half, and loads all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).resolve().parent / "sharing_ranks_gpu.py"
RANKS = 2


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharing")
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    commands = [[sys.executable, SCRIPT, str(rank), folder, "cuda"] for rank in range(RANKS)]
    processes = [subprocess.Popen(command, env=environment) for command in commands]
    try:
        assert [process.wait(timeout=600) for process in processes] == [0] * RANKS
    finally:
        for process in processes:
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_both_find_what_either_has_stored(seen):
    one, other = seen
    assert one == other
    for pair, found in one.items():
        assert found["same"] == pair.endswith("-same"), pair
        assert not found["empty"]


def test_a_second_trip_changes_nothing_where_the_device_holds_the_hosts_values(seen):
    """`fp8` cannot hold every value of an FP4 latent (docs/rows.md)."""
    for pair, found in seen[0].items():
        assert found["stable"] or pair.startswith("fp8-fp4"), pair
