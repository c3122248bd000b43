"""What the compiled `decode_kernel` looks like, read from code for sm_90a: needs no GPU.

Every configuration of the table, for the geometry of DeepSeek's models, and a few other shapes.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from sgl_kvpool.attention.decode_config import table

TABLE = [{"layout": layout.value, "pairs": tile.pairs, "heads": tile.pairs} for layout, tile in table()]
OTHERS = [
    # MTP verify with three queries, page-major slots, int64 ids
    {"layout": "fp4", "pairs": 32, "heads": 8, "queries": 3, "ids": "*i64", "page": [64, 3904]},
    {"layout": "fp8_block_scale", "pairs": 16, "heads": 8, "queries": 2, "splits": 1},
    {"layout": "fp8", "pairs": 16, "heads": 16, "rank": 128, "rope": 0},
]
#: What the interpreter lets pass and the compiler does not has happened here before.
MERGES = [
    {"merge": True, "layout": "fp4", "heads": 16},
    {"merge": True, "layout": "bf16", "heads": 5, "queries": 3, "rank": 128, "out": "*fp16"},
]
#: Largest shared memory of a program on sm_90.
SHARED_BYTES = 227 * 1024
#: Tiles for which the compiler may spill a little, in bytes per thread.
SPILLS = {("bf16", 64): 128, ("fp8_block_scale", 32): 128}


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
    assert found["stack_bytes"] <= SPILLS.get((job["layout"], job["pairs"]), 0)
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
    found = compiled[str(job)]
    if job["layout"] == "bf16":
        # 64 rows of 72 pieces of 16 bytes, 256 threads, written twice: before the loop and in it
        assert found["copies_16_bytes"] == 2 * 64 * 72 // 256
    else:
        rows = {"fp8": 576, "fp8_block_scale": 640, "fp4": 384, "fp4_fp8_rope": 320}  # without scales
        row = rows[job["layout"]]
        assert found["loads_16_bytes"] >= 2 * 64 * row // 16 // 256
    # From registers, a first operand would come by ldmatrix from a second copy.
    assert found["ldmatrix"] == 0


@pytest.mark.parametrize("job", TABLE, ids=lambda job: "-".join(map(str, job.values())))
def test_two_values_at_a_time(compiled, job):
    """One packed product per pair of decoded values, before the loop and in it; none for `bf16`."""
    values = {"bf16": 0, "fp8": 576, "fp8_block_scale": 512, "fp4": 512, "fp4_fp8_rope": 576}
    assert compiled[str(job)]["packed_products"] == 2 * 64 * values[job["layout"]] // 2 // 256
