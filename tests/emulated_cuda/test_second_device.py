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


FMT = oracle.row_format("fp4", 512, 64)


def stored():
    """Rows, and the arguments with which they were stored."""
    rows = torch.zeros(8, FMT.row_bytes, dtype=torch.uint8, device="cuda")
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(2, size, generator=generator).bfloat16().cuda() for size in (512, 64)]
    given = rows, torch.tensor([3, 6], device="cuda"), *parts, FMT
    store_rows(*given)
    return rows, given


def read_back():
    rows, (_, slots, *_) = stored()
    return rows.cpu(), [part.cpu() for part in gather_rows(rows, slots, FMT)]


def test_the_codec_launches_on_the_device_of_its_tensors(on_second_device):
    rows, parts = read_back()
    assert torch.cuda.current_device() == 1
    torch.cuda.set_device(0)
    wanted, wanted_parts = read_back()
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
    rows, given = stored()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        store_rows(*given)
    wanted = rows.cpu()
    rows.zero_()
    graph.replay()
    assert torch.equal(rows.cpu(), wanted)
    given[2][0, 5] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        store_rows(*given)
