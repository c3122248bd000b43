"""What the compiled kernels look like, read from code for sm_90a: needs no GPU.

The interpreter shows neither fused multiply-adds nor approximate division nor access widths; machine code
does. Only what the design promises is checked here, not registers or code size.
"""

import json
import os
import subprocess
import sys

import pytest
from codec_oracle import LAYOUTS, STORED

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

JOBS = [
    {"layout": layout, "which": which, "rank": 512, "rope": 64}
    for layout in LAYOUTS
    for which in ("store", "gather")
]
OTHERS = [
    {"layout": "fp4", "which": "store", "rank": 384, "rope": 0, "slots": "*i32", "aligned": False},
    {"layout": "fp4", "which": "gather", "rank": 384, "rope": 64, "dtype": "fp32"},
    {"layout": "fp8_block_scale", "which": "store", "rank": 256, "rope": 0, "aligned": False},
    {"layout": "fp8_block_scale", "which": "gather", "rank": 128, "rope": 64, "slots": None},
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Facts by job, from one process without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    program = os.path.join(os.path.dirname(__file__), "compile_kernels.py")
    command = [sys.executable, program, json.dumps(JOBS + OTHERS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(map(str, JOBS + OTHERS), json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("job", JOBS + OTHERS, ids=lambda job: "-".join(map(str, job.values())))
def test_no_spills_and_exact_arithmetic(compiled, job):
    found = compiled[str(job)]
    assert found["target"] == "sm_90a"
    assert found["stack_bytes"] == found["local_bytes"] == found["local_accesses"] == 0
    assert found["fma"] == found["flush_to_zero"] == found["approximate"] == 0
    encodes = job["which"] == "store" and job["layout"] != "bf16"
    assert (found["exact_divisions"] > 0) == encodes
    to_e4m3 = any(numbers.startswith("e4m3") for numbers in STORED[job["layout"]])
    assert (found["to_e4m3"] > 0) == (encodes and to_e4m3)
    bf16_out = job["which"] == "gather" and job.get("dtype", "bf16") == "bf16"
    assert (found["to_bf16"] > 0) == (bf16_out and job["layout"] != "bf16")


@pytest.mark.parametrize("job", JOBS, ids=lambda job: "-".join(map(str, job.values())))
def test_wide_accesses(compiled, job):
    found = compiled[str(job)]
    assert found["loads_16_bytes"] > 0
    # A thread stores the codes of the values of one load; 16 bytes of bf16 become 8 bytes of e4m3.
    to_e4m3 = job["which"] == "store" and STORED[job["layout"]][0].startswith("e4m3")
    assert found["stores_8_bytes" if to_e4m3 else "stores_16_bytes"] > 0
    if job["which"] == "gather":
        assert found["stores_16_bytes"] == found["stores"]
