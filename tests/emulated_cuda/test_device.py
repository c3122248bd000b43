"""What the emulated device forbids, beyond the mistakes of the other tests here. Runs with `--emulated`."""

import gc
import math
import re
from fnmatch import fnmatch

import pytest
import torch
import torch.distributed as dist
from test_cuda_backend_gpu import no_waits

emulated = pytest.importorskip("emulated_cuda.operators")
from emulated_cuda import libcudart, libraries, model_operators, models, runtime  # noqa: E402
from emulated_cuda.graphs import CaptureFault  # noqa: E402
from emulated_cuda.memory import MemoryFault  # noqa: E402
from emulated_cuda.order import OrderFault  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.quick]


@pytest.fixture
def stream():
    torch.cuda.synchronize()
    return torch.cuda.Stream()


def test_tensors_of_two_devices_are_refused():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="cuda") + torch.ones(3)
    with pytest.raises(TypeError, match="cuda:0"):
        torch.ones(3, device="cuda").numpy()


@pytest.mark.parametrize(
    "make", [torch.tensor, torch.as_tensor, lambda x, **options: torch.full((), x, **options)]
)
def test_values_become_tensors_of_the_default_device(make):
    with torch.device("cuda"):
        assert make(2.0).is_cuda
        assert not make(2.0, device="cpu").is_cuda
        with torch.device("cpu"):
            assert not make(2.0).is_cuda
    assert not make(2.0).is_cuda


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.tolist(),
        lambda x: bool((x > 0).any()),
        lambda x: torch.tensor([1, 2], device="cuda"),
        lambda x: torch.ones(2).to("cuda", non_blocking=True),
        lambda x: x.copy_(torch.ones(5)),
        lambda x: torch.repeat_interleave(torch.arange(5, device="cuda"), x.long()),
    ],
)
def test_waits_of_the_host_are_found(wait):
    x = torch.ones(5, device="cuda")
    with pytest.raises(emulated.HostWait), no_waits():
        wait(x)


def test_a_number_is_copied_without_a_wait():
    """As SGLang's loader copies k_scales."""
    x = torch.nn.Parameter(torch.zeros((), device="cuda"), requires_grad=False)
    with no_waits():
        x.copy_(0.5)
    assert x.item() == 0.5


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_of_index_operators_are_told_apart(stream, dim):
    """A pool is one storage that two streams use at once: only the rows of an index are touched.

    Slots of rows come first, those of states behind layers.
    """
    before = (slice(None),) * dim
    x = torch.zeros(*(3,) * dim, 4096, 416, dtype=torch.uint8, device="cuda")
    mine, other = (torch.tensor(rows, device="cuda") for rows in ([1, 5, 900], [2, 6, 901]))
    values = torch.ones(*(3,) * dim, 3, 416, dtype=torch.uint8, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.index_copy_(dim, mine, values)
    x[*before, other] = values
    x.index_fill_(dim, other, 0)
    x[*before, other].clone()
    with pytest.raises(OrderFault):
        x[*before, mine].clone()
    torch.cuda.synchronize()


@pytest.mark.parametrize("make", [torch.empty_like, torch.ones_like, lambda x: x.new_zeros(4)])
def test_a_tensor_of_anothers_shape_reads_nothing(stream, make):
    x = torch.ones(4, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.add_(1)
    make(x).add_(1)
    with pytest.raises(OrderFault):
        x.clone()
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.ones(3).to("cuda"),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: torch.ones(3).pin_memory(),
    ],
)
def test_what_a_capture_forbids(forbidden):
    x = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    with pytest.raises(CaptureFault, match="capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        forbidden(x)


def test_a_graph_that_uses_freed_memory_is_found():
    gc.collect()  # other tests' blocks, which would end the quarantine of this one's
    x = torch.ones(1000, device="cuda")
    held = [x]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = held[0] * 2
    graph.replay()
    assert out[0].item() == 2
    del x
    held.clear()
    with pytest.raises(MemoryFault, match="freed"):
        graph.replay()


def test_another_stream_inside_a_capture_has_to_belong_to_it(stream):
    x = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    with (
        pytest.raises(CaptureFault, match="does not belong"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        torch.cuda.stream(stream),
    ):
        x.add_(1)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_a_collective_accesses_until_wait(asynchronous):
    """As NCCL's: a stream of its own for `async_op=True`, also for what it writes."""
    out, x = torch.zeros(3, device="cuda"), torch.ones(3, device="cuda")
    work = dist.all_gather_into_tensor(out, x, async_op=asynchronous)
    if asynchronous:
        with pytest.raises(OrderFault, match="reads on the default stream what _allgather_base_ .* wrote"):
            out.clone()
        with pytest.raises(OrderFault, match="writes on the default stream what _allgather_base_ .* read"):
            x.add_(1)
        work.wait()
    assert out.tolist() == [1, 1, 1]
    x.add_(1)


def late(module):
    """Names in a module's table of replaced functions, whose last column is what each accesses late."""
    lines = [line.strip("|").split("|") for line in module.__doc__.splitlines() if line.startswith("|")]
    assert "accessed late" in lines[0][-1]
    assert all(len(row) == len(lines[0]) and row[-1].strip() for row in lines)
    return [name for *cells, _ in lines[2:] for name in re.findall("`([^`]+)`", "".join(cells[:2]))]


def test_every_replaced_function_says_what_it_accesses_late():
    stated = late(libraries) + late(runtime) + late(models)
    modules = ("libraries", "graphs", "model_operators", "indexer_operators")
    own = [f"emulated_cuda.{name}" for name in modules]
    names = [name for name, function in libraries.OPERATORS.items() if function.__module__ in own]
    names += [*libcudart._FUNCTIONS, "cudaHostRegister", "cudaHostUnregister"]
    assert [name for name in names if not any(fnmatch(name, pattern) for pattern in stated)] == []


def test_a_graph_of_an_operator_that_returns_its_arguments():
    """FlashMLA returns its schedules after two new results, which a replay writes."""
    pytest.importorskip("flash_mla")
    q = torch.ones(1, 1, 64, 576, dtype=torch.bfloat16, device="cuda")
    kv = torch.zeros(2, 64, 1, 656, dtype=torch.uint8, device="cuda")
    lists = torch.arange(64, dtype=torch.int32, device="cuda").view(1, 1, 64)
    schedules = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (8, 2)]
    torch.cuda.synchronize()
    graph, decode = torch.cuda.CUDAGraph(), torch.ops.flash_mla_legacy.sparse_decode_fwd.default
    with torch.cuda.graph(graph):
        _, lse, *_ = decode(q, kv, lists, None, None, *schedules, None, None, None, 512, 1.0)
    graph.replay()
    assert lse.flatten().tolist() == pytest.approx([math.log(64)] * 64)


def test_lists_of_slots_of_several_requests():
    """Of 2048 entries, by each request's table; the second request has two queries."""
    sgl_kernel = pytest.importorskip("sgl_kernel")
    scores = torch.randn(3, 4096, generator=torch.Generator().manual_seed(1))
    slots = torch.stack([torch.arange(4096), 10000 + torch.arange(4096).flip(0)]).int()
    lengths, starts, queries = ([7, 2050, 2040], [0, 100, 100], [0, 1, 3])
    given = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in (lengths, queries, starts)]
    found = sgl_kernel.fast_topk_transform_fused(
        scores.cuda(), given[0], slots.cuda(), given[1], 2048, row_starts=given[2]
    ).cpu()
    for row, request in enumerate((0, 1, 1)):
        part = scores[row, starts[row] : starts[row] + lengths[row]]
        wanted = slots[request][part.argsort(descending=True)[:2048]].tolist()
        assert sorted(found[row].tolist()) == sorted(wanted + [-1] * (2048 - len(wanted)))


def test_sglangs_rows_of_656_bytes_are_quantised():
    """Its kernel converts pairs of which one is a register that was never written, which no GPU minds."""
    ops = pytest.importorskip("sglang.kernels.ops.quantization.dsa_quant_k_cache")
    nope, rope = (torch.randn(5, 1, width, device="cuda").bfloat16() for width in (512, 64))
    latent, rest = ops.quantize_k_cache_separate(nope, rope)
    latent, nope = latent.cpu().view(5, -1), nope.cpu().view(5, 4, 128).float()
    scales = latent[:, 512:].contiguous().view(torch.float32)
    assert torch.equal(scales, nope.abs().amax(-1) / 448)
    codes = latent[:, :512].contiguous().view(torch.float8_e4m3fn).float().view(5, 4, 128)
    torch.testing.assert_close(codes * scales[..., None], nope, rtol=2**-4, atol=1e-2)
    assert torch.equal(rest.cpu().view(torch.bfloat16).view(5, -1), rope.cpu().view(5, -1))


@pytest.mark.parametrize(("weighted", "top_k"), [(False, 2), (True, 1)])
def test_experts_are_those_of_the_kernel_they_replace(weighted, top_k):
    """`fused_moe_kernel` in the emulator, with experts of more and less than a block, and of none."""
    from sglang.kernels.ops.moe import fused_moe_triton_kernels as kernels
    from triton import language as tl

    draw = torch.Generator().manual_seed(3)
    chosen = torch.tensor([[0, 3], [3, 0], [3, -1], *[[3, 0]] * 18], dtype=torch.int32)
    a = torch.randn(chosen.numel() // top_k, 128, generator=draw).bfloat16().cuda()
    b = torch.randn(4, 64, 128, generator=draw).bfloat16().cuda()
    weights, block = torch.rand(chosen.shape, generator=draw).cuda(), 16
    order, experts, count = (torch.zeros(n, dtype=torch.int32) for n in (112, 7, 1))
    model_operators._moe_align(chosen, 5, block, order, experts, count, None)
    found = []
    for invoke in (kernels.invoke_fused_moe_kernel, kernels.invoke_fused_moe_kernel.__wrapped__):
        out = torch.full((*chosen.shape, 64), torch.nan, dtype=torch.bfloat16, device="cuda")
        invoke(
            *(a, b, None, out, None, None, None, weights, chosen.cuda()),
            *(order.cuda(), experts.cuda(), count.cuda(), weighted, top_k),
            {"BLOCK_SIZE_M": block, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1},
            *(tl.bfloat16, False, False, False, False, False),
        )
        found.append(out.cpu().float())
    assert found[1].abs().max() > 10
    torch.testing.assert_close(*found, rtol=2**-7, atol=1e-3)
