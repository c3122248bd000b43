"""Branches for a process whose current device is not that of its tensors, as with several GPUs."""

import codec_oracle as oracle
import pytest
import torch
from decode_cases import check, make_case

from sgl_kvpool.attention.decode import mla_decode
from sgl_kvpool.codec import gather_rows, store_rows

pytest.importorskip("emulated_cuda.operators")
pytestmark = [pytest.mark.gpu, pytest.mark.quick]


@pytest.fixture
def on_second_device():
    torch.cuda.set_device(1)
    yield
    torch.cuda.set_device(0)


def stored(fmt):
    rows = torch.zeros(8, fmt.row_bytes, dtype=torch.uint8, device="cuda")
    generator = torch.Generator().manual_seed(3)
    k, rope = (torch.randn(2, size, generator=generator).bfloat16().cuda() for size in (512, 64))
    slots = torch.tensor([3, 6], device="cuda")
    store_rows(rows, slots, k, rope, fmt)
    return rows.cpu(), [part.cpu() for part in gather_rows(rows, slots, fmt)]


def test_the_codec_launches_on_the_device_of_its_tensors(on_second_device):
    fmt = oracle.row_format("fp4", 512, 64)
    rows, parts = stored(fmt)
    assert torch.cuda.current_device() == 1
    torch.cuda.set_device(0)
    wanted, wanted_parts = stored(fmt)
    assert rows.any()
    assert torch.equal(rows, wanted)
    assert all(map(torch.equal, parts, wanted_parts))


def test_decoding_launches_on_the_device_of_its_tensors(on_second_device):
    case = make_case("fp4", counts=((70,), (9,)), heads=16)
    positional, keywords = case.to("cuda").arguments
    check(mla_decode(*positional, **keywords), case)
    assert torch.cuda.current_device() == 1


def test_finite_values_are_not_checked_in_a_capture(monkeypatch):
    """The check reads a result on the host, which a capture forbids; the eager warm-up has been checked."""
    monkeypatch.setenv("KVPOOL_CHECK_FINITE", "1")
    fmt = oracle.row_format("fp4", 512, 64)
    rows = torch.zeros(8, fmt.row_bytes, dtype=torch.uint8, device="cuda")
    k, rope = torch.randn(2, 512).bfloat16().cuda(), torch.randn(2, 64).bfloat16().cuda()
    slots = torch.tensor([3, 6], device="cuda")
    store_rows(rows, slots, k, rope, fmt)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        store_rows(rows, slots, k, rope, fmt)
    wanted = rows.cpu()
    rows.zero_()
    graph.replay()
    assert torch.equal(rows.cpu(), wanted)
    k[0, 5] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        store_rows(rows, slots, k, rope, fmt)
