"""`mla_decode`'s kernels in Triton's interpreter, and its CPU path, against a float64 oracle.

On a machine with a GPU the interpreter is off; ``tests/gpu/test_mla_decode_gpu.py`` then makes this
comparison.
"""

import os
from unittest import mock

import codec_oracle as oracle
import pytest
import torch
from decode_cases import Case, check, check_parts, every_code, make_case
from decode_oracle import mla_decode_oracle
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sgl_kvpool.attention import compiled
from sgl_kvpool.attention.decode import mla_decode
from sgl_kvpool.attention.decode_config import tile_config
from sgl_kvpool.layout import Encoding

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET", "0") == "0":
    pytest.skip("needs TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)

from decode_interpreted import run

pytestmark = [
    pytest.mark.slow,  # the interpreter takes seconds per case
    # numpy's warnings inside the interpreter, for a logarithm of 0 and exponentials of -inf on purpose
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning"),
]
ARRANGEMENTS = ["layer_major", "token_major", "page_major"]
VERIFY = ((66, 67, 68), (129, 2, 131), (0, 0, 1))  # three queries per list, as in MTP verification


def on_cpu(case, **options):
    positional, keywords = case.arguments
    return mla_decode(*positional, **keywords, **options)


def check_everything(case, splits=1):
    """Kernels, CPU path and `decode_oracle`, the float64 oracle in torch."""
    check(run(case, splits), case)
    positional, keywords = case.arguments
    check(on_cpu(case), case, rounding=0)
    with mock.patch.object(compiled, "module", return_value=None):  # as where nothing compiles
        check(on_cpu(case), case, rounding=0)
    check(mla_decode_oracle(*positional, **keywords), case, rounding=0)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_layouts_and_arrangements(layout, arrangement):
    # A latent of 512 takes the interpreter 20 seconds, so one arrangement alone covers its chunks.
    rank = 512 if arrangement == "layer_major" else 128
    case = make_case(layout, rank=rank, arrangement=arrangement, counts=VERIFY, heads=8)
    check_everything(case, splits=2)


@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_heads(layout, heads):
    """One query head in a tile of 8, a full tile of 16, four tiles of 32; other bytes in unused rows."""
    check_everything(make_case(layout, heads=heads, counts=((67,),), fill=0x7F))


@pytest.mark.parametrize(("rank", "rope"), [(256, 64), (128, 0), (384, 64)])
@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_geometries(layout, rank, rope):
    check_everything(make_case(layout, rank=rank, rope=rope, heads=5, counts=VERIFY, seed=3), splits=3)


@pytest.mark.parametrize("page_size", [1, 2, 61, 64])
@pytest.mark.parametrize("layout", ["bf16", "fp4"])
def test_page_sizes(layout, page_size):
    case = make_case(layout, rank=128, arrangement="page_major", page_size=page_size, ids=torch.int64)
    assert (case.page is None) == (page_size == 1)
    check_everything(case)


@pytest.mark.parametrize("arrangement", ["layer_major", "page_major"])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (2, 3), (7, 8)])
@pytest.mark.parametrize("layout", ["bf16", "fp4"])
def test_a_rank_attends_its_own_slots(layout, rank, ranks, arrangement):
    """Decode context parallelism: every `ranks`-th entry of a list; -1 must not become row 0."""
    case = make_case(layout, rank=128, heads=3, counts=VERIFY, arrangement=arrangement, ids=torch.int64)
    check_everything(case.of_rank(rank, ranks))


@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_splits_give_the_same(layout):
    """1, 2 and 7 splits of lists of up to 5 blocks (`fp8_block_scale`: 3); short ones have empty splits."""
    case = make_case(layout, rank=256, counts=((319,), (0,), (129,), (1,)), width=319, heads=3)
    found = [run(case, splits) for splits in (1, 2, 7)]
    for out, lse in found:
        check((out, lse), case)
    check(run(case, 7, min_blocks=2), case)


@pytest.mark.parametrize("layout", ["bf16", "fp4"])
def test_a_list_of_one_part_is_not_merged(layout):
    case = make_case(layout, rank=128, counts=((319,), (0,), (129,), (1,), (64,), (65,)), width=319, heads=3)
    check_parts(case, run, 3, tile_config(case.fmt.layout, 3, "triton").block_rows)


@pytest.mark.parametrize("layout", oracle.NARROW)
def test_every_code_and_every_scale(layout):
    """A list of one row has that row's latent as its result, exactly: up to 6 * 61440 for FP4."""
    fmt, pool, values = every_code(layout)
    ids = torch.arange(0, 36, 4)[:, None]  # each row has every code, all together every scale of FP4
    q = torch.zeros(len(ids), 1, 512, dtype=torch.bfloat16)
    out, lse = run(Case(layout, fmt, q, pool, ids, torch.ones_like(ids[:, 0]), values.numpy()))
    torch.testing.assert_close(out[:, 0], values[ids[:, 0]], rtol=0, atol=0)
    assert not lse.any()


@pytest.mark.parametrize("k_scale", [0.37, 24.0])
def test_k_scale(k_scale):
    case = make_case("fp8", rank=256, k_scale=k_scale, heads=16)
    check_everything(case, splits=2)
    # Ignoring k_scale exceeds the tolerance.
    with pytest.raises(AssertionError):
        check(run(case.but(k_scale=1.0)), case)


@pytest.mark.parametrize("layout", oracle.WITH_SCALES)
def test_another_scale_would_be_noticed(layout):
    """One scale of one row that is off by its smallest step, or by an eighth at most in fp32, is noticed."""
    case = make_case(layout, rank=128, rope=0, counts=((40,),), holes=False)
    used = case.kv_indices[0, 3]
    at = case.fmt.scale.offset_bytes
    is_fp32 = case.fmt.scale.encoding is Encoding.FP32
    case.pool[used, at + 2 if is_fp32 else at] += 16 if is_fp32 else 1
    with pytest.raises(AssertionError):
        check(run(case), case)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_strides_and_index_types(ids):
    """Strided queries, lists and output, both index types, and a list_index that names one list twice."""
    case = make_case("fp4", rank=256, heads=6, counts=((70,), (3,), (131,)), ids=ids)
    wide = torch.randn(4, 9, 2, 400).bfloat16()
    apart = torch.stack([case.kv_indices, torch.full_like(case.kv_indices, -3)], -1).flatten(1)[:, ::2]
    case = case.but(
        q=wide[:, 2:8, 1, 40:360],
        kv_indices=apart,
        list_index=torch.tensor([2, 0, 2, 1], dtype=ids),
        kv_lens=torch.tensor([131, 44, 70, 3], dtype=ids),
    )
    for splits in (1, 2):
        base = torch.full((7, 5, 300), -9.0)
        out = base[:6, :4, 11:267].transpose(0, 1)
        check(run(case, splits, out=out), case)
        assert bool((base[6] == -9).all() and (base[:, 4] == -9).all() and (base[..., 267:] == -9).all())
    check(on_cpu(case, out=out.bfloat16()), case, rounding=0)
    q, q_rope = case.q[..., :256].contiguous(), case.q[..., 256:]
    parts = case.but(q=q, options={"q_rope": q_rope})
    assert torch.equal(run(parts)[0], run(case)[0])
    assert torch.equal(on_cpu(parts)[0], on_cpu(case)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_query_types(dtype):
    """The kernel rounds float16 and float32 queries to bfloat16; this test rounds them beforehand."""
    case = make_case("fp8_block_scale", rank=128, heads=2)
    case = case.but(q=case.q.to(dtype))
    check(run(case, 2, out_dtype=dtype), case)
    out, lse = on_cpu(case)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    check((out, lse), case, rounding=0)


def test_invalid_counts_and_lists():
    """Negative counts, counts beyond the list, lists that do not exist: read as no row, all rows, no row."""
    case = make_case("fp4", rank=128, counts=((-3,), (2**31 - 1,), (64,), (9,), (5,)), width=64)
    check_everything(case)
    case = case.but(list_index=torch.tensor([0, 1, 5, -1, 2**31 - 1], dtype=torch.int32))
    for splits in (1, 2):
        out, lse = run(case, splits)
        check((out, lse), case)
        assert bool((lse[[0, 2, 3, 4]] == float("-inf")).all())
        assert not out[[0, 2, 3, 4]].any()
    empty = case.but(list_index=None, kv_indices=case.kv_indices[:, :0])
    for out, lse in (run(empty), on_cpu(empty)):
        assert bool((lse == float("-inf")).all())
        assert not out.any()


def test_the_kernel_skips_slots_whose_row_number_overflows():
    """int64 slots times rows per page leave 64 bits; the row number is negative then."""
    case = make_case("bf16", rank=128, arrangement="page_major", counts=((9,),))
    ids = case.kv_indices.long()
    plain = case.but(kv_indices=ids.clone())
    plain.kv_indices[0, :2] = -1
    ids[0, :2] = torch.tensor([4611686018427387904, 6148914691236517206])
    found, wanted = run(case.but(kv_indices=ids)), run(plain)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("splits", [1, 3])
def test_a_query_of_nans_gives_nans(splits):
    case = make_case("fp4", rank=128, heads=2, counts=((200,), (150,)))
    case.q[0, 1] = float("nan")
    out, lse = run(case, splits)
    assert bool(out[0, 1].isnan().all())
    assert bool(lse[0, 1].isnan())
    assert bool(out[1].isfinite().all())


@pytest.mark.parametrize("page", [None, (4, 12)])
def test_the_kernel_skips_slots_beyond_the_pool(page):
    case = make_case("bf16", rank=128, arrangement="page_major" if page else "layer_major", counts=((9,),))
    assert case.page == page
    case.kv_indices[0, :3] = torch.tensor([len(case.values), 2**31 - 1, 2**31 - 4])
    check(run(case), case)
    with pytest.raises(IndexError, match="outside of a pool"):
        on_cpu(case)


# No shrinking: the interpreter takes minutes for it.
@settings(max_examples=20, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data())
def test_any_lists(data):
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
    check(run(case, data.draw(st.integers(1, 5), label="splits"), data.draw(st.integers(1, 2))), case)
    check(on_cpu(case), case, rounding=0)
