"""Kernels with warp roles, and kernels beside them on an SM, by their code for sm_90a: needs no GPU.

The order of their barriers: tests/ptxrun/test_ptx_gluon.py.
"""

import re

import pytest

pytest.importorskip("triton")

from test_cuda_sources import CSRC
from test_cuda_sources import compiled as engines  # noqa: F401  # a fixture
from test_decode_compiled import GLUON, GLUON_OTHERS, TABLE, compile_jobs, is_wide

from sgl_kvpool.attention.decode_config import tile_config
from sgl_kvpool.layout import MLAKVCacheLayout

pytestmark = pytest.mark.slow

WIDE = [job for job in GLUON + GLUON_OTHERS if is_wide(job)]
#: Registers of an SM, and its shared memory, of which each program takes 1 KB beside its own.
SM_REGISTERS, SM_SHARED_BYTES = 65536, 233472


@pytest.fixture(scope="module")
def compiled():
    return compile_jobs(TABLE + GLUON + GLUON_OTHERS)


@pytest.mark.parametrize("job", WIDE, ids=str)
def test_registers_of_roles(compiled, job):
    """No role names a register beyond its share, and the shares are at most what a launch allocates."""
    found = compiled[str(job)]
    shares = found["role_registers"]
    assert all(highest < share for share, highest in shares)
    (scores,) = {share for share, _ in shares} - {256, 160, 144, 128, 120}
    decoder = min({share for share, _ in shares} - {120})
    assert scores + 160 + decoder <= 3 * found["registers"] == 504
    assert 256 + 2 * 120 <= 504  # before the roles begin


#: Programs of a decode on an SM, blocks of the copy kernel that fit beside them, and programs that a block of
#: the copy and of the largest conversion displaces: a second round of the decode.
BESIDE = {"bf16": (1, 1, 0, 1), "two programs": (2, 0, 1, 2), "one program": (1, 0, 1, 1)}


def registers_of(threads, registers):
    """What a block takes: a warp gets registers in units of 256."""
    return threads // 32 * (-(-registers // 8) * 256)


def test_what_transfers_take_from_a_decode_that_fills_the_sms(compiled, engines):  # noqa: F811
    output = re.findall(r"entry function '(\w+)'.*?Used (\d+) registers", engines[0], flags=re.S)
    threads = dict(re.findall(r"int k(\w+)Threads = (\d+)", (CSRC / "cuda_steps.cuh").read_text()))
    copy, conversion = (
        max(registers_of(int(threads[kind]), int(count)) for name, count in output if kind.lower() in name)
        for kind in ("Copy", "Convert")
    )
    for job in TABLE + GLUON:
        facts = compiled[str(job)]
        one = registers_of(facts["threads"], facts["registers"])
        programs = min(SM_REGISTERS // one, SM_SHARED_BYTES // (facts["shared_bytes"] + 1024))
        left = SM_REGISTERS - programs * one
        displaced = [max(0, -(-(block - left) // one)) for block in (copy, conversion)]
        kind = "bf16" if job["layout"] == "bf16" else {1: "one program", 2: "two programs"}[programs]
        assert (programs, left // copy, *displaced) == BESIDE[kind], job
        tile = tile_config(MLAKVCacheLayout(job["layout"]), job["heads"], job.get("kernel", "triton"))
        assert programs == tile.programs_per_sm
