"""What models with sparse attention call, on a GPU: decode over top-k lists, and rows for an extend."""

import codec_oracle as oracle
import pytest
import torch
from codec_oracle import assert_same_values, hard_rows
from decode_cases import check, expected, make_case

from sgl_kvpool import codec
from sgl_kvpool.attention.decode import DecodeWorkspace
from sgl_kvpool.attention.decode_config import decode_kernel_of
from sgl_kvpool.srt.attention.sparse import SparseReader, decoded_rows, sparse_workspace_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOP_K = 256


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize(
    ("layout", "heads"),
    [pytest.param("fp4", 16, marks=pytest.mark.quick), ("fp8_block_scale", 8), ("fp8", 16)],
)
def test_decode_over_top_k(caplog, layout, heads, counted):
    """A list per query, with -1 in the middle and at the end; without counts, -1 alone marks missing rows."""
    counts = ((TOP_K,), (90,), (3,), (0,))
    case = make_case(layout, heads=heads, counts=counts, width=TOP_K, ids=torch.int32)
    if not counted:
        for kv_indices, (count,) in zip(case.kv_indices, counts, strict=True):
            kv_indices[count:] = -1
    there = case.to("cuda")
    caplog.set_level("INFO")
    size_bytes = sparse_workspace_bytes(case.fmt, heads, TOP_K, there.q.device)
    reader = SparseReader(case.fmt, DecodeWorkspace(size_bytes, "cuda"))
    kernel = decode_kernel_of(case.fmt)
    assert caplog.messages[-1].startswith(f"sparse attention decodes {layout} with the {kernel} kernel")
    kv_lens = there.kv_lens if counted else None
    found = reader.attend(there.q, there.pool.unsqueeze(1), there.kv_indices, kv_lens, case.scale)
    check((found, torch.from_numpy(expected(case)[1])), case)


@pytest.mark.parametrize("layout", oracle.NARROW)
def test_rows_for_an_extend(layout):
    """Rows in the order of the list of slots, some of them twice, and zeros for -1."""
    fmt = oracle.row_format(layout, 512, 64)
    rows = torch.full((50, 1, fmt.row_bytes), 0xFF, dtype=torch.uint8, device="cuda")
    used, values = torch.randperm(50)[:40], hard_rows(40, 576).cuda()
    codec.store_rows(rows.squeeze(1), used.cuda(), values[:, :512], values[:, 512:], fmt)
    slots = torch.cat([used[5:35], used[:5], used[7:9], torch.tensor([-1])]).to(torch.int32)
    found = decoded_rows(rows, slots.cuda(), fmt).cpu()
    wanted = oracle.decode(rows.cpu()[slots[:-1].long(), 0].numpy(), layout, 512, 64)
    assert_same_values(found[:-1, 0], oracle.cast(wanted, torch.bfloat16))
    assert not found[-1].any()
