"""The self-check's small decode, compared with float64; on CUDA: tests/emulated_cuda/test_self_check.py."""

import codec_oracle as oracle
import pytest
import torch
from pools import dsa_pool
from test_backend import HEADS, PLACED, SCALE, Case

from sgl_kvpool.attention import cpu
from sgl_kvpool.attention.decode import DecodeWorkspace
from sgl_kvpool.srt.attention.sparse import SparseReader, sparse_workspace_bytes
from sgl_kvpool.srt.self_check import Difference, check_backend, check_lists

pytestmark = pytest.mark.usefixtures("published")


def backend_of(layout, monkeypatch, **placed):
    """A backend over a pool of NaN bytes, and its layer."""
    return Case(layout, [1], [0], monkeypatch, **placed)


def memory(case):
    return [
        case.runner.req_to_token_pool.req_to_token,
        *(part.view(torch.uint8) for part in case.pool.kv_buffer),
    ]


@pytest.mark.parametrize("layout", oracle.LAYOUTS)
@pytest.mark.parametrize("placed", PLACED)
def test_backends(layout, placed, monkeypatch):
    case = backend_of(layout, monkeypatch, **placed)
    before = [part.clone() for part in memory(case)]
    found = check_backend(case.backend, case.layer)
    assert found.startswith("attention of 3 requests with a largest error of ")
    assert 0 < float(found.split()[-1]) < 2**-6  # bf16 rounding of values up to 4
    assert all(torch.equal(was, now) for was, now in zip(before, memory(case), strict=True))


def difference(case):
    with pytest.raises(Difference) as found:
        check_backend(case.backend, case.layer)
    return str(found.value)


@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_a_kernel_that_decodes_otherwise(layout, monkeypatch):
    """One value of each row differs."""
    case = backend_of(layout, monkeypatch)
    attend_lists = cpu.attend_lists

    def otherwise(out, *arguments, **options):
        attend_lists(out, *arguments, **options)
        out[..., 77] += 0.1  # the weights' sum is 1

    monkeypatch.setattr(cpu, "attend_lists", otherwise)
    text = difference(case)
    assert text.startswith(f"attention over rows of {layout}, layer 6: value 77 of head ")
    assert text.endswith(" within 0.004 and 1%")


def test_k_scale_that_is_not_applied(monkeypatch):
    case = backend_of("fp8", monkeypatch, k_scale=0.25)
    check_backend(case.backend, case.layer)
    forward = case.backend.forward_decode

    def without(*args):
        with monkeypatch.context() as patch:
            patch.setattr(case.pool, "k_scale", lambda layer_id: 1.0)
            return forward(*args)

    monkeypatch.setattr(case.backend, "forward_decode", without)
    assert "attention over rows of fp8" in difference(case)


def test_lengths_without_the_new_token_are_noticed(monkeypatch):
    """No request attends the token that the step itself stores."""
    case = backend_of("bf16", monkeypatch)
    plan = case.backend.init_forward_metadata

    def short(batch):
        batch.seq_lens = batch.seq_lens_cpu = batch.seq_lens - 1
        plan(batch)

    monkeypatch.setattr(case.backend, "init_forward_metadata", short)
    assert "for 1 tokens is 0, expected " in difference(case) or "for 1 tokens is nan" in difference(case)


@pytest.mark.parametrize("arrangement", ["token_major", "page_major"])
def test_slots_that_are_taken_for_rows_of_others(arrangement, monkeypatch):
    case = backend_of("fp4", monkeypatch, arrangement=arrangement, page_size=8)
    plan = case.backend.init_forward_metadata

    def moved(batch):
        plan(batch)
        lists, limits = case.backend._stored
        case.backend._stored = lists + torch.tensor([1, 0, 0]), limits

    monkeypatch.setattr(case.backend, "init_forward_metadata", moved)
    assert "attention over rows of fp4, layer 6" in difference(case)


# ------------------------------------------------------------------ sparse attention


def sparse_reader(layout):
    pool = dsa_pool(layout)
    for buffer in pool.kv_buffer:
        buffer.view(torch.uint8).fill_(0xFF)
    size_bytes = sparse_workspace_bytes(pool.row_format, HEADS, 2048, "cpu")
    return pool, SparseReader(pool.row_format, DecodeWorkspace(size_bytes, "cpu"))


@pytest.mark.parametrize("layout", oracle.OURS_ALONE)
def test_the_reader_of_sparse_attention(layout):
    pool, reader = sparse_reader(layout)
    found = check_lists(pool, 3, HEADS, SCALE, reader.attend)
    assert found.startswith("attention of 3 requests with a largest error of ")
    assert all((buffer.view(torch.uint8) == 0xFF).all() for buffer in pool.kv_buffer)


def test_a_reader_of_sparse_attention_that_counts_wrongly():
    pool, reader = sparse_reader("fp4")

    def short(q, rows, slots, counts, scale):
        return reader.attend(q, rows, slots, counts - 1, scale)

    with pytest.raises(Difference, match="attention over rows of fp4, layer 3: value "):
        check_lists(pool, 3, HEADS, SCALE, short)
