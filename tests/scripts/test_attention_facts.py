"""The committed costs of `mla_decode`'s tiles: complete, on the page, not better than this tree's."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import attention_facts
import loop_costs
from ptxrun_builds import cache_folder

from sgl_kvpool.attention.decode_config import tile_config, tiles_of_both_kernels
from sgl_kvpool.commands.bench.attention.limits import TILE_COSTS, UNITS
from sgl_kvpool.layout import MLAKVCacheLayout

ROOT = Path(__file__).resolve().parents[2]

COSTS = json.loads(TILE_COSTS.read_text())
FIELDS = {
    "layout", "kernel", "heads", "tiles", "registers", "spilled_bytes", "shared_bytes", "programs_per_sm",
    "warp_instructions_per_row", "shared_memory_clk_per_row", "issue_clk_per_row", "integer_clk_per_row",
    "tensor_clk_per_row", "draining_waits_per_block", "limit_g_rows_per_s",
}  # fmt: skip
#: Fields of which more is better; of all others less is. Registers are not compared: their cost shows in
#: programs and spills.
MORE_IS_BETTER = {"programs_per_sm"}
NOT_COMPARED = {"layout", "kernel", "heads", "tiles", "registers", "limit_g_rows_per_s"}
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
        for kernel in ("triton", "gluon")
        if tile_config(layout, heads, kernel).kernel == kernel
    ]
    assert all(found.keys() == FIELDS for found in COSTS)


def test_limits_follow_from_the_counts():
    for found in COSTS:
        row_bytes = MLAKVCacheLayout(found["layout"]).row_format(512, 64).row_bytes
        chip = 132 * 1.7 / max(found[f"{unit}_clk_per_row"] for unit in UNITS)
        assert found["limit_g_rows_per_s"] == {
            "H100": round(min(chip, 3000 / row_bytes), 2),
            "H200": round(min(chip, 4300 / row_bytes), 2),
        }


def test_programs_that_the_table_expects_fit_an_sm():
    of = {(found["layout"], found["kernel"], found["heads"]): found for found in COSTS}
    for layout, tile in tiles_of_both_kernels():
        assert of[layout.value, tile.kernel, tile.query_heads]["programs_per_sm"] >= tile.programs_per_sm


def test_the_page_has_these_counts():
    page = attention_facts.PAGE.read_text()
    assert attention_facts.page_of(COSTS, page) == page
    readme = attention_facts.README.read_text()
    assert attention_facts.readme_of(COSTS, readme) == readme


@pytest.mark.parametrize(
    ("name", "change", "noticed"),
    [
        ("shared_memory_clk_per_row", 0.01, True),
        ("shared_memory_clk_per_row", -1, False),
        ("spilled_bytes", 8, True),
        ("programs_per_sm", -1, True),
        ("draining_waits_per_block", 1, True),
    ],
)
def test_what_is_worse(name, change, noticed):
    assert worse({**COSTS[0], name: COSTS[0][name] + change}, COSTS[0]).keys() == (
        {name} if noticed else set()
    )


#: Layouts and tiles that are counted: some here, all on CI.
ON_CI = os.environ.get("CI", "").lower() not in ("", "0", "false")
LAYOUTS = [layout.value for layout in MLAKVCacheLayout] if ON_CI else ["fp8_block_scale", "fp4"]
HEADS = sorted({tile.query_heads for _, tile in tiles_of_both_kernels()}) if ON_CI else [16]


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Counts of this tree, from one process. Machine code comes from the cache of `test_decode_compiled`."""
    costs = tmp_path_factory.mktemp("facts") / "costs.json"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache_folder() / "triton")
    program = [sys.executable, ROOT / "scripts" / "attention_facts.py", "--json", costs]
    done = subprocess.run(
        [*program, "--layouts", *LAYOUTS, "--heads", *map(str, HEADS)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(costs.read_text())


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which compiles ptxrun")
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_tile_became_worse(counted, layout, heads):
    import triton

    if triton.__version__ != COUNTED_WITH:
        other = f"the counts are of triton {COUNTED_WITH}, this is {triton.__version__}: count again"
        (pytest.fail if ON_CI else pytest.skip)(other)
    committed, found = (
        [one for one in costs if (one["layout"], one["heads"]) == (layout, heads)]
        for costs in (COSTS, counted)
    )
    assert [one["kernel"] for one in found] == [one["kernel"] for one in committed]
    assert not [worse(new, old) for new, old in zip(found, committed, strict=True) if worse(new, old)], (
        "mend it, or commit what attention_facts.py --write counts, and say why"
    )


# The counting, on a few instructions by hand

SASS = """
.L_x_1:
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_2:
        /*0010*/              @!P0 LDG.E R4, desc[UR4][R2.64] ;
        /*0020*/                   STS.128 [R8], R4 ;
        /*0030*/                   LDS.U8 R4, [R8] ;
        /*0040*/                   LDL.64 R4, [R1] ;
        /*0050*/                   LDSM.16.M88.4 R4, [R8] ;
        /*0060*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0070*/                   HGMMA.64x8x16.F32.BF16 R24, R28, gdesc[UR4], R24, gsb0 ;
        /*0080*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0090*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00a0*/                   LOP3.LUT R4, R4, R5, RZ, 0xc0, !PT ;
        /*00b0*/               @P0 BRA `(.L_x_2) ;
        /*00c0*/               @P1 BRA `(.L_x_1) ;
"""


def test_the_innermost_loop_is_counted():
    assert [(loop.label, len(loop.instructions)) for loop in loop_costs.loops(SASS)] == [
        (".L_x_2", 11),
        (".L_x_1", 13),
    ]
    assert loop_costs.main_loop(SASS).label == ".L_x_2"
    with pytest.raises(ValueError, match="no loop with HGMMA"):
        loop_costs.main_loop(SASS.replace("HGMMA", "HMMA"))


def test_costs_by_hand():
    """4 warps, 16 rows: each instruction of the loop is a quarter of a warp instruction per row."""
    found = loop_costs.costs(loop_costs.main_loop(SASS).instructions, rows=16, warps=4)
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
