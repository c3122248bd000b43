"""The committed costs of `mla_decode`'s tiles: complete, on the page, not better than this tree's."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from ptxrun_builds import cache_folder

from scripts.figures import attention_facts, flashmla_costs, loop_costs
from scripts.figures.attention_facts import TILE_COSTS, UNITS
from sgl_kvpool.attention.decode_config import table, tile_config
from sgl_kvpool.layout import MLAKVCacheLayout

ROOT = Path(__file__).resolve().parents[2]

ALL_COSTS = json.loads(TILE_COSTS.read_text())
COSTS = [found for found in ALL_COSTS if found["kernel"] not in flashmla_costs.NAMES]
FLASHMLA = [found for found in ALL_COSTS if found["kernel"] in flashmla_costs.NAMES]
COMMON = {
    "layout", "kernel", "heads", "tiles", "warp_instructions_per_row", "stall_clk_per_row", "busiest_unit",
    "limit_g_rows_per_s", "expected_g_rows_per_s", *(f"{unit}_clk_per_row" for unit in UNITS),
}  # fmt: skip
FIELDS = COMMON | {
    "registers", "spilled_bytes", "shared_bytes", "programs_per_sm", "draining_waits_per_block",
    "least_load_lead",
}  # fmt: skip
#: Fields of which more is better; of all others less is. Registers are not compared: their cost shows in
#: programs and spills.
MORE_IS_BETTER = {"programs_per_sm", "least_load_lead"}
NOT_COMPARED = {
    "layout", "kernel", "heads", "tiles", "registers", "busiest_unit", "limit_g_rows_per_s",
    "expected_g_rows_per_s",
}  # fmt: skip
#: The release of Triton whose code was counted.
COUNTED_WITH = "3.8.0"


def worse(new, old):
    """Figures of two objects of the JSON that became worse, by name."""
    found = {}
    for name in FIELDS - NOT_COMPARED:
        sign = -1 if name in MORE_IS_BETTER else 1
        if sign * new[name] > sign * old[name]:
            found[name] = (old[name], new[name])
    for device, limit in old["limit_g_rows_per_s"].items():
        if new["limit_g_rows_per_s"][device] < limit:
            found[f"limit of an {device}"] = (limit, new["limit_g_rows_per_s"][device])
    return found


def test_every_layout_and_number_of_heads_is_counted():
    assert [(found["layout"], found["heads"], found["kernel"]) for found in COSTS] == [
        (layout.value, heads, kernel)
        for layout in MLAKVCacheLayout
        for heads in (8, 16, 32, 64, 128)
        for kernel in dict.fromkeys(tile_config(layout, heads, table).kernel for table in ("triton", "gluon"))
    ]
    assert all(found.keys() == FIELDS for found in COSTS)
    assert all(found.keys() == COMMON | {"published_tflops"} for found in FLASHMLA)


def test_the_expectation_is_below_what_flashmla_publishes():
    """Operations of a row and a query head: scores over 576 values and sums over 512."""
    shares = {
        x["kernel"]: (
            x["published_tflops"],
            round(
                x["published_tflops"] * x[f"{x['busiest_unit']}_clk_per_row"] / (128 * 2176e-3 * 132 * 1.7), 2
            ),
        )
        for x in FLASHMLA
        if x["published_tflops"]
    }
    assert shares == {"FlashMLA dense": (660, 0.77), "FlashMLA sparse": (410, 0.59)}
    low, high = attention_facts.EXPECTED_OF_CHIP
    assert low <= 0.59
    assert high <= 0.77


def test_flashmla_in_the_installed_wheel():
    if importlib.metadata.version("sgl-flash-mla") != flashmla_costs.VERSION:
        pytest.skip(f"the kernels of sgl-flash-mla {flashmla_costs.VERSION} are counted")
    assert attention_facts.flashmla(list(MLAKVCacheLayout), list(attention_facts.HEADS)) == FLASHMLA


def test_programs_that_the_table_expects_fit_an_sm():
    of = {(found["layout"], found["kernel"], found["heads"]): found for found in COSTS}
    for layout, tile in table("triton", "gluon"):
        assert of[layout.value, tile.kernel, tile.query_heads]["programs_per_sm"] >= tile.programs_per_sm


def test_wide_loads_rows_half_a_block_before_their_use():
    leads = [found["least_load_lead"] for found in COSTS if found["kernel"] == "gluon_wide"]
    assert len(leads) == 9
    assert min(leads) >= 0.5


def test_the_page_has_these_counts():
    page = attention_facts.PAGE.read_text()
    assert attention_facts.page_of(ALL_COSTS, page) == page


LAYOUTS = [layout.value for layout in MLAKVCacheLayout]
HEADS = sorted({tile.query_heads for _, tile in table("triton", "gluon")})


@pytest.fixture(scope="module")
def counted():
    """Counts of this tree, from one process. Machine code comes from the cache of `test_decode_compiled`."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache_folder() / "triton")
    program = [sys.executable, "-m", "scripts.figures.attention_facts"]
    done = subprocess.run(
        [*program, "--layouts", *LAYOUTS, "--heads", *map(str, HEADS)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [one for one in json.loads(done.stdout) if one["kernel"] not in flashmla_costs.NAMES]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which compiles ptxrun")
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_tile_became_worse(counted, layout, heads):
    import triton

    if triton.__version__ != COUNTED_WITH:
        pytest.fail(f"the counts are of triton {COUNTED_WITH}, this is {triton.__version__}: count again")
    committed, found = (
        [one for one in costs if (one["layout"], one["heads"]) == (layout, heads)]
        for costs in (COSTS, counted)
    )
    assert [one["kernel"] for one in found] == [one["kernel"] for one in committed]
    assert not [worse(new, old) for new, old in zip(found, committed, strict=True) if worse(new, old)], (
        "mend it, or commit what attention_facts.py --write counts, and say why"
    )


# The counting, on a few instructions by hand


def sass(text):
    """A text of `nvdisasm -c -hex`, from labels, and lines of stall clocks and instruction."""
    lines, at = [".text.kernel:"], 0
    for line in text.strip().splitlines():
        if line.endswith(":"):
            lines.append(line)
            continue
        stall, code = line.split(maxsplit=1)
        word = int(stall) << 41
        lines += [f"        /*{at:04x}*/    {code} ;   /* 0x{at:016x} */", f"        /* 0x{word:016x} */"]
        at += 16
    return "\n".join(lines)


SASS = """
.L_x_1:
1 LDG.E.128 R4, desc[UR4][R2.64]
.L_x_2:
2 @!P0 LDG.E R4, desc[UR4][R2.64]
15 STS.128 [R8], R4
1 LDS.U8 R4, [R8]
1 LDL.64 R4, [R1]
1 LDSM.16.M88.4 R4, [R8]
1 HGMMA.64x16x16.F32.BF16 R24, gdesc[UR4], R24
1 HGMMA.64x8x16.F32.BF16 R24, R28, gdesc[UR4], R24, gsb0
1 WARPGROUP.DEPBAR.LE gsb0, 0x1
1 WARPGROUP.DEPBAR.LE gsb0, 0x0
4 LOP3.LUT R4, R4, R5, RZ, 0xc0, !PT
5 @P0 BRA `(.L_x_2)
1 @P1 BRA `(.L_x_1)
"""
#: A loader's role: it waits on an mbarrier, copies 8 KB, sends 16 bytes per lane to another SM, and converts.
LOADER = """
.L_x_3:
9 UTMALDG.4D [UR16], [UR8], desc[UR10]
1 SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R3+URZ], R4
1 @!P1 BRA `(.L_x_5)
.L_x_4:
1 LDG.E R4, desc[UR4][R2.64]
1 STAS.128 [R28.64], R12
2 F2FP.BF16.F32.PACK_AB R4, R4, R5
5 @P0 BRA `(.L_x_3)
1 EXIT
.L_x_5:
1 SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R3+URZ], R4
1 @!P1 BRA `(.L_x_5)
1 BRA `(.L_x_4)
"""


def test_costs_by_hand():
    """4 warps, 16 rows: each instruction of the loop is a quarter of a warp instruction per row."""
    (loop,) = loop_costs.role_loops(sass(SASS))
    found = loop_costs.costs([loop.instructions], rows=16, warps=4, programs=2)
    assert found.warp_instructions == 11 / 4
    assert found.clk["issue"] == 11 / 16
    assert found.clk["integer"] == 1 / 8
    # A store of 16 bytes per lane, a byte that takes a pass, four matrices; a warp group reads 2048 bytes of
    # the first product's A and 512 of its B, and 256 of the second one's B.
    assert found.clk["shared"] == (4 + 1 + 4 + (2048 + 512 + 256) / 4 / 128) / 4
    assert found.clk["spills"] == 2 / 4
    assert found.clk["loads"] == 1 / 4
    assert found.clk["tensor"] == (64 * 16 * 16 + 64 * 8 * 16) / 4 / 2048 / 4
    assert found.draining_waits == 1
    assert found.stall_clk == (2 + 15 + 7 * 1 + 4 + 5) / 16 / 2
    assert loop_costs.least_load_lead(loop.instructions) == 2 / 33


def test_costs_of_roles():
    """The way back from the wait after EXIT is not a role, though it is the largest loop that copies."""
    code = sass(SASS + LOADER.lstrip())
    with pytest.raises(ValueError, match="no loop with HGMMA"):
        loop_costs.role_loops(code.replace("HGMMA", "HMMA"))
    assert [loop.label for loop in loop_costs.loops(code)] == [
        ".L_x_2", ".L_x_1", ".L_x_3", ".L_x_5", ".L_x_4",
    ]  # fmt: skip
    roles = [loop.instructions for loop in loop_costs.role_loops(code)]
    assert [len(role) for role in roles] == [11, 7]
    alone, both = (loop_costs.costs(roles[:n], 16, 4, box_bytes=8192) for n in (1, 2))
    # One thread issues the bulk copy. STAS leaves one SM and arrives in another.
    assert both.clk["shared"] - alone.clk["shared"] == 8192 / 128 / 16 + 2 * 4 / 4
    assert both.clk["loads"] - alone.clk["loads"] == 1 / 4
    assert both.clk["special"] == 2 / 4
    assert both.stall_clk == alone.stall_clk == 33 / 16
    assert loop_costs.least_load_lead(roles[1]) == 2 / 20
    assert loop_costs.least_load_lead(roles[1][:4]) == 10 / 12  # its next use is in the next iteration
    assert loop_costs.least_load_lead(roles[1][:3]) == 1
    with pytest.raises(ValueError, match="UTMALDG"):
        loop_costs.costs(roles, 16, 4)
