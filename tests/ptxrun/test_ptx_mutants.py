"""Kernels made wrong on purpose, in the PTX text: the tests that pass with the kernels fail with these.

Each case names a test, what is changed and how the test has to fail: by a fault, by a reported hazard, or by
wrong numbers (AssertionError).
"""

import re
from dataclasses import dataclass

import ptxrun
import pytest
import test_ptx_codec
import test_ptx_decode

from sgl_kvpool.attention.decode_config import tile_config
from sgl_kvpool.layout import MLAKVCacheLayout

quick = pytest.mark.quick


@dataclass
class Change:
    """Change of a PTX text, as by `re.sub`.

    Texts without a kernel of this name stay as they are; a text with several kernels is changed as a whole.
    """

    kernel: str
    pattern: str
    replacement: str = ""
    which: tuple[int, ...] | None = None  # indices of the matches to change; None for all
    matches: int = 0  # their number

    def __call__(self, ptx: str) -> str:
        if not re.search(rf"\.entry \w*{self.kernel}", ptx):
            return ptx
        found = list(re.finditer(self.pattern, ptx))
        assert found, f"{self.pattern} is not in {self.kernel}"
        self.matches = len(found)
        for match in reversed(found if self.which is None else [found[i] for i in self.which]):
            ptx = ptx[: match.start()] + match.expand(self.replacement) + ptx[match.end() :]
        return ptx


@dataclass
class Number:
    """Change that gives a kernel's 32-bit parameter `index`, counted from 0, a constant value."""

    kernel: str
    index: int
    value: int

    def __call__(self, ptx: str) -> str:
        if f".entry {self.kernel}" not in ptx:
            return ptx
        name = re.findall(r"\.param \.[bus]32 (\w+)", ptx)[self.index]
        load = rf"ld\.param\.[bus]32\s+(%r(d?)\d+), \[{name}\];"
        return re.sub(load, lambda m: f"mov.b{64 if m[2] else 32} {m[1]}, {self.value};", ptx)


def instruction(name):
    """Pattern of a whole instruction."""
    return rf"{name}[^;]*;"


def decode(runs, layout, change, **options):
    """`test_every_tile` with the smallest tile of a layout."""
    layout = MLAKVCacheLayout(layout)
    with runs.using(change=change, **options):
        test_ptx_decode.test_every_tile(runs, layout, tile_config(layout, 1, "triton"))


def rows(runs, name, change, **options):
    """`test_rows_there_and_back` of a layout."""
    with runs.using(change=change, **options):
        test_ptx_codec.round_trip(name)


@quick
@pytest.mark.parametrize("layout", ["fp4", "bf16"])
def test_reads_beyond_the_pool_are_reported(runs, layout):
    """The kernel is told the largest possible number of rows."""
    with pytest.raises(ptxrun.PtxError, match="out of all regions"):
        decode(runs, layout, Number("decode_kernel", 0, 2**31 - 1))


#: Layouts, kernel, an instruction that it lacks, and how the test has to fail; the first two are quick.
MISSING = [
    (["fp4", "bf16"], "decode_kernel", r"fence\.proxy\.async", ptxrun.Races, r"without fence\.proxy\.async"),
    (["fp4", "bf16"], "decode_kernel", r"bar\.sync", ptxrun.Races, "race"),
    (["bf16"], "decode_kernel", r"cp\.async\.wait_group", ptxrun.PtxError, r"cp\.async|never written"),
    (["bf16"], "decode_kernel", r"cp\.async\.commit_group", ptxrun.PtxError, r"cp\.async|never written"),
    (["fp4", "bf16"], "decode_kernel", r"wgmma\.wait_group", ptxrun.PtxError, "in flight"),
    (["fp4"], "decode_kernel", r"wgmma\.fence", ptxrun.Races, "without wgmma.fence"),
    (["fp4"], "merge_kernel", r"bar\.sync", ptxrun.PtxError, None),
    (["fp4"], "gather_kernel", r"bar\.sync", ptxrun.Races, "race"),
]


@pytest.mark.parametrize(
    ("layout", "kernel", "name", "error", "message"),
    [
        pytest.param(layout, *missing, marks=[quick] * (number < 2))
        for number, (layouts, *missing) in enumerate(MISSING)
        for layout in layouts
    ],
)
def test_missing_instructions_are_reported(runs, layout, kernel, name, error, message):
    changed = rows if kernel == "gather_kernel" else decode
    options = {"uninit_shared": 0} if message == "race" else {}
    with pytest.raises(error, match=message):
        changed(runs, layout, Change(kernel, instruction(name)), **options)


@quick
def test_a_lost_bit_of_a_code_gives_wrong_results(runs):
    """One of the masks that put e2m1 codes where bfloat16 has its exponent."""
    mask = str(0x01C001C0)
    with pytest.raises(AssertionError):
        decode(runs, "fp4", Change("decode_kernel", rf"\b{mask};", f"{0x018001C0};", (0,)))


@pytest.mark.parametrize("layout", ["fp4", "bf16"])
def test_nine_of_ten_barriers_are_needed(runs, layout):
    """Barriers are removed one at a time, and 90 % of the removals are noticed; the compiler may emit
    redundant ones.
    """
    tile = tile_config(MLAKVCacheLayout(layout), 1, "triton")
    # A list of two parts and one of a single part, whose results are written by different branches.
    case = test_ptx_decode.make_case(layout, heads=tile.query_heads, counts=((150,), (60,)))
    noticed, which, count = 0, 0, 1
    while which < count:
        change = Change("decode_kernel", instruction(r"bar\.sync"), which=(which,))
        try:
            with runs.using(change=change):
                test_ptx_decode.decode(case, 2, tile=tile)
        except ptxrun.PtxError:
            noticed += 1
        which, count = which + 1, change.matches
    assert count > 10
    assert noticed >= 0.9 * count


def test_a_reduction_leaves_lanes_out(runs):
    """Without the butterfly exchanges between lanes, each lane keeps its own part of a reduction."""
    shuffle = r"shfl\.sync\.bfly\.b32\s+(%r\d+), (%r\d+), \d+, 31, -1;"
    with pytest.raises((AssertionError, ptxrun.PtxError)):
        decode(runs, "fp4", Change("decode_kernel", shuffle, r"mov.b32 \1, \2;"))


@pytest.mark.parametrize("name", ["bf16", "fp4"])
def test_rows_beyond_the_pool_are_written(runs, name):
    with pytest.raises(ptxrun.PtxError, match="out of all regions"):
        rows(runs, name, Number("store_kernel", 1, 2**31 - 1))


@pytest.mark.parametrize("name", ["fp8", "fp8_block_scale"])
def test_the_largest_code_is_another(runs, name):
    """Values are clamped to 384 instead of 448, the largest code of e4m3."""
    with pytest.raises(AssertionError, match="Mismatched elements"):
        rows(runs, name, Change("store_kernel", "0f43E00000", "0f43C00000"))


def test_an_encoder_rounds_once_too_often(runs):
    """Multiplication by the rounded reciprocal, which the encoding rules do not allow."""
    division = r"div\.rn\.f32\s+(%r\d+), (%r\d+), (%r\d+);"
    multiplied = r"{.reg .b32 t; rcp.rn.f32 t, \3; mul.rn.f32 \1, \2, t;}"
    with pytest.raises(AssertionError, match="Mismatched elements"):
        rows(runs, "fp8_block_scale", Change("store_kernel", division, multiplied))


def test_a_quotient_halfway_is_rounded_by_chance(runs):
    """Without the step to multiples of 2^-12: the product with a rounded reciprocal decides."""
    with pytest.raises(AssertionError, match="Mismatched elements"):
        rows(runs, "fp4", Change("store_kernel", "0f[4C]5400000", "0f00000000"))
