"""What a batch may ask of `gluon_decode`, as compiled for sm_90a, on ptxrun, against float64.

`test_ptx_decode` and `test_ptx_tiles` have its tiles beside those of Triton's kernel.
"""

import ptxrun
import pytest
import torch
from decode_cases import WEIGHT_ROUNDING, Case, check, check_parts, every_code, expected, make_case
from decode_interpreted import run
from test_ptx_decode import COUNTS, with_strangers
from test_ptx_mutants import Change, Number, instruction

from sgl_kvpool.attention.decode_config import tile_config
from sgl_kvpool.layout import MLAKVCacheLayout

KERNEL = "gluon_decode_kernel"
LAYOUTS = [layout.value for layout in MLAKVCacheLayout if tile_config(layout, 8, "gluon").kernel == "gluon"]
quick = pytest.mark.quick


def decode(case, splits=1, **arguments):
    """Run the tile of the table and check; results have the queries' type, as `mla_decode` gives them."""
    pairs = case.q.shape[1] * case.queries_per_list
    tile = tile_config(case.fmt.layout, pairs, "gluon")
    if tile.kernel != "gluon":  # more heads than its largest tile has pairs
        tile = tile_config(case.fmt.layout, 16, "gluon")
    found = run(case, splits, out_dtype=arguments.pop("out_dtype", case.q.dtype), tile=tile, **arguments)
    check(found, case)
    return found


@pytest.mark.parametrize("heads", [1, 12, 40])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads(runs, layout, heads):
    """One pair in a tile, a tile that is not full, and several tiles of which the last is not."""
    decode(make_case(layout, heads=heads, counts=((67,),), fill=0x7F))
    assert runs.launched[0][0] == KERNEL


@pytest.mark.parametrize("page_size", [1, 2, 61, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_sizes(runs, layout, page_size):
    """Slots in rows of all layers, page by page; entries beyond the pool."""
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
    """Drafts that are verified: each sees one row more; a list that no query looks at, one that one does."""
    counts = tuple(range(126, 126 + queries)), (0,) * queries, (1,) + (0,) * (queries - 1)
    decode(make_case(layout, heads=8, counts=counts), 2)


@pytest.mark.parametrize("splits", [1, 3, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_splits(runs, layout, splits):
    """Lists of five blocks of 64, none, three and one: most splits of the short ones are empty."""
    counts = ((319,), (0,), (129,), (1,))
    decode(make_case(layout, counts=counts, width=319, heads=3), splits, min_blocks=1 + splits // 7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_list_of_one_part_is_not_merged(runs, layout):
    counts = (319,), (0,), (129,), (1,), (128,), (65,)
    case = make_case(layout, counts=counts, width=319, heads=3, holes=False)
    tile = tile_config(case.fmt.layout, 3, "gluon")
    check_parts(case, decode_parts, 3, tile.block_rows)


def decode_parts(case, splits, partial):
    return run(case, splits, partial=partial, tile=tile_config(case.fmt.layout, 3, "gluon"))


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
def test_every_code_and_every_scale(runs, layout):
    """A list of one row has that row's latent as its result: the machine's decoding, code by code."""
    _, pool, values = every_code(layout)
    fmt = MLAKVCacheLayout(layout).row_format(512, 64)
    rows = torch.zeros(len(pool), fmt.row_bytes, dtype=torch.uint8)
    rows[:, : pool.shape[1]] = pool[:, : fmt.rope.offset_bytes]
    ids = torch.arange(0, 36, 4)[:, None]  # together, these hold every scale of FP4, and each every code
    q = torch.zeros(len(ids), 1, 576, dtype=torch.bfloat16)
    case = Case(layout, fmt, q, rows, ids, torch.ones_like(ids[:, 0]), values.numpy())
    out, lse = run(case, tile=tile_config(fmt.layout, 1, "gluon"))
    torch.testing.assert_close(out[:, 0], values[ids[:, 0]], rtol=0, atol=0)
    assert not lse.any()


@pytest.mark.parametrize("k_scale", [0.37, 24.0])
def test_k_scale(runs, k_scale):
    case = make_case("fp8", k_scale=k_scale, heads=16)
    decode(case, 2)
    with pytest.raises(AssertionError):
        decode(case.but(k_scale=1.0), 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharp_softmax(runs, layout):
    """Scores of some hundreds: largest scores move by far from block to block.

    Such sums in float32 are off by some 10 times 2**-24 of their size, and so are the logarithms of weights;
    weights below 2**-126 are 0.
    """
    case = make_case(layout, heads=16, counts=((333,),), width=333, seed=5)
    case = case.but(q=case.q * 30)
    out, lse = run(case, 2, tile=tile_config(case.fmt.layout, 16, "gluon"))
    wanted, wanted_lse, size = map(torch.from_numpy, expected(case))
    assert wanted_lse.max() > 100
    assert bool(((out - wanted).abs() <= size * (WEIGHT_ROUNDING + 2**-11) + 1e-30).all())
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=2e-6, atol=0)


def test_strides(runs):
    """Queries, lists and results in the middle of wider tensors; queries in two parts."""
    case = make_case("fp4", heads=6, counts=((70,), (3,), (131,)))
    wide = torch.randn(4, 9, 2, 700).bfloat16()
    apart = torch.stack([case.kv_indices, torch.full_like(case.kv_indices, -3)], -1).flatten(1)[:, ::2]
    case = case.but(
        q=wide[:, 2:8, 1, 40:616],
        kv_indices=apart,
        list_index=torch.tensor([2, 0, 2, 1], dtype=torch.int32),
        kv_lens=torch.tensor([131, 44, 70, 3], dtype=torch.int32),
    )
    for splits in (1, 2):
        base = torch.full((7, 5, 800), -9.0)
        out = base[:6, :4, 11:523].transpose(0, 1)
        decode(case, splits, out=out)
        assert bool((base[6] == -9).all() and (base[:, 4] == -9).all() and (base[..., 523:] == -9).all())
    parts = case.but(q=case.q[..., :512].contiguous(), options={"q_rope": case.q[..., 512:]})
    tile = tile_config(case.fmt.layout, 6, "gluon")
    assert torch.equal(run(parts, tile=tile)[0], run(case, tile=tile)[0])


@pytest.mark.parametrize("splits", [1, 2])
def test_counts_and_lists_that_mean_nothing(runs, splits):
    """Negative counts, counts beyond the list, lists that do not exist: none, all, none."""
    case = make_case("fp4", counts=((-3,), (2**31 - 1,), (64,), (9,), (5,)), width=64)
    decode(case, splits)
    strange = case.but(list_index=torch.tensor([0, 1, 5, -1, 2**31 - 1], dtype=torch.int32))
    out, lse = decode(strange, splits)
    assert bool((lse[[0, 2, 3, 4]] == float("-inf")).all())
    assert not out[[0, 2, 3, 4]].any()


def test_entries_that_wrap_around_are_none(runs):
    """int64 slots times rows per page leave 64 bits; the row number is negative then."""
    case = make_case("fp4", arrangement="page_major", counts=((9,),))
    tile = tile_config(case.fmt.layout, 8, "gluon")
    ids = case.kv_indices.long()
    plain = case.but(kv_indices=ids.clone())
    plain.kv_indices[0, :2] = -1
    ids[0, :2] = torch.tensor([4611686018427387904, 6148914691236517206])
    found, wanted = run(case.but(kv_indices=ids), tile=tile), run(plain, tile=tile)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def test_a_query_of_nans(runs):
    """It is NaN where it sees rows; the others of its tile are not."""
    case = make_case("fp4", heads=2, counts=((200,), (150,)))
    case.q[0, 1] = float("nan")
    out, lse = run(case, 2, tile=tile_config(case.fmt.layout, 2, "gluon"))
    assert bool(out[0, 1].isnan().all())
    assert bool(lse[0, 1].isnan())
    assert bool(out[1].isfinite().all())
    assert bool(out[0, 0].isfinite().all())


def test_a_pool_beyond_31_bits(runs):
    """Rows a gigabyte apart; only the touched pages take memory."""
    case = make_case("fp4", heads=4, counts=((3,),), width=3, holes=False, slots=4)
    stride = 2**30 + 4096
    try:
        pool = torch.empty(4 * stride, dtype=torch.uint8).as_strided(case.pool.shape, (stride, 1))
    except RuntimeError:
        pytest.skip("the system refuses 4 GiB of unused address space")
    pool.copy_(case.pool)
    with runs.using(global_races=0):  # which would take 4 bytes for each byte
        decode(case.but(pool=pool))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_kernels_agree(runs, layout):
    """Weights are rounded to bfloat16 in both, after sums in other orders."""
    case = make_case(layout, heads=16, counts=COUNTS, seed=9)
    fmt = case.fmt
    ours = run(case, 2, tile=tile_config(fmt.layout, 16, "gluon"))
    twin = run(case, 2, tile=tile_config(fmt.layout, 16, "triton"))
    torch.testing.assert_close(ours[0], twin[0], rtol=2**-7, atol=2**-9)
    torch.testing.assert_close(ours[1], twin[1], rtol=1e-6, atol=2e-5)


# Made wrong on purpose, in the PTX text


def mutant(runs, layout, change, **options):
    # A list of two parts, which are merged, and one of a single part, which is not.
    case = make_case(layout, heads=8, counts=((150,), (60,)))
    with runs.using(change=change, **options):
        decode(with_strangers(case), 2)


@quick
def test_bounds_a_row_beyond_the_pool_is_read(runs):
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
def test_what_is_not_waited_for(runs, layout, pattern, message):
    with pytest.raises(ptxrun.PtxError, match=message):
        mutant(runs, layout, Change(KERNEL, instruction(pattern)))


def is_noticed(runs, layout, change):
    try:
        mutant(runs, layout, change)
    except (ptxrun.PtxError, AssertionError):
        return True
    return False


@pytest.mark.parametrize("layout", ["fp4", "fp8_block_scale"])
def test_each_barrier_is_needed(runs, layout):
    """One at a time. After a wait for copies Triton puts a barrier, and after our fence is ours: of these two
    either is enough.
    """
    unnoticed, which, count = [], 0, 1
    while which < count:
        change = Change(KERNEL, instruction(r"bar\.sync"), which=(which,))
        if not is_noticed(runs, layout, change):
            unnoticed.append(which)
        which, count = which + 1, change.matches
    assert count >= 10
    assert len(unnoticed) == 2
    assert unnoticed[1] == unnoticed[0] + 1
    assert is_noticed(runs, layout, Change(KERNEL, instruction(r"bar\.sync"), which=tuple(unnoticed)))


@pytest.mark.parametrize("which", range(2))
@pytest.mark.parametrize("layout", ["fp4", "fp8_block_scale"])
def test_each_fence_is_needed(runs, layout, which):
    """That of the copied rope and the queries, and that of the weights and the values."""
    change = Change(KERNEL, instruction(r"fence\.proxy\.async"), which=(which,))
    assert is_noticed(runs, layout, change)
    assert change.matches == 2
