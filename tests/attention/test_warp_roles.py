"""Kernels with warp roles, and kernels beside them on an SM, by their code for sm_90a: needs no GPU."""

import itertools
import re

import pytest

pytest.importorskip("triton")

import warp_roles
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


def drawn(blocks):
    """What `gluon_wide` is to do: its roles, block by block."""
    found = {"scores": [], "values": ["load"], "decoder": ["load", "store"]}
    for block in range(blocks):
        at, odd, turn = block & 1, block & 1, block >> 1 & 1
        found["scores"] += [
            *(("wait", f"full{at}", turn), "product", "products done", "load", ("wait", "p_empty", odd ^ 1)),
            *("store", "proxy fence", "barrier", ("arrive", "p_full"), "product", "products done", "barrier"),
            ("arrive", f"empty{at}"),
        ]
        found["values"] += [
            *(("wait", "p_full", odd), "load", "product", "products done", "barrier", ("arrive", "p_empty")),
            *("barrier", ("arrive", f"empty{at}")),
        ]
        found["decoder"] += [
            *(("wait", f"empty{at}", turn ^ 1), "barrier", "store", "proxy fence", "barrier"),
            ("arrive", f"full{at}"),
        ]
    found["scores"] += [("wait", "p_empty", blocks & 1 ^ 1), "store", "barrier", ("arrive", "p_full")]
    found["values"] += [("wait", "p_full", blocks & 1), "load"]
    return found


@pytest.mark.parametrize("job", WIDE, ids=str)
def test_the_order_of_barriers_and_data(compiled, job):
    for blocks in (1, 2, 5):
        assert warp_roles.events_of(compiled[str(job)]["ptx"], blocks) == drawn(blocks)


@pytest.mark.parametrize("job", WIDE[:2], ids=str)
def test_no_interleaving_of_the_roles_goes_wrong(compiled, job):
    for blocks in range(1, 10):
        events = warp_roles.events_of(compiled[str(job)]["ptx"], blocks)
        assert warp_roles.fault_of(warp_roles.programs_of(events, blocks)) is None


def test_the_model_notices_what_is_left_out():
    """Seven removals do no harm: first waits for empty buffers, and arrivals behind which no role waits."""
    programs, unnoticed, count = warp_roles.programs_of(drawn(6), 6), [], 0
    for role, program in enumerate(programs):
        for at, step in enumerate(program):
            if step[0] in ("wait", "arrive"):
                less = [p[:at] + p[at + 1 :] if i == role else p for i, p in enumerate(programs)]
                count += 1
                unnoticed += [] if warp_roles.fault_of(less) else [step]
    assert (len(unnoticed), count) == (7, 57)


#: A wait or an arrival in PTX.
OPERATION = re.compile(
    r"mbarrier\.try_wait[^;]*;\s*@!complete bra\.uni waitLoop;|@%p\d+ mbarrier\.arrive[^;]*;"
)


@pytest.mark.parametrize("job", WIDE[:2], ids=str)
def test_two_operations_that_change_places_are_noticed(compiled, job):
    ptx = compiled[str(job)]["ptx"]
    found = list(OPERATION.finditer(ptx))
    assert len(found) == 12
    for one, other in itertools.pairwise(found):
        between = ptx[one.end() : other.start()]
        if "setmaxnreg" not in between:  # of one role
            text = ptx[: one.start()] + other[0] + between + one[0] + ptx[other.end() :]
            assert warp_roles.events_of(text, 2) != drawn(2)


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
