"""What the compiled `decode_kernel` looks like, read from code for sm_90a: needs no GPU.

Every configuration of the table, for the geometry of DeepSeek's models, and a few other shapes.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from sgl_kvpool.attention.decode_config import table, tile_config
from sgl_kvpool.layout import MLAKVCacheLayout

TABLE = [{"layout": layout.value, "heads": tile.pairs} for layout, tile in table()]
OTHERS = [
    # MTP verify with three queries, page-major slots, int64 ids
    {"layout": "fp4", "heads": 8, "queries": 3, "ids": "*i64", "page": [64, 3904]},
    {"layout": "fp8_block_scale", "heads": 8, "queries": 2, "splits": 1},
    {"layout": "fp8", "heads": 16, "rank": 128, "rope": 0},
]
#: What the interpreter lets pass and the compiler does not has happened here before.
MERGES = [
    {"merge": True, "layout": "fp4", "heads": 16},
    {"merge": True, "layout": "bf16", "heads": 5, "queries": 3, "rank": 128, "out": "*fp16"},
]
#: Largest shared memory of a program on sm_90.
SHARED_BYTES = 227 * 1024
#: What the compiler may spill per thread; `test_attention_facts.py` has the limits of each tile.
SPILLED_BYTES = 160


def tile_of(job):
    return tile_config(MLAKVCacheLayout(job["layout"]), job["heads"] * job.get("queries", 1))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Facts by job, from one process without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    program = os.path.join(os.path.dirname(__file__), "compile_decode.py")
    command = [sys.executable, program, json.dumps(TABLE + OTHERS + MERGES)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(map(str, TABLE + OTHERS + MERGES), json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("job", TABLE + OTHERS, ids=lambda job: "-".join(map(str, job.values())))
def test_registers_and_memory(compiled, job):
    found = compiled[str(job)]
    assert found["target"] == "sm_90a"
    assert found["shared_bytes"] <= SHARED_BYTES
    assert found["stack_bytes"] <= SPILLED_BYTES
    assert found["wgmma"] > 0
    assert found["mma_sync"] == 0


@pytest.mark.parametrize("job", MERGES, ids=lambda job: "-".join(map(str, job.values())))
def test_the_merge(compiled, job):
    found = compiled[str(job)]
    assert found["target"] == "sm_90a"
    assert found["stack_bytes"] == 0
    assert found["registers"] <= 128


@pytest.mark.parametrize("job", TABLE, ids=lambda job: "-".join(map(str, job.values())))
def test_payload_in_16_byte_accesses(compiled, job):
    """Rows of `bf16` go to shared memory by themselves, the others through registers, and only once."""
    found, tile = compiled[str(job)], tile_of(job)
    rows_per_thread = tile.block_rows / (32 * tile.warps)  # written twice: before the loop and in it
    if job["layout"] == "bf16":
        assert found["copies_16_bytes"] == 2 * rows_per_thread * 1152 // 16
    else:
        row = {"fp8": 576, "fp8_block_scale": 640, "fp4": 384}[job["layout"]]  # without scales
        assert found["loads_16_bytes"] >= 2 * rows_per_thread * row // 16
    # From registers, a first operand would come by ldmatrix from a second copy, 4 matrices at a time.
    assert found["ldmatrix_4"] == (
        4 if job["layout"] == "fp4" else 0
    )  # its scales, before the loop and in it


@pytest.mark.parametrize("job", TABLE, ids=lambda job: "-".join(map(str, job.values())))
def test_two_values_at_a_time(compiled, job):
    """One packed product per pair of decoded values, before the loop and in it; none for `bf16`."""
    values = {"bf16": 0, "fp8": 576, "fp8_block_scale": 512, "fp4": 512}[job["layout"]]
    tile = tile_of(job)
    assert compiled[str(job)]["packed_products"] == 2 * tile.block_rows * values // 2 // (32 * tile.warps)
