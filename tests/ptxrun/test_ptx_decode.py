"""`mla_decode`'s kernels as compiled for sm_90a, on ptxrun, against float64: every tile of the table."""

import codec_oracle as oracle
import pytest
import torch
from decode_cases import Case, check, every_code, make_case
from decode_interpreted import run

from sgl_kvpool.attention.decode_config import DecodeConfig, table, tile_config, tiles_of_both_kernels
from sgl_kvpool.attention.decode_launch import MERGE_WARPS, merge_constants
from sgl_kvpool.attention.triton_merge import merge_kernel

TILES = tiles_of_both_kernels()
#: Of every layout and kernel, the tile for the fewest pairs.
SMALLEST = [(layout, tile) for layout, tile in TILES if tile == tile_config(layout, 1, tile.kernel)]
KERNELS = {"gluon": "gluon_decode_kernel", "triton": "decode_kernel"}
#: The machine's arithmetic: sums of products are truncated, approximate functions off by what PTX allows.
HOPPER = {"mma": 1, "approx": 1}
#: Lists of several blocks and an odd rest, of one row, of none.
COUNTS = ((150,), (70,), (0,), (1,))
VERIFY = ((66, 67), (129, 2), (0, 1))


def _name(value):
    return str(value) if not hasattr(value, "pairs") else f"{value.kernel}-{value.pairs}-{value.warps}-warps"


def with_seeds(tiles, seeds):
    """(layout, tile, seed): all seeds for tiles that serve, the last for the twin's."""
    served = set(table("gluon"))
    return [(*tile, seed) for tile in tiles for seed in (seeds if tile in served else seeds[-1:])]


def _tiles(quick):
    return pytest.mark.parametrize(
        ("layout", "tile"),
        [pytest.param(*tile, marks=[pytest.mark.quick] * (tile in quick)) for tile in TILES],
        ids=_name,
    )


def with_strangers(case):
    """Entries of a list that are beyond the pool, one of them by far: no rows."""
    case.kv_indices[0, :3] = torch.tensor([len(case.values), 2**31 - 1, 2**31 - 4])
    return case


def decode(case, splits=1, **arguments):
    """Run and check; results have the queries' type, as `mla_decode` gives them."""
    found = run(case, splits, out_dtype=case.q.dtype, **arguments)
    check(found, case)
    return found


@_tiles(quick=SMALLEST)
def test_every_tile(runs, layout, tile):
    """Two splits and the merge; holes in the lists, and entries beyond the pool."""
    case = make_case(layout.value, heads=tile.pairs, counts=COUNTS)
    decode(with_strangers(case), 2, tile=tile)
    assert [name for name, _ in runs.launched] == [KERNELS[tile.kernel], "merge_kernel"]
    assert runs.launched[0][1].stats["wgmma_operations"] > 0


@_tiles(quick=[])
def test_every_tile_with_hoppers_arithmetic(runs, layout, tile):
    case = make_case(layout.value, heads=tile.pairs, counts=COUNTS, seed=1)
    with runs.using(**HOPPER, seed=1):
        decode(case.but(q=case.q * 4), 2, tile=tile)


@pytest.mark.parametrize(("layout", "tile", "seed"), with_seeds(TILES, [2, 3, 4]), ids=_name)
def test_schedules_of_every_tile(runs, layout, tile, seed):
    """Turns of warps from one instruction to hundreds."""
    case = make_case(layout.value, heads=tile.pairs, counts=((200,),), width=200, seed=seed)
    with runs.using(seed=seed, quantum=[1, 24, 400][seed - 2]):
        decode(case, 2, tile=tile)


@_tiles(quick=SMALLEST[-1:])
def test_verification_in_every_tile(runs, layout, tile):
    """Two float16 queries per list that do not fill the tile; int64 slots of pages; lists out of order."""
    case = make_case(
        layout.value, rank=512 if tile.kernel == "gluon" else 128, heads=tile.pairs * 3 // 8, counts=VERIFY,
        ids=torch.int64, arrangement="page_major", dtype=torch.float16,
    )  # fmt: skip
    case.q = case.q.bfloat16().half()  # which the kernel rounds to
    assert case.page is not None
    case = case.but(list_index=torch.tensor([1, 0, 2]), kv_lens=case.kv_lens[[2, 3, 0, 1, 4, 5]])
    decode(case, tile=tile)


@pytest.mark.parametrize("heads", [1, 40])
@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_heads(runs, layout, heads):
    """One pair in a tile, and several tiles of which the last is not full."""
    decode(make_case(layout, rank=128, heads=heads, counts=((67,),), fill=0x7F), 1)


@pytest.mark.parametrize(("rank", "rope"), [(128, 0), (256, 64), (384, 64)])
@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_geometries(runs, layout, rank, rope):
    decode(make_case(layout, rank=rank, rope=rope, heads=5, counts=COUNTS, seed=3), 3)


@pytest.mark.parametrize("arrangement", ["token_major", "page_major"])
@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_arrangements(runs, layout, arrangement):
    case = make_case(layout, rank=128, arrangement=arrangement, heads=5, counts=COUNTS, seed=4)
    decode(with_strangers(case), 2)


@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_splits_give_the_same(runs, layout):
    """1, 2 and 7 splits of lists of 5, 0, 3 and 1 blocks: most splits of the short ones are empty."""
    counts = ((319,), (0,), (129,), (1,))
    case = make_case(layout, rank=128, counts=counts, width=319, heads=3)
    for splits in (1, 2, 7):
        decode(case, splits)
    decode(case, 7, min_blocks=2)


@pytest.mark.parametrize("layout", ["fp8", "fp8_block_scale", "fp4", "fp4_fp8_rope"])
def test_every_code_and_every_scale(runs, layout):
    """A list of one row has that row's latent as its result: the machine's decoding, code by code."""
    fmt, pool, values = every_code(layout)
    ids = torch.arange(0, 36, 4)[:, None]  # together, these hold every scale of FP4, and each every code
    q = torch.zeros(len(ids), 1, 512, dtype=torch.bfloat16)
    out, lse = run(Case(layout, fmt, q, pool, ids, torch.ones_like(ids[:, 0]), values.numpy()))
    torch.testing.assert_close(out[:, 0], values[ids[:, 0]], rtol=0, atol=0)
    assert not lse.any()


@pytest.mark.parametrize("k_scale", [0.37, 24.0])
def test_k_scale(runs, k_scale):
    case = make_case("fp8", k_scale=k_scale, heads=16)
    decode(case, 2)
    with pytest.raises(AssertionError):
        decode(case.but(k_scale=1.0), 2)


def test_strides(runs):
    """Queries, lists and results in the middle of wider tensors; queries in two parts."""
    case = make_case("fp4", rank=128, heads=6, counts=((70,), (3,), (131,)))
    wide = torch.randn(4, 9, 2, 400).bfloat16()
    apart = torch.stack([case.kv_indices, torch.full_like(case.kv_indices, -3)], -1).flatten(1)[:, ::2]
    case = case.but(
        q=wide[:, 2:8, 1, 40:232],
        kv_indices=apart,
        list_index=torch.tensor([2, 0, 2, 1], dtype=torch.int32),
        kv_lens=torch.tensor([131, 44, 70, 3], dtype=torch.int32),
    )
    for splits in (1, 2):
        base = torch.full((7, 5, 300), -9.0)
        out = base[:6, :4, 11:139].transpose(0, 1)
        check(run(case, splits, out=out), case)
        assert bool((base[6] == -9).all() and (base[:, 4] == -9).all() and (base[..., 139:] == -9).all())
    parts = case.but(q=case.q[..., :128].contiguous(), options={"q_rope": case.q[..., 128:]})
    assert torch.equal(run(parts)[0], run(case)[0])


def test_counts_and_lists_that_mean_nothing(runs):
    """Negative counts, counts beyond the list, lists that do not exist: none, all, none."""
    case = make_case("fp4", rank=128, counts=((-3,), (2**31 - 1,), (64,), (9,), (5,)), width=64)
    for splits in (1, 2):
        decode(case, splits)
        strange = case.but(list_index=torch.tensor([0, 1, 5, -1, 2**31 - 1], dtype=torch.int32))
        out, lse = decode(strange, splits)
        assert bool((lse[[0, 2, 3, 4]] == float("-inf")).all())
        assert not out[[0, 2, 3, 4]].any()


def test_entries_that_wrap_around_are_none(runs):
    """int64 slots times rows per page leave 64 bits; the row number is negative then."""
    case = make_case("bf16", rank=128, arrangement="page_major", counts=((9,),))
    ids = case.kv_indices.long()
    plain = case.but(kv_indices=ids.clone())
    plain.kv_indices[0, :2] = -1
    ids[0, :2] = torch.tensor([4611686018427387904, 6148914691236517206])
    found, wanted = run(case.but(kv_indices=ids)), run(plain)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def test_a_query_of_nans(runs):
    """It is NaN where it sees rows; the others of its tile are not."""
    case = make_case("fp4", rank=128, heads=2, counts=((200,), (150,)))
    case.q[0, 1] = float("nan")
    out, lse = run(case, 2)
    assert bool(out[0, 1].isnan().all())
    assert bool(lse[0, 1].isnan())
    assert bool(out[1].isfinite().all())


def test_a_pool_beyond_31_bits(runs):
    """Rows a gigabyte apart; only the touched pages take memory."""
    case = make_case("fp4", rank=128, heads=4, counts=((3,),), width=3, holes=False, slots=4)
    stride = 2**30 + 4096
    try:
        pool = torch.empty(4 * stride, dtype=torch.uint8).as_strided(case.pool.shape, (stride, 1))
    except RuntimeError:
        pytest.skip("the system refuses 4 GiB of unused address space")
    pool.copy_(case.pool)
    with runs.using(global_races=0):  # which would take 4 bytes for each byte
        decode(case.but(pool=pool))


@pytest.mark.parametrize("splits", [2, 33, pytest.param(128, marks=pytest.mark.quick)])
def test_the_merge(runs, splits):
    """Parts of every weight, some of which no query sees and some that were not written, to float64.

    A list of one part is left as the decode kernel wrote it.
    """
    fmt = oracle.row_format("fp4", 256, 64)
    heads, lists = 3, 2
    tile = tile_config(fmt.layout, heads, "triton")
    config, block = DecodeConfig(tile, 1, splits, 1), tile.block_rows
    counts = torch.tensor([splits * block, max(1, splits - 1) * block - 5])
    partial, lse = torch.randn(splits, lists, heads, 256), torch.randn(splits, lists, heads) * 9
    lse[0, 1, 2] = lse[1, 0, 0] = float("-inf")
    partial[0, 1, 2] = partial[1, 0, 0] = 0
    written = [slice(splits), slice(splits - 1)]  # of each list
    wanted_lse = torch.stack([lse[some, i].double().logsumexp(0) for i, some in enumerate(written)])
    wanted = torch.zeros(lists, heads, 256, dtype=torch.float64)
    for i, some in enumerate(written):
        weights = lse[some, i].double().softmax(0).nan_to_num()  # 0 where no split has rows
        wanted[i] = (weights[..., None] * partial[some, i].double()).sum(0)
    partial[splits - 1, 1] = lse[splits - 1, 1] = float("nan")  # was not written
    out, out_lse = torch.full((lists, heads, 256), float("nan")), torch.full((lists, heads), float("nan"))
    if splits == 2:
        out[1], out_lse[1] = wanted[1].float(), wanted_lse[1].float()
        partial[:, 1] = lse[:, 1] = float("nan")
    merge_kernel[(lists * heads, 2)](
        partial, lse, counts, None, out, out_lse, lists, splits * block, splits, 1, lists * heads,
        out.stride(0), out.stride(1), out_lse.stride(0), out_lse.stride(1),
        **merge_constants(fmt, config, heads, 1), NATIVE=True, num_warps=MERGE_WARPS,
    )  # fmt: skip
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out_lse.double(), wanted_lse, rtol=1e-6, atol=1e-5)
