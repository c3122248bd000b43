"""The public functions that models with sparse attention call, with their kernels on ptxrun."""

import re
from pathlib import Path

import codec_oracle as oracle
import pytest
import test_ptx_codec
import test_ptx_decode
import torch
from codec_oracle import assert_same_values, hard_rows
from decode_cases import check, expected, make_case

import sgl_kvpool
from sgl_kvpool import codec
from sgl_kvpool.attention.decode import DecodeWorkspace
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.srt.attention.sparse import SparseReader, decoded_rows, sparse_workspace_bytes

TOP_K, SCALE = 256, 0.06


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize(
    ("layout", "heads"),
    [pytest.param("fp4", 16, marks=pytest.mark.quick), ("fp8_block_scale", 8), ("fp8", 16)],
)
def test_decode_over_top_k(on_ptxrun, caplog, layout, heads, counted):
    """A list per query, with -1 in the middle and at the end; without counts, -1 alone marks missing rows."""
    counts = ((TOP_K,), (90,), (3,), (0,))
    case = make_case(layout, heads=heads, counts=counts, width=TOP_K, ids=torch.int32)
    if not counted:
        for kv_indices, (count,) in zip(case.kv_indices, counts, strict=True):
            kv_indices[count:] = -1
    caplog.set_level("INFO")
    reader = SparseReader(
        case.fmt, DecodeWorkspace(sparse_workspace_bytes(case.fmt, heads, TOP_K, "cpu"), "cpu")
    )
    assert caplog.messages[-1].startswith(f"sparse attention decodes {layout} with the gluon kernel")
    rows = case.pool.unsqueeze(1)
    found = reader.attend(case.q, rows, case.kv_indices, case.kv_lens if counted else None, case.scale)
    assert [name for name, _ in on_ptxrun.launched] == ["gluon_decode_kernel", "merge_kernel"]
    check((found, torch.from_numpy(expected(case)[1])), case)


@pytest.mark.parametrize("layout", oracle.NARROW)
def test_rows_for_an_extend(on_ptxrun, layout):
    """Rows in the order of the list of slots, some of them twice, and zeros for -1."""
    fmt = oracle.row_format(layout, 512, 64)
    rows = torch.full((50, 1, fmt.row_bytes), 0xFF, dtype=torch.uint8)
    used, values = torch.randperm(50)[:40], hard_rows(40, 576)
    codec.store_rows(rows.squeeze(1), used, values[:, :512], values[:, 512:], fmt)
    slots = torch.cat([used[5:35], used[:5], used[7:9], torch.tensor([-1])]).to(torch.int32)
    found = decoded_rows(rows, slots, fmt)
    assert [name for name, _ in on_ptxrun.launched] == ["store_kernel", "gather_kernel"]
    wanted = oracle.decode(rows[slots[:-1].long(), 0].numpy(), layout, 512, 64)
    assert_same_values(found[:-1, 0], oracle.cast(wanted, torch.bfloat16))
    assert not found[-1].any()


def test_every_triton_kernel_runs_here(runs):
    """Cases of this folder launch all kernels of the package; a kernel that is added needs one."""
    kernel = re.compile(r"@(?:triton|gluon)\.jit(?:\(.*?\))?\ndef (\w*kernel)\(", re.DOTALL)
    files = Path(sgl_kvpool.__file__).parent.rglob("*.py")
    found = {name for path in files for name in kernel.findall(path.read_text())}
    launched = set()
    tiles = {tile.kernel: tile for layout, tile in test_ptx_decode.SMALLEST if layout == "fp4"}
    for tile in tiles.values():
        runs.launched.clear()
        test_ptx_decode.test_every_tile(runs, MLAKVCacheLayout.FP4, tile)
        launched |= {name for name, _ in runs.launched}
    test_ptx_codec.round_trip("fp4", test_ptx_codec.GEOMETRIES[0], test_ptx_codec.USUAL)
    launched |= {name for name, _ in runs.launched}
    assert found == launched
