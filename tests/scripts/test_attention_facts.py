"""The committed costs of `mla_decode`'s tiles: complete, on the page, not better than this tree's."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from ptxrun_builds import cache_folder

from scripts.figures import attention_facts, flashmla_costs
from scripts.figures.attention_facts import TILE_COSTS, UNITS
from sgl_kvpool.attention.decode_config import table, tile_config
from sgl_kvpool.layout import MLAKVCacheLayout

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
    signs = {name: -1 if name in MORE_IS_BETTER else 1 for name in FIELDS - NOT_COMPARED}
    found = {name: (old[name], new[name]) for name, n in signs.items() if n * new[name] > n * old[name]}
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
    shares = {}
    for found in FLASHMLA:
        if tflops := found["published_tflops"]:
            clk_per_row = found[f"{found['busiest_unit']}_clk_per_row"]
            share = tflops * clk_per_row / (128 * 2176e-3 * 132 * 1.7)
            shares[found["kernel"]] = (tflops, round(share, 2))
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
    words = [*program, "--layouts", *LAYOUTS, "--heads", *map(str, HEADS)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [one for one in json.loads(done.stdout) if one["kernel"] not in flashmla_costs.NAMES]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which compiles ptxrun")
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_tile_became_worse(counted, layout, heads):
    import triton

    if triton.__version__ != COUNTED_WITH:
        pytest.fail(f"the counts are of triton {COUNTED_WITH}, this is {triton.__version__}: count again")
    of_tile = [
        [x for x in costs if (x["layout"], x["heads"]) == (layout, heads)] for costs in (counted, COSTS)
    ]
    pairs = list(zip(*of_tile, strict=True))
    assert all(new["kernel"] == old["kernel"] for new, old in pairs)
    found = [worse(new, old) for new, old in pairs if worse(new, old)]
    assert not found, "mend it, or commit what attention_facts.py --write counts, and say why"
