"""What the compiled kernels of `mla_decode` look like, read from code for sm_90a: needs no GPU.

Every tile of both tables, for the geometry of DeepSeek's models, a few other shapes, and the merge kernel.
Their instructions are counted and compared by tests/scripts/test_attention_facts.py.
"""

import json
import os
import shutil
import sys

import pytest

pytest.importorskip("triton")

from live_processes import ran
from ptxrun_builds import cache_folder

from scripts import ROOT
from sgl_kvpool.attention.decode_config import table

# Compiles the kernels of every tile for sm_90a: 15 minutes beside servers of other tests.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TABLE = [{"layout": layout.value, "heads": tile.query_heads} for layout, tile in table("triton")]
#: Tiles of `gluon_decode` and of `gluon_wide`; below, the variants that a batch may need.
GLUON = [
    {"layout": layout.value, "heads": tile.query_heads, "kernel": "gluon"}
    for layout, tile in table("gluon")
    if tile.kernel != "triton"
]
GLUON_OTHERS = [
    {"layout": layout, "heads": heads, "queries": 2, **more, "kernel": "gluon"}
    for heads in (8, 64)
    for layout, more in (
        ("fp4", {"ids": "*i64", "page": [64, 3904]}),
        ("fp8_block_scale", {"ids": "*i64", "page": [64, 3904]}),
        ("fp8_block_scale", {"splits": 1}),
    )
]
OTHERS = [
    # MTP verify with three queries, page-major slots, int64 ids
    {"layout": "fp4", "heads": 8, "queries": 3, "ids": "*i64", "page": [64, 3904]},
    {"layout": "fp8_block_scale", "heads": 8, "queries": 2, "splits": 1},
    {"layout": "fp8", "heads": 16, "rank": 128, "rope": 0},
]
#: The merge kernel is compiled because the interpreter has accepted code of it that the compiler rejects.
MERGES = [
    {"merge": True, "layout": "fp4", "heads": 16},
    {"merge": True, "layout": "bf16", "heads": 5, "queries": 3, "rank": 128, "out": "*fp16"},
]
#: An older Triton with which the Gluon kernel has to compile: Gluon's interface is experimental.
OLDER = "3.6.0"
ON_CI = os.environ.get("CI", "").lower() not in ("", "0", "false")
#: Largest shared memory of a program on sm_90.
SHARED_BYTES = 227 * 1024


def is_wide(job):
    return job.get("kernel") == "gluon" and job["heads"] * job.get("queries", 1) > 32


def may_spill(job):
    """Bytes that the compiler may spill per thread; `test_attention_facts.py` has the limits of each tile."""
    return 352 if is_wide(job) else 192


def compile_jobs(jobs, *first):
    """Facts by job, from one process without the interpreter, which imports modules from `first` first."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache_folder() / "triton")
    environment["PYTHONPATH"] = os.pathsep.join([*first, str(ROOT), environment.get("PYTHONPATH", "")])
    program = ROOT / "tests" / "attention" / "compile_decode.py"
    done = ran(sys.executable, program, json.dumps(jobs), env=environment, timeout=None)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(map(str, jobs), json.loads(done.stdout), strict=True))


@pytest.fixture(scope="module")
def compiled():
    return compile_jobs(TABLE + GLUON + OTHERS + GLUON_OTHERS + MERGES)


@pytest.fixture(scope="module")
def compiled_by_older_triton():
    """By the Triton of SGLang's images for GPUs, which is downloaded once per checkout."""
    folder = cache_folder() / f"triton-{OLDER}"
    if not (folder / "triton").is_dir():
        uv = shutil.which("uv", path=os.path.dirname(sys.executable)) or shutil.which("uv")
        if uv is None:
            pytest.skip("needs uv, which `make venv` installs, to download another Triton")
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        command = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--no-deps"]
        done = ran(*command, "--target", partial, f"triton=={OLDER}", timeout=None)
        if done.returncode:
            pytest.skip(f"triton {OLDER} cannot be downloaded: {done.stderr.strip()[-200:]}")
        partial.rename(folder)
    return compile_jobs(GLUON + GLUON_OTHERS, str(folder))


@pytest.mark.parametrize(
    "job", TABLE + GLUON + OTHERS + GLUON_OTHERS, ids=lambda job: "-".join(map(str, job.values()))
)
def test_registers_and_memory(compiled, job):
    found = compiled[str(job)]
    assert found["target"] == "sm_90a"
    assert found["shared_bytes"] <= SHARED_BYTES
    assert found["stack_bytes"] <= may_spill(job)
    assert found["wgmma"] > 0
    assert found["mma_sync"] == 0


@pytest.mark.parametrize("job", MERGES, ids=lambda job: "-".join(map(str, job.values())))
def test_the_merge(compiled, job):
    found = compiled[str(job)]
    assert found["target"] == "sm_90a"
    assert found["stack_bytes"] == 0
    assert found["registers"] <= 128


@pytest.mark.skipif(not ON_CI, reason="downloads 190 MB: CI=true")
@pytest.mark.parametrize("job", GLUON + GLUON_OTHERS, ids=lambda job: "-".join(map(str, job.values())))
def test_gluon_by_an_older_triton(compiled, compiled_by_older_triton, job):
    """The same number of wgmma instructions; spills and shared memory within the same limits."""
    found, usual = compiled_by_older_triton[str(job)], compiled[str(job)]
    assert found["target"] == "sm_90a"
    assert found["wgmma"] == usual["wgmma"]
    assert found["mma_sync"] == 0
    assert found["stack_bytes"] <= may_spill(job)
    assert found["shared_bytes"] <= SHARED_BYTES
