"""Gluon's decode kernels as compiled for sm_90a, on ptxrun: cases of theirs alone, and changes to their PTX.

`test_ptx_decode` and `test_ptx_tiles` have the cases that they share with Triton's kernel.
"""

from functools import partial

import ptxrun
import pytest
import test_ptx_decode
import torch
from decode_cases import WEIGHT_ROUNDING, as_read, check_parts, expected, make_case
from decode_kernels import run
from test_ptx_decode import KERNELS, OF_GLUON, ROWS_ALONE, tile_of, with_strangers
from test_ptx_mutants import Change, Number, instruction

of_layouts = pytest.mark.parametrize(("layout", "kernel"), [of[:2] for of in OF_GLUON])
of_rows = pytest.mark.parametrize(("layout", "kernel"), [of[:2] for of in OF_GLUON if of in ROWS_ALONE])
quick = pytest.mark.quick


def decode(case, kernel, splits=1):
    return test_ptx_decode.decode(case, splits, tile=tile_of(kernel, case))


@pytest.mark.parametrize("page_size", [1, 2, 61, 64])
@of_rows
def test_page_sizes(runs, layout, kernel, page_size):
    """Page-major pools; entries beyond the pool."""
    case = make_case(layout, arrangement="page_major", page_size=page_size, heads=8, counts=((150,), (3,)))
    decode(with_strangers(case), kernel, 2)


@pytest.mark.parametrize("padding", [16, 48])
@of_rows
def test_row_strides(runs, layout, kernel, padding):
    """Any multiple of 16 bytes."""
    case = make_case(layout, heads=8, counts=((70,),))
    wide = torch.full((len(case.pool), case.pool.stride(0) + padding), 0x7F, dtype=torch.uint8)
    pool = wide[:, : case.fmt.row_bytes]
    pool.copy_(case.pool)
    decode(case.but(pool=pool), kernel)


@pytest.mark.parametrize("queries", [2, 4])
@of_layouts
def test_several_queries_of_a_list(runs, layout, kernel, queries):
    """Drafts: each query sees one row more; no query sees the second list, one sees a row of the third."""
    counts = tuple(range(126, 126 + queries)), (0,) * queries, (1,) + (0,) * (queries - 1)
    decode(make_case(layout, heads=8, counts=counts), kernel, 2)


@of_layouts
def test_a_list_of_one_part_is_not_merged(runs, layout, kernel):
    counts = (319,), (0,), (129,), (1,), (128,), (65,)
    case = make_case(layout, counts=counts, width=319, heads=3, holes=False)
    tile = tile_of(kernel, case)
    check_parts(as_read(case, tile), partial(run, tile=tile), 3, tile.block_rows)


@of_layouts
def test_lists_of_holes(runs, layout, kernel):
    """Blocks without a row at the beginning, in the middle and at the end, and a list of nothing else."""
    case = make_case(layout, counts=((450,), (130,)), width=450, heads=8, holes=False)
    case.kv_indices[0, :130] = -1
    case.kv_indices[0, 192:260] = -5
    case.kv_indices[0, 380:] = -1
    case.kv_indices[1] = -1
    for splits in (1, 2):
        out, lse = decode(case, kernel, splits)
        assert not out[1].any()
        assert bool((lse[1] == float("-inf")).all())


@of_layouts
def test_sharp_softmax(runs, layout, kernel):
    """Scores of some hundreds, whose running maximum grows much from block to block.

    A score summed in float32 is off by some 10 times 2**-24 of its size, and so is the logarithm of its
    weight; weights below 2**-126 are 0.
    """
    case = make_case(layout, heads=16, counts=((333,),), width=333, seed=5)
    case = case.but(q=case.q * 30)
    tile = tile_of(kernel, case)
    out, lse = run(case, 2, tile=tile)
    wanted, wanted_lse, size = map(torch.from_numpy, expected(as_read(case, tile)))
    assert wanted_lse.max() > 100
    assert bool(((out - wanted).abs() <= size * (WEIGHT_ROUNDING + 2**-11) + 1e-30).all())
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=2e-6, atol=0)


# Made wrong on purpose, in the PTX text

GLUON, WIDE = KERNELS["gluon"], KERNELS["gluon_wide"]


def mutant(runs, layout, change, **options):
    # A list of two parts, which are merged, and one of a single part, which is not. A part of the list of
    # `gluon_wide` has more blocks than the kernel has tiles.
    kernel = next(kernel for kernel, name in KERNELS.items() if name == change.kernel)
    longest = 390 if kernel == "gluon_wide" else 150
    case = make_case(layout, heads=8, counts=((longest,), (60,)), width=longest)
    with runs.using(change=change, **options):
        decode(with_strangers(case), kernel, 2)


@quick
@pytest.mark.parametrize("kernel", [GLUON, WIDE])
def test_reads_beyond_the_pool_are_reported(runs, kernel):
    with pytest.raises(ptxrun.PtxError, match="out of all regions"):
        mutant(runs, "fp4", Number(kernel, 0, 2**31 - 1))


@pytest.mark.parametrize(
    ("kernel", "pattern", "message"),
    [
        *(
            (kernel, *of)
            for kernel in (GLUON, WIDE)
            for of in (
                (r"fence\.proxy\.async", r"without fence\.proxy\.async"),
                (r"wgmma\.fence", r"without wgmma\.fence"),
                (r"wgmma\.wait_group", "in flight"),
            )
        ),
        (GLUON, r"cp\.async\.wait_group", r"cp\.async|never written"),
        (GLUON, r"cp\.async\.commit_group", r"cp\.async|never written"),
    ],
)
@pytest.mark.parametrize("layout", ["fp4", "fp8_block_scale"])
def test_missing_waits_and_fences_are_reported(runs, layout, kernel, pattern, message):
    with pytest.raises(ptxrun.PtxError, match=message):
        mutant(runs, layout, Change(kernel, instruction(pattern)))


def unnoticed(runs, layout, kernel, pattern):
    """Which removals of one match of a pattern the case does not notice, and the number of matches."""
    found, which, count = [], 0, 1
    while which < count:
        change = Change(kernel, pattern, which=(which,))
        if not is_noticed(runs, layout, change):
            found.append(which)
        which, count = which + 1, change.matches
    return found, count


def is_noticed(runs, layout, change):
    try:
        mutant(runs, layout, change)
    except (ptxrun.PtxError, AssertionError):
        return True
    return False


@pytest.mark.parametrize(("layout", "redundant"), [("fp4", 1), ("fp8_block_scale", 0)])
def test_each_barrier_is_needed(runs, layout, redundant):
    """Triton puts a barrier after a wait for copies, and our own follows our fence: either of these two is
    enough. Where the rope is a late part, no fence follows that wait, and there is one barrier.
    """
    found, count = unnoticed(runs, layout, GLUON, instruction(r"bar\.sync"))
    assert count >= 10
    assert len(found) == 2 * redundant
    if redundant:
        assert found[1] == found[0] + 1
        assert is_noticed(runs, layout, Change(GLUON, instruction(r"bar\.sync"), which=tuple(found)))


#: What orders the warp groups of `gluon_wide`: pattern, which are redundant, and the number. Triton puts a
#: barrier before every arrival, also before the second of two, and between stores of row numbers.
ORDERS = {
    "barrier": (instruction(r"bar\.sync"), [3, 6], 7),
    "wait": (r"mbarrier\.try_wait[^;]*;\s*@!complete bra\.uni waitLoop;", [], 6),
    "arrival": (instruction(r"@%p\d+ mbarrier\.arrive"), [], 6),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", ["fp4", "fp8_block_scale"])
def test_the_order_of_warp_groups_is_needed(runs, layout, order):
    pattern, redundant, count = ORDERS[order]
    assert unnoticed(runs, layout, WIDE, pattern) == (redundant, count)


@pytest.mark.parametrize(("kernel", "which"), [(GLUON, 0), (GLUON, 1), (WIDE, 1), (WIDE, 2)])
@pytest.mark.parametrize("layout", ["fp4", "fp8_block_scale"])
def test_each_fence_is_needed(runs, layout, kernel, which):
    """The fence of the queries, with `fp4` also of the copied rope, and those of the weights and values.

    In `gluon_wide` the fence of the queries is redundant by PTX's memory model: the decoder's fence lies
    between their stores and the first product too.
    """
    change = Change(kernel, instruction(r"fence\.proxy\.async"), which=(which,))
    assert is_noticed(runs, layout, change)
    assert change.matches == (2 if kernel == GLUON else 3)
