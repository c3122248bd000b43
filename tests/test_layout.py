"""The byte tables, spelled by hand: nothing here is computed the way layout.py computes it."""

import subprocess
import sys
import types

import pytest

from scripts import ROOT
from sgl_kvpool import FORMAT_VERSION, MLAKVCacheLayout
from sgl_kvpool.layout import Encoding, check_complete

BF16 = MLAKVCacheLayout.BF16
FP8 = MLAKVCacheLayout.FP8_NOPE_FP8_ROPE
BLOCK = MLAKVCacheLayout.FP8_NOPE_WITH_BLOCK_SCALE_BF16_ROPE
FP4 = MLAKVCacheLayout.FP4
FP4_FP8 = MLAKVCacheLayout.FP4_NOPE_FP8_ROPE

#: Layout, R, P | segments: name, encoding, count, first byte, end byte | payload, row bytes at 16.
ROWS = """
bf16            128  0 | nope bf16 128 0 256 | 256 256
bf16            128 64 | nope bf16 128 0 256 | rope bf16 64 256 384 | 384 384
bf16            256  0 | nope bf16 256 0 512 | 512 512
bf16            256 64 | nope bf16 256 0 512 | rope bf16 64 512 640 | 640 640
bf16            512  0 | nope bf16 512 0 1024 | 1024 1024
bf16            512 64 | nope bf16 512 0 1024 | rope bf16 64 1024 1152 | 1152 1152
fp8             128  0 | nope e4m3 128 0 128 | 128 128
fp8             128 64 | nope e4m3 128 0 128 | rope e4m3 64 128 192 | 192 192
fp8             256  0 | nope e4m3 256 0 256 | 256 256
fp8             256 64 | nope e4m3 256 0 256 | rope e4m3 64 256 320 | 320 320
fp8             512  0 | nope e4m3 512 0 512 | 512 512
fp8             512 64 | nope e4m3 512 0 512 | rope e4m3 64 512 576 | 576 576
fp8_block_scale 128  0 | nope e4m3 128 0 128 | scale fp32 1 128 132 | 132 144
fp8_block_scale 128 64 | nope e4m3 128 0 128 | scale fp32 1 128 132 | rope bf16 64 132 260 | 260 272
fp8_block_scale 256  0 | nope e4m3 256 0 256 | scale fp32 2 256 264 | 264 272
fp8_block_scale 256 64 | nope e4m3 256 0 256 | scale fp32 2 256 264 | rope bf16 64 264 392 | 392 400
fp8_block_scale 512  0 | nope e4m3 512 0 512 | scale fp32 4 512 528 | 528 528
fp8_block_scale 512 64 | nope e4m3 512 0 512 | scale fp32 4 512 528 | rope bf16 64 528 656 | 656 656
fp4             128  0 | nope e2m1 128 0 64 | scale ue5m3 8 64 72 | 72 80
fp4             128 64 | nope e2m1 128 0 64 | scale ue5m3 8 64 72 | rope bf16 64 72 200 | 200 208
fp4             256  0 | nope e2m1 256 0 128 | scale ue5m3 16 128 144 | 144 144
fp4             256 64 | nope e2m1 256 0 128 | scale ue5m3 16 128 144 | rope bf16 64 144 272 | 272 272
fp4             512  0 | nope e2m1 512 0 256 | scale ue5m3 32 256 288 | 288 288
fp4             512 64 | nope e2m1 512 0 256 | scale ue5m3 32 256 288 | rope bf16 64 288 416 | 416 416
fp4_fp8_rope    128  0 | nope e2m1 128 0 64 | scale ue5m3 8 64 72 | 72 80
fp4_fp8_rope    128 64 | nope e2m1 128 0 64 | scale ue5m3 8 64 72 | rope e4m3 64 72 136 | 136 144
fp4_fp8_rope    256  0 | nope e2m1 256 0 128 | scale ue5m3 16 128 144 | 144 144
fp4_fp8_rope    256 64 | nope e2m1 256 0 128 | scale ue5m3 16 128 144 | rope e4m3 64 144 208 | 208 208
fp4_fp8_rope    512  0 | nope e2m1 512 0 256 | scale ue5m3 32 256 288 | 288 288
fp4_fp8_rope    512 64 | nope e2m1 512 0 256 | scale ue5m3 32 256 288 | rope e4m3 64 288 352 | 352 352
"""
#: (layout, R, P): segments, payload, row bytes.
TABLE = {}
for line in ROWS.strip().splitlines():
    (layout, *geometry), *segments, sizes = (cell.split() for cell in line.split("|"))
    segments = [(name, encoding, *map(int, numbers)) for name, encoding, *numbers in segments]
    TABLE[MLAKVCacheLayout(layout), *map(int, geometry)] = segments, *map(int, sizes)


@pytest.mark.parametrize(("layout", "rank", "rope"), TABLE, ids=str)
def test_byte_table(layout, rank, rope):
    segments, payload, row = TABLE[layout, rank, rope]
    fmt = layout.row_format(rank, rope)
    found = [(s.name, s.encoding.value[0], s.count, s.offset_bytes, s.end_bytes) for s in fmt.segments]
    assert found == segments
    assert [s.size_bytes for s in fmt.segments] == [end - first for *_, first, end in segments]
    assert (fmt.payload_bytes, fmt.row_bytes, fmt.padding_bytes) == (payload, row, row - payload)
    assert fmt.head_dim == rank + rope
    assert (fmt.rope is None) == (rope == 0)
    assert (fmt.scale is None) == (layout in (BF16, FP8))
    unpadded = layout.row_format(rank, rope, align_bytes=1)
    assert unpadded.row_bytes == unpadded.payload_bytes == payload
    assert unpadded.padding_bytes == 0


#: Layout: packed, narrow, divided by k_scale; values per scale; dtype that SGLang sees, for dense models and
#: for models with sparse attention.
PROPERTIES = {
    BF16: (False, False, False, 0, "bfloat16", "bfloat16"),
    FP8: (False, True, True, 0, "fp8_e4m3", "fp8_e4m3"),
    BLOCK: (True, True, False, 128, "bfloat16", "fp8_e4m3"),
    FP4: (True, True, False, 16, "bfloat16", "bfloat16"),
    FP4_FP8: (True, True, False, 16, "bfloat16", "bfloat16"),
}


def test_properties():
    assert list(MLAKVCacheLayout) == list(PROPERTIES)  # a new layout has its line, and its lines of TABLE
    assert {layout for layout, *_ in TABLE} == set(MLAKVCacheLayout)
    for layout, (packed, narrow, divided, values_per_scale, dense, sparse) in PROPERTIES.items():
        fmt = layout.row_format(512, 64)
        assert (layout.is_packed, layout.is_narrow) == (packed, narrow)
        assert layout.uses_k_scale == divided
        assert layout.is_sglang_native == (layout is BF16)
        assert fmt.scale_block_values == values_per_scale
        assert (layout.sglang_kv_cache_dtype(), layout.sglang_kv_cache_dtype(is_dsa=True)) == (dense, sparse)
    assert FP4.accepted_kv_cache_dtypes == ("auto", "bfloat16", "bf16")
    assert FP8.accepted_kv_cache_dtypes == ("auto", "fp8_e4m3")
    assert BLOCK.accepted_kv_cache_dtypes == ("auto", "bfloat16", "bf16", "fp8_e4m3")
    assert [e.bits for e in Encoding] == [16, 8, 4, 32, 8]


def test_a_table_without_a_line_for_a_layout_is_refused():
    check_complete(dict.fromkeys(MLAKVCacheLayout, 1), "LINES of some/module.py")
    with pytest.raises(RuntimeError) as error:
        check_complete((BF16, BLOCK, FP4_FP8), "LINES of some/module.py")
    assert str(error.value).startswith("LINES of some/module.py has no line for KV cache layout fp8, fp4")


@pytest.mark.parametrize(
    ("latent", "rope", "problem"),
    [
        ("E4M3_BY_K_SCALE", "E4M3", "either both segments are divided by k_scale, or neither is"),
        ("E2M1_IN_BLOCKS", "E4M3_BY_K_SCALE", "either both segments are divided by k_scale, or neither is"),
        ("E2M1_IN_BLOCKS", "E4M3_IN_TILES", "has stored scales, for which rows have no segment"),
    ],
)
def test_a_record_that_kernels_cannot_read_fails_at_import(latent, rope, problem, monkeypatch):
    """A record in layout.py with such segments: the import fails."""
    file = ROOT / "sgl_kvpool" / "layout.py"
    stored = '"fp4_fp8_rope", _E.E2M1_IN_BLOCKS, _E.E4M3'
    assert stored in file.read_text()
    text = file.read_text().replace(stored, f'"fp4_fp8_rope", _E.{latent}, _E.{rope}')
    module = types.ModuleType("with_another_record")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ValueError, match=problem):
        exec(compile(text, file, "exec"), module.__dict__)


def test_parse():
    assert MLAKVCacheLayout("fp4") is FP4
    assert str(BLOCK) == "fp8_block_scale"
    with pytest.raises(ValueError, match=rf"'nvfp4'.*{', '.join(map(str, MLAKVCacheLayout))}$"):
        MLAKVCacheLayout("nvfp4")


@pytest.mark.parametrize(
    ("rank", "rope", "align", "message"),
    [
        *((n, 64, 16, f"kv_lora_rank={n} .*128.*--kv-cache-layout") for n in (0, -128, 64, 192, 576)),
        *((512, n, 16, f"qk_rope_head_dim={n} .*--kv-cache-layout") for n in (-64, 32, 128)),
        *((512, 64, n, f"align_bytes={n} is not one of") for n in (0, -16, 3, 24, 32)),
    ],
)
def test_sizes_that_are_refused(rank, rope, align, message):
    with pytest.raises(ValueError, match=message):
        FP4.row_format(rank, rope, align_bytes=align)


def test_tag_names_the_bytes():
    assert FP4.row_format(512, 64).tag == f"fp4-r512-p64-b416-v{FORMAT_VERSION}"
    tags = {m.row_format(r, p, align_bytes=a).tag for m, r, p in TABLE for a in (1, 16)}
    padded = sum(row != payload for _, payload, row in TABLE.values())
    assert len(tags) == len(TABLE) + padded


def test_import_needs_neither_torch_nor_sglang():
    code = "import sys, sgl_kvpool; print([m for m in ('torch', 'sglang') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
