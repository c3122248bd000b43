"""`mla_decode` on a CPU, in C++ and in torch, against a float64 oracle in numpy."""

from unittest import mock

import codec_oracle as oracle
import pytest
import torch
from cases import crossed
from decode_cases import check, make_case

from sgl_kvpool.attention import cpu
from sgl_kvpool.attention.decode import mla_decode

ARRANGEMENTS = ["layer_major", "token_major", "page_major"]
VERIFY = ((66, 67, 68), (129, 2, 131), (0, 0, 1))  # three queries per list, as in MTP verification


def on_cpu(case, **options):
    positional, keywords = case.arguments
    return mla_decode(*positional, **keywords, **options)


def check_everything(case):
    """C++, and torch with long lists in several chunks."""
    check(on_cpu(case), case, rounding=0)
    with mock.patch.multiple(cpu, module=lambda: None, _CHUNK_ROWS=50):  # as where nothing compiles
        check(on_cpu(case), case, rounding=0)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize(("layout", "page_size"), crossed(oracle.LAYOUTS, [4, 1, 2, 61, 64]))
def test_layouts_arrangements_and_page_sizes(layout, page_size, arrangement):
    case = make_case(layout, arrangement=arrangement, page_size=page_size, counts=VERIFY, heads=8)
    assert (case.page is None) == (arrangement != "page_major" or page_size == 1)
    check_everything(case)


@pytest.mark.parametrize("arrangement", ["layer_major", "page_major"])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (2, 3), (7, 8)])
@pytest.mark.parametrize("layout", ["bf16", "fp4"])
def test_a_rank_attends_its_own_slots(layout, rank, ranks, arrangement):
    """Decode context parallelism: every `ranks`-th entry of a list; -1 must not become row 0."""
    case = make_case(layout, rank=128, heads=3, counts=VERIFY, arrangement=arrangement, ids=torch.int64)
    check_everything(case.of_rank(rank, ranks))


@pytest.mark.parametrize("k_scale", [0.37, 24.0])
def test_k_scale(k_scale):
    case = make_case("fp8", rank=256, k_scale=k_scale, heads=16)
    check_everything(case)
    # Ignoring k_scale exceeds the tolerance.
    with pytest.raises(AssertionError):
        check(on_cpu(case.but(k_scale=1.0)), case)


@pytest.mark.usefixtures("each_attention")
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
    base = torch.full((7, 5, 300), -9.0).bfloat16()
    check(on_cpu(case, out=base[:6, :4, 11:267].transpose(0, 1)), case, rounding=0)
    outside = base[6], base[:, 4], base[..., :11], base[..., 267:]
    assert all(bool((part == -9).all()) for part in outside)
    q, q_rope = case.q[..., :256].contiguous(), case.q[..., 256:]
    assert torch.equal(on_cpu(case.but(q=q, options={"q_rope": q_rope}))[0], on_cpu(case)[0])


@pytest.mark.usefixtures("each_attention")
def test_invalid_counts_and_lists():
    """Negative counts and counts beyond the list are read as no row and all rows; lists have to exist."""
    case = make_case("fp4", rank=128, counts=((-3,), (2**31 - 1,), (64,), (9,), (5,)), width=64)
    check(on_cpu(case), case, rounding=0)
    strange = case.but(list_index=torch.tensor([0, 1, 5, -1, 2**31 - 1], dtype=torch.int32))
    with pytest.raises(IndexError, match=r"list_index\[2\] is 5, kv_indices has 5 lists"):
        on_cpu(strange)
    out, lse = on_cpu(case.but(kv_indices=case.kv_indices[:, :0]))
    assert bool((lse == float("-inf")).all())
    assert not out.any()


@pytest.mark.usefixtures("each_attention")
@pytest.mark.parametrize("page", [None, (4, 12)])
@pytest.mark.parametrize("slot", [None, 2**61, 2**62, 2**63 - 1])
def test_slots_beyond_the_pool_are_refused(page, slot):
    """The kernels skip them: tests/ptxrun/test_ptx_decode.py."""
    case = make_case("bf16", rank=128, arrangement="page_major" if page else "layer_major", counts=((9,),))
    assert case.page == page
    if slot is not None:
        case = case.but(kv_indices=case.kv_indices.long())
    case.kv_indices[0, 0] = len(case.values) if slot is None else slot
    with pytest.raises(IndexError, match="outside of a pool"):
        on_cpu(case)
