"""`mla_decode` on a GPU against a float64 oracle; needs no SGLang."""

import itertools

import codec_oracle as oracle
import decode_cases
import pytest
import torch
from decode_cases import as_read, make_case
from engine_cases import quick

from sgl_kvpool.attention.decode import DecodeWorkspace, mla_decode, workspace_bytes
from sgl_kvpool.attention.decode_config import decode_kernel_of, tile_config

pytestmark = pytest.mark.gpu
ARRANGEMENTS = ["layer_major", "token_major", "page_major"]
#: Rank, rope values and heads.
GEOMETRIES = ((256, 64, 5), (128, 0, 5), (384, 64, 5), (512, 0, 5), (512, 0, 64))
VERIFY = ((66, 67, 68), (129, 2, 131), (0, 0, 1))


def poisoned(case):
    """Outputs and workspace, full of NaN."""
    tokens, heads, _ = case.q.shape
    properties = torch.cuda.get_device_properties(case.q.device)
    size = workspace_bytes(
        case.fmt, heads, tokens, case.kv_indices.shape[1], queries_per_list=case.queries_per_list,
        sm_count=properties.multi_processor_count,
    )  # fmt: skip
    workspace, nan = DecodeWorkspace(size, "cuda"), float("nan")
    workspace.buffer.fill_(nan)
    out = torch.full((tokens, heads, case.fmt.kv_lora_rank), nan, dtype=case.q.dtype, device="cuda")
    lse = torch.full((tokens, heads), nan, device="cuda")
    return {"out": out, "lse": lse, "workspace": workspace}


def run(case):
    """Result of the kernels for a case on the CPU."""
    there = case.to("cuda")
    positional, keywords = there.arguments
    return mla_decode(*positional, **keywords, **poisoned(there))


def check(found, case):
    query_heads = case.q.shape[1] * case.queries_per_list
    tile = tile_config(case.fmt.layout, query_heads, decode_kernel_of(case.fmt))
    decode_cases.check(found, as_read(case, tile))


@pytest.mark.parametrize(
    ("layout", "arrangement"),
    quick(itertools.product(oracle.LAYOUTS, ARRANGEMENTS), [("bf16", "layer_major"), ("fp4", "page_major")]),
)
def test_layouts_and_arrangements(layout, arrangement):
    case = make_case(layout, arrangement=arrangement, counts=VERIFY, heads=8)
    check(run(case), case)


@pytest.mark.parametrize(
    ("layout", "heads"),
    quick(
        itertools.product(oracle.LAYOUTS, [1, 8, 16, 32, 64, 72, 128]), [("fp4", 72), ("fp8_block_scale", 72)]
    ),
)
def test_heads_and_long_lists(layout, heads):
    case = make_case(layout, heads=heads, counts=((1027,), (64,), (0,), (3001,)), width=4096)
    check(run(case), case)


@pytest.mark.parametrize(
    ("layout", "rank", "rope", "heads"),
    quick([(layout, *one) for layout in oracle.LAYOUTS for one in GEOMETRIES], [("fp4", 512, 0, 64)]),
)
def test_geometries(layout, rank, rope, heads):
    case = make_case(layout, rank=rank, rope=rope, heads=heads, counts=VERIFY, seed=3)
    check(run(case), case)


@pytest.mark.parametrize("page_size", [1, 2, 61, 64])
@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_page_sizes(layout, page_size):
    case = make_case(layout, rank=128, arrangement="page_major", page_size=page_size, ids=torch.int64)
    check(run(case), case)


@pytest.mark.parametrize("layout", quick([(one,) for one in oracle.LAYOUTS], [("fp4",)]))
def test_captured_graph_follows_counts_and_lists(layout):
    """Replayed for other counts, lists and queries, a graph gives what an eager call gives, bit by bit."""
    case = make_case(layout, counts=((900,), (64,), (130,)), width=1000, heads=16).to("cuda")
    index = torch.tensor([0, 1, 2], dtype=torch.int32, device="cuda")
    case = case.but(list_index=index)
    positional, keywords = case.arguments
    options = poisoned(case)
    mla_decode(*positional, **keywords, **options)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla_decode(*positional, **keywords, **options)
    for counts, lists in (([5, 900, 0], [2, 0, 1]), ([129, 1, 64], [2, 2, 1]), ([0, 0, 0], [0, 1, 2])):
        case.kv_lens.copy_(torch.tensor(counts))
        index.copy_(torch.tensor(lists))
        case.q.copy_(torch.randn(case.q.shape))
        for name in ("out", "lse"):
            options[name].fill_(float("nan"))
        options["workspace"].buffer.fill_(float("nan"))
        graph.replay()
        eager = mla_decode(*positional, **keywords)
        assert torch.equal(options["out"], eager[0])
        assert torch.equal(options["lse"], eager[1])


@pytest.mark.quick
def test_a_call_with_room_allocates_nothing():
    case = make_case("fp4", counts=((900,), (64,)), width=1000, heads=16).to("cuda")
    positional, keywords = case.arguments
    options = poisoned(case)
    mla_decode(*positional, **keywords, **options)  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    mla_decode(*positional, **keywords, **options)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.quick
def test_what_the_kernel_cannot_read_is_refused():
    case = make_case("fp4", rank=128, rope=0, counts=((5,),)).to("cuda")
    positional, keywords = case.arguments
    odd = torch.zeros(9, 88, dtype=torch.uint8, device="cuda")[:, : case.fmt.row_bytes]
    with pytest.raises(ValueError, match="multiples of 16"):
        mla_decode(positional[0], odd, *positional[2:], **keywords)
    with pytest.raises(TypeError, match="allowed on cuda: bfloat16, float16"):
        mla_decode(positional[0].float(), *positional[1:], **keywords)
    long = torch.full((1, 9000), -1, dtype=torch.int32, device="cuda")
    options = {"workspace": DecodeWorkspace(4, "cuda")}
    with pytest.raises(ValueError, match="size it with workspace_bytes"):
        mla_decode(*positional[:2], long, *positional[3:], **keywords, **options)
