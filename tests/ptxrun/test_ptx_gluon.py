"""`gluon_decode` as compiled for sm_90a, on ptxrun: cases of this kernel alone, and changes to its PTX.

`test_ptx_decode` and `test_ptx_tiles` have the cases that it shares with Triton's kernel.
"""

import ptxrun
import pytest
import test_ptx_decode
import torch
from decode_cases import WEIGHT_ROUNDING, check_parts, expected, make_case
from decode_interpreted import run
from test_ptx_decode import COUNTS, tile_of, with_strangers
from test_ptx_mutants import Change, Number, instruction

KERNEL = test_ptx_decode.KERNELS["gluon"]
LAYOUTS = [layout for layout, _, _ in test_ptx_decode.OF_GLUON]
quick = pytest.mark.quick


def decode(case, splits=1):
    return test_ptx_decode.decode(case, splits, tile=tile_of("gluon", case))


@pytest.mark.parametrize("page_size", [1, 2, 61, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_sizes(runs, layout, page_size):
    """Page-major pools; entries beyond the pool."""
    case = make_case(layout, arrangement="page_major", page_size=page_size, heads=8, counts=((150,), (3,)))
    decode(with_strangers(case), 2)


@pytest.mark.parametrize("padding", [16, 48])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_strides(runs, layout, padding):
    """Any multiple of 16 bytes."""
    case = make_case(layout, heads=8, counts=((70,),))
    wide = torch.full((len(case.pool), case.pool.stride(0) + padding), 0x7F, dtype=torch.uint8)
    pool = wide[:, : case.fmt.row_bytes]
    pool.copy_(case.pool)
    decode(case.but(pool=pool))


@pytest.mark.parametrize("queries", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_queries_of_a_list(runs, layout, queries):
    """Drafts: each query sees one row more; no query sees the second list, one sees a row of the third."""
    counts = tuple(range(126, 126 + queries)), (0,) * queries, (1,) + (0,) * (queries - 1)
    decode(make_case(layout, heads=8, counts=counts), 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_list_of_one_part_is_not_merged(runs, layout):
    counts = (319,), (0,), (129,), (1,), (128,), (65,)
    case = make_case(layout, counts=counts, width=319, heads=3, holes=False)
    check_parts(case, decode_parts, 3, tile_of("gluon", case).block_rows)


def decode_parts(case, splits, partial):
    return run(case, splits, partial=partial, tile=tile_of("gluon", case))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lists_of_holes(runs, layout):
    """Blocks without a row at the beginning, in the middle and at the end, and a list of nothing else."""
    case = make_case(layout, counts=((450,), (130,)), width=450, heads=8, holes=False)
    case.kv_indices[0, :130] = -1
    case.kv_indices[0, 192:260] = -5
    case.kv_indices[0, 380:] = -1
    case.kv_indices[1] = -1
    for splits in (1, 2):
        out, lse = decode(case, splits)
        assert not out[1].any()
        assert bool((lse[1] == float("-inf")).all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharp_softmax(runs, layout):
    """Scores of some hundreds: largest scores move by far from block to block.

    Such sums in float32 are off by some 10 times 2**-24 of their size, and so are the logarithms of weights;
    weights below 2**-126 are 0.
    """
    case = make_case(layout, heads=16, counts=((333,),), width=333, seed=5)
    case = case.but(q=case.q * 30)
    out, lse = run(case, 2, tile=tile_of("gluon", case))
    wanted, wanted_lse, size = map(torch.from_numpy, expected(case))
    assert wanted_lse.max() > 100
    assert bool(((out - wanted).abs() <= size * (WEIGHT_ROUNDING + 2**-11) + 1e-30).all())
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=2e-6, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_kernels_agree(runs, layout):
    """Weights are rounded to bfloat16 in both, after sums in other orders."""
    case = make_case(layout, heads=16, counts=COUNTS, seed=9)
    ours, twin = (run(case, 2, tile=tile_of(kernel, case)) for kernel in ("gluon", "triton"))
    torch.testing.assert_close(ours[0], twin[0], rtol=2**-7, atol=2**-9)
    torch.testing.assert_close(ours[1], twin[1], rtol=1e-6, atol=2e-5)


# Made wrong on purpose, in the PTX text


def mutant(runs, layout, change, **options):
    # A list of two parts, which are merged, and one of a single part, which is not.
    case = make_case(layout, heads=8, counts=((150,), (60,)))
    with runs.using(change=change, **options):
        decode(with_strangers(case), 2)


@quick
def test_reads_beyond_the_pool_are_reported(runs):
    with pytest.raises(ptxrun.PtxError, match="out of all regions"):
        mutant(runs, "fp4", Number(KERNEL, 0, 2**31 - 1))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"fence\.proxy\.async", r"without fence\.proxy\.async"),
        (r"wgmma\.fence", r"without wgmma\.fence"),
        (r"wgmma\.wait_group", "in flight"),
        (r"cp\.async\.wait_group", r"cp\.async|never written"),
        (r"cp\.async\.commit_group", r"cp\.async|never written"),
    ],
)
@pytest.mark.parametrize("layout", ["fp4", "fp8_block_scale"])
def test_missing_waits_and_fences_are_reported(runs, layout, pattern, message):
    with pytest.raises(ptxrun.PtxError, match=message):
        mutant(runs, layout, Change(KERNEL, instruction(pattern)))


def is_noticed(runs, layout, change):
    try:
        mutant(runs, layout, change)
    except (ptxrun.PtxError, AssertionError):
        return True
    return False


@pytest.mark.parametrize(("layout", "redundant"), [("fp4", 1), ("fp8_block_scale", 0)])
def test_each_barrier_is_needed(runs, layout, redundant):
    """Barriers are removed one at a time. Triton puts a barrier after a wait for copies, and our own follows
    our fence: either of these two is enough. Where the rope is a late part, no fence follows that wait, and
    there is one barrier.
    """
    unnoticed, which, count = [], 0, 1
    while which < count:
        change = Change(KERNEL, instruction(r"bar\.sync"), which=(which,))
        if not is_noticed(runs, layout, change):
            unnoticed.append(which)
        which, count = which + 1, change.matches
    assert count >= 10
    assert len(unnoticed) == 2 * redundant
    if redundant:
        assert unnoticed[1] == unnoticed[0] + 1
        assert is_noticed(runs, layout, Change(KERNEL, instruction(r"bar\.sync"), which=tuple(unnoticed)))


@pytest.mark.parametrize("which", range(2))
@pytest.mark.parametrize("layout", ["fp4", "fp8_block_scale"])
def test_each_fence_is_needed(runs, layout, which):
    """The fence of the queries, with `fp4` also of the copied rope, and that of the weights and values."""
    change = Change(KERNEL, instruction(r"fence\.proxy\.async"), which=(which,))
    assert is_noticed(runs, layout, change)
    assert change.matches == 2
