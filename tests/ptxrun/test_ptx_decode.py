"""`mla_decode`'s kernels as compiled for sm_90a, on ptxrun, against float64: every tile of the table.

`test_ptx_tiles` has lists of several blocks of each tile, `test_ptx_gluon` the cases of that kernel alone.
Numbers of heads, geometries, arrangements: ``tests/gpu/test_mla_decode_gpu.py``, on the emulated device.
"""

import functools

import codec_oracle as oracle
import pytest
import torch
from decode_cases import Case, as_read, check, check_parts, every_code, make_case
from decode_kernels import run
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sgl_kvpool.attention.decode_config import DecodeConfig, table, tile_config
from sgl_kvpool.attention.decode_launch import MERGE_WARPS, merge_constants
from sgl_kvpool.attention.triton_lists import merge_kernel

TILES = table("triton", "gluon")
#: For every layout and kernel, the tile for the fewest query heads.
SMALLEST = list({(layout, tile.kernel): (layout, tile) for layout, tile in TILES[::-1]}.values())[::-1]
KERNELS = {"gluon": "gluon_decode_kernel", "gluon_wide": "gluon_wide_decode_kernel"}
KERNELS |= {"triton": "decode_kernel"}
#: Rank of each kernel's cases; Gluon's kernels read no other rank than 512.
RANKS = {"triton": 128, "gluon": 512, "gluon_wide": 512}
#: (layout, kernel, rank): every layout with every kernel that serves it.
LAYOUTS = [
    (layout, kernel, rank)
    for kernel, rank in RANKS.items()
    for layout in oracle.LAYOUTS
    if any((layout, kernel) == (of, tile.kernel) for of, tile in TILES)
]
OF_GLUON = [of for of in LAYOUTS if of[1] != "triton"]
#: For what does not depend on the layout: `gluon_wide` with one alone.
ROWS_ALONE = [of for of in LAYOUTS if of[1] != "gluon_wide" or of[0] == "fp8_block_scale"]
of_kernels = pytest.mark.parametrize(
    ("kernel", "rank"),
    [pytest.param(*of, marks=[pytest.mark.quick] * (of[0] == "triton")) for of in RANKS.items()],
)
#: Closer to the machine's arithmetic: truncated sums of products, approximate functions off by up to one ulp.
HOPPER = {"mma": 1, "approx": 1}
#: Lists of full blocks of 64 and a rest, of one row, of none.
COUNTS = ((150,), (70,), (0,), (1,))
VERIFY = ((66, 67), (129, 2), (0, 1))


def _name(value):
    if hasattr(value, "query_heads"):
        return f"{value.kernel}-{value.query_heads}-{value.warps}-warps"
    return str(value)


def with_seeds(tiles, seeds):
    """(layout, tile, seed): all seeds for tiles that serve on CUDA, the last seed for the other tiles."""
    served = set(table("gluon"))
    return [(*tile, seed) for tile in tiles for seed in (seeds if tile in served else seeds[-1:])]


def _tiles(quick):
    return pytest.mark.parametrize(
        ("layout", "tile"),
        [pytest.param(*tile, marks=[pytest.mark.quick] * (tile in quick)) for tile in TILES],
        ids=_name,
    )


def with_strangers(case):
    """Put entries beyond the pool into a list, two of them far beyond; they are not rows."""
    case.kv_indices[0, :3] = torch.tensor([len(case.values), 2**31 - 1, 2**31 - 4])
    return case


def decode(case, splits=1, *, tile, **arguments):
    """Run and check; results have the queries' type, as `mla_decode` gives them."""
    found = run(case, splits, out_dtype=case.q.dtype, tile=tile, **arguments)
    check(found, as_read(case, tile))
    return found


def tile_of(kernel, case):
    """A kernel's smallest tile that takes all query heads of a list, else its largest."""
    query_heads = case.q.shape[1] * case.queries_per_list
    tiles = [tile for layout, tile in TILES if layout == case.layout and tile.kernel == kernel]
    return next((tile for tile in tiles if query_heads <= tile.query_heads), tiles[-1])


@_tiles(quick=SMALLEST)
def test_every_tile(runs, layout, tile):
    """Two splits and the merge; holes in the lists, and entries beyond the pool."""
    case = make_case(layout.value, heads=tile.query_heads, counts=COUNTS)
    decode(with_strangers(case), 2, tile=tile)
    assert [name for name, _ in runs.launched] == [KERNELS[tile.kernel], "merge_kernel"]
    assert runs.launched[0][1].total("units", "wgmma") > 0


@_tiles(quick=[])
def test_every_tile_with_hoppers_arithmetic(runs, layout, tile):
    case = make_case(layout.value, heads=tile.query_heads, counts=COUNTS, seed=1)
    with runs.using(**HOPPER, seed=1):
        decode(case.but(q=case.q * 4), 2, tile=tile)


@pytest.mark.parametrize(("layout", "tile", "seed"), with_seeds(TILES, [2, 3, 4]), ids=_name)
def test_schedules_of_every_tile(runs, layout, tile, seed):
    """Turns of warps last from one instruction to hundreds."""
    case = make_case(layout.value, heads=tile.query_heads, counts=((200,),), width=200, seed=seed)
    with runs.using(seed=seed, quantum=[1, 24, 400][seed - 2]):
        decode(case, 2, tile=tile)


@_tiles(quick=SMALLEST[-1:])
def test_verification_in_every_tile(runs, layout, tile):
    """Two float16 queries per list that do not fill the tile; int64 slots of pages; lists out of order."""
    case = make_case(
        layout.value, rank=RANKS[tile.kernel], heads=tile.query_heads * 3 // 8,
        counts=VERIFY, ids=torch.int64, arrangement="page_major", dtype=torch.float16,
    )  # fmt: skip
    case.q = case.q.bfloat16().half()  # the kernel rounds to bfloat16
    assert case.page is not None
    case = case.but(list_index=torch.tensor([1, 0, 2]), kv_lens=case.kv_lens[[2, 3, 0, 1, 4, 5]])
    decode(case, tile=tile)


@pytest.mark.parametrize(("layout", "kernel", "rank"), ROWS_ALONE)
@pytest.mark.parametrize(("splits", "min_blocks"), [(1, 1), (3, 1), (7, 1), (7, 2)])
def test_splits(runs, layout, kernel, rank, splits, min_blocks):
    """Lists of five blocks of 64, none, three and one: most splits of the short ones are empty."""
    counts = ((319,), (0,), (129,), (1,))
    case = make_case(layout, rank=rank, counts=counts, width=319, heads=3)
    decode(case, splits, min_blocks=min_blocks, tile=tile_of(kernel, case))


@pytest.mark.parametrize(("layout", "kernel"), [of[:2] for of in LAYOUTS if of[0] != "bf16"])
def test_every_code_and_every_scale(runs, layout, kernel):
    """A list of one row has that row's latent as its result: the machine's decoding, code by code."""
    _, pool, values = every_code(layout)
    fmt = oracle.row_format(layout, 512, 64)
    rows = torch.zeros(len(pool), fmt.row_bytes, dtype=torch.uint8)
    rows[:, : pool.shape[1]] = pool[:, : fmt.rope.offset_bytes]
    ids = torch.arange(0, 36, 4)[:, None]  # each row has every code, all together every scale of FP4
    q = torch.zeros(len(ids), 1, 576, dtype=torch.bfloat16)
    case = Case(layout, fmt, q, rows, ids, torch.ones_like(ids[:, 0]), values.numpy())
    out, lse = run(case, tile=tile_of(kernel, case))
    torch.testing.assert_close(out[:, 0], values[ids[:, 0]], rtol=0, atol=0)
    assert not lse.any()


@of_kernels
@pytest.mark.parametrize("k_scale", [0.37, 24.0])
def test_k_scale(runs, kernel, rank, k_scale):
    case = make_case("fp8", rank=rank, k_scale=k_scale, heads=16)
    decode(case, 2, tile=tile_of(kernel, case))
    with pytest.raises(AssertionError):
        decode(case.but(k_scale=1.0), 2, tile=tile_of(kernel, case))


@of_kernels
def test_strides(runs, kernel, rank):
    """Queries, lists and results in the middle of wider tensors; queries in two parts."""
    case = make_case("fp4", rank=rank, heads=6, counts=((70,), (3,), (131,)))
    wide = torch.randn(4, 9, 2, rank + 188).bfloat16()
    apart = torch.stack([case.kv_indices, torch.full_like(case.kv_indices, -3)], -1).flatten(1)[:, ::2]
    case = case.but(
        q=wide[:, 2:8, 1, 40 : rank + 104],
        kv_indices=apart,
        list_index=torch.tensor([2, 0, 2, 1], dtype=torch.int32),
        kv_lens=torch.tensor([131, 44, 70, 3], dtype=torch.int32),
    )
    tile, end = tile_of(kernel, case), 11 + rank
    for splits in (1, 2):
        base = torch.full((7, 5, rank + 288), -9.0)
        check(run(case, splits, out=base[:6, :4, 11:end].transpose(0, 1), tile=tile), case)
        assert bool((base[6] == -9).all() and (base[:, 4] == -9).all() and (base[..., end:] == -9).all())
    parts = case.but(q=case.q[..., :rank].contiguous(), options={"q_rope": case.q[..., rank:]})
    assert torch.equal(run(parts, tile=tile)[0], run(case, tile=tile)[0])


@of_kernels
@pytest.mark.parametrize("splits", [1, 2])
def test_invalid_counts_and_lists(runs, kernel, rank, splits):
    """Negative counts, counts beyond the list, lists that do not exist: read as no row, all rows, no row."""
    case = make_case("fp4", rank=rank, counts=((-3,), (2**31 - 1,), (64,), (9,), (5,)), width=64)
    decode(case, splits, tile=tile_of(kernel, case))
    strange = case.but(list_index=torch.tensor([0, 1, 5, -1, 2**31 - 1], dtype=torch.int32))
    out, lse = decode(strange, splits, tile=tile_of(kernel, case))
    assert bool((lse[[0, 2, 3, 4]] == float("-inf")).all())
    assert not out[[0, 2, 3, 4]].any()
    out, lse = run(case.but(kv_indices=case.kv_indices[:, :0]), splits, tile=tile_of(kernel, case))
    assert bool((lse == float("-inf")).all())
    assert not out.any()


@pytest.mark.quick
@pytest.mark.parametrize("layout", ["bf16", "fp4"])
def test_a_list_of_one_part_is_not_merged(runs, layout):
    """Of the Triton kernel; `test_ptx_gluon` has the others."""
    case = make_case(layout, rank=128, counts=((319,), (0,), (129,), (1,), (64,), (65,)), width=319, heads=3)
    tile = tile_of("triton", case)
    check_parts(as_read(case, tile), functools.partial(run, tile=tile), 3, tile.block_rows)


# No shrinking, and one fixture for all examples.
@settings(
    max_examples=20,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_lists(runs, data):
    """Any counts, holes anywhere, any number of queries per list and of splits."""
    queries = data.draw(st.integers(1, 4), label="queries")
    group = st.tuples(*[st.integers(-1, 150)] * queries)
    counts = data.draw(st.lists(group, min_size=1, max_size=3), label="counts")
    layout = data.draw(st.sampled_from(oracle.LAYOUTS), label="layout")
    heads = data.draw(st.sampled_from([1, 3, 7]), label="heads")
    seed = data.draw(st.integers(0, 99), label="seed")
    case = make_case(layout, rank=128, rope=0, heads=heads, counts=tuple(counts), width=140, seed=seed)
    holes = data.draw(st.floats(0, 1), label="holes")
    random = torch.Generator().manual_seed(seed)
    case.kv_indices[torch.rand(case.kv_indices.shape, generator=random) < holes] = -1
    splits, min_blocks = data.draw(st.integers(1, 5), label="splits"), data.draw(st.integers(1, 2))
    decode(case, splits, min_blocks=min_blocks, tile=tile_of("triton", case))


@of_kernels
@pytest.mark.parametrize("arrangement", ["layer_major", "page_major"])
def test_a_rank_attends_its_own_slots(runs, kernel, rank, arrangement):
    """The second of three ranks of decode context parallelism; its list is not aligned to 16 bytes."""
    case = make_case("fp4", rank=rank, counts=COUNTS, arrangement=arrangement).of_rank(1, 3)
    decode(case, 2, tile=tile_of(kernel, case))


@of_kernels
def test_slots_whose_row_number_overflows_are_skipped(runs, kernel, rank):
    """int64 slots times rows per page leave 64 bits; the row number is negative then."""
    case = make_case("fp4", rank=rank, arrangement="page_major", counts=((9,),))
    ids = case.kv_indices.long()
    plain = case.but(kv_indices=ids.clone())
    plain.kv_indices[0, :2] = -1
    ids[0, :2] = torch.tensor([4611686018427387904, 6148914691236517206])
    tile = tile_of(kernel, case)
    found, wanted = run(case.but(kv_indices=ids), tile=tile), run(plain, tile=tile)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


@of_kernels
def test_a_query_of_nans(runs, kernel, rank):
    """Its result is NaN where it sees rows; results of the other queries of its tile are not."""
    case = make_case("fp4", rank=rank, heads=2, counts=((200,), (150,)))
    case.q[0, 1] = float("nan")
    out, lse = run(case, 2, tile=tile_of(kernel, case))
    assert bool(out[0, 1].isnan().all())
    assert bool(lse[0, 1].isnan())
    assert bool(out[1].isfinite().all())
    assert bool(out[0, 0].isfinite().all())


@pytest.mark.parametrize(("layout", "kernel", "rank"), [("fp4", "triton", 128), *OF_GLUON])
def test_a_pool_beyond_31_bits(runs, layout, kernel, rank):
    """Rows a gigabyte apart; only the touched pages take memory."""
    case = make_case(layout, rank=rank, heads=4, counts=((3,),), width=3, holes=False, slots=4)
    stride = 2**30 + 4096
    try:
        pool = torch.empty(4 * stride, dtype=torch.uint8).as_strided(case.pool.shape, (stride, 1))
    except RuntimeError:
        pytest.skip("the system refuses 4 GiB of unused address space")
    pool.copy_(case.pool)
    with runs.using(global_races=0):  # race detection would reserve 8 bytes for each byte
        decode(case.but(pool=pool), tile=tile_of(kernel, case))


@pytest.mark.parametrize("splits", [2, 33, pytest.param(128, marks=pytest.mark.quick)])
def test_the_merge(runs, splits):
    """Partial results of very different weights, some without rows, some not written; against float64.

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
