"""What `mla_decode` refuses, how work is cut up, and the size of the workspace."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from decode_cases import make_case

from sgl_kvpool import MLAKVCacheLayout, env
from sgl_kvpool.attention import decode_checks
from sgl_kvpool.attention import decode_config as chosen
from sgl_kvpool.attention.decode import DecodeWorkspace, mla_decode, partial_results, workspace_bytes
from sgl_kvpool.attention.decode_config import MAX_SPLITS, decode_config, decode_kernel_of, partial_elements
from sgl_kvpool.refusal import Refusal

FP4 = MLAKVCacheLayout.FP4.row_format(512, 64)
FP8 = MLAKVCacheLayout.FP8_NOPE_FP8_ROPE.row_format(512, 64)


def call(**changes):
    """mla_decode of two queries and lists, with some arguments changed."""
    case = make_case("fp4", rank=128, counts=((9,), (4,)), width=12, heads=3)
    arguments = {"q": case.q, "row_buffer": case.pool, "fmt": case.fmt, "scale": case.scale}
    arguments |= {"kv_indices": case.kv_indices, "kv_lens": case.kv_lens}
    arguments |= {name: change(case) if callable(change) else change for name, change in changes.items()}
    return mla_decode(**arguments)


def test_no_queries_of_numpy():
    """Such arrays have strides of 0."""
    none = torch.from_numpy(np.zeros((0, 3, 192), np.float32))
    out, lse = call(q=none, kv_indices=lambda c: c.kv_indices[:0], kv_lens=lambda c: c.kv_lens[:0])
    assert (out.shape, lse.shape) == ((0, 3, 128), (0, 3))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"q": lambda c: c.q.double()},
            TypeError,
            "q is float64, allowed on cpu: bfloat16, float16, float32",
        ),
        ({"q": lambda c: c.q[..., :-1]}, ValueError, "expected (tokens, heads, 192)"),
        ({"q": lambda c: c.q[:, :0]}, ValueError, "no heads"),
        ({"q": lambda c: c.q.mT.contiguous().mT}, ValueError, "has stride 3 between"),
        (
            {"q": lambda c: c.q[..., :128], "q_rope": lambda c: c.q[:1, :, :64]},
            ValueError,
            "both parts of the same queries",
        ),
        ({"queries_per_list": 3}, ValueError, "queries_per_list=3 does not divide the 2 queries"),
        ({"row_buffer": lambda c: c.pool.view(torch.int8)}, TypeError, "expected uint8"),
        ({"row_buffer": lambda c: c.pool[:, :-16]}, ValueError, "build the RowFormat"),
        ({"kv_indices": lambda c: c.kv_indices[:1]}, ValueError, "1 lists for 2 groups"),
        ({"kv_lens": lambda c: c.kv_lens[:1]}, ValueError, "kv_lens has shape (1,), expected (2,)"),
        ({"kv_lens": lambda c: c.kv_lens.short()}, TypeError, "kv_lens is int16"),
        ({"kv_lens": torch.zeros(4, dtype=torch.int32)[::2]}, ValueError, "kv_lens has stride 2, expected 1"),
        ({"list_index": torch.tensor([0, 2])}, IndexError, "list_index[1] is 2, kv_indices has 2 lists"),
        ({"page": (64, 61)}, ValueError, "page=(64, 61)"),
        ({"page": 4}, ValueError, "page=4, expected (page_size_tokens, rows_per_page)"),
        ({"scale": 1e39}, ValueError, "scale=1e+39 is not finite in float32"),
        (
            {"out": torch.zeros(1, 3, 128).bfloat16().expand(2, 3, 128)},
            ValueError,
            "strides (0, 128, 1) for shape (2, 3, 128), so that a write to one value would change another",
        ),
        ({"k_scale": 0.0}, ValueError, "k_scale=0.0"),
        ({"out": torch.zeros(2, 3, 128)}, TypeError, "out is float32, expected bfloat16"),
        ({"lse": torch.zeros(3, 2)}, ValueError, "lse has shape (3, 2), expected (2, 3)"),
    ],
)
def test_refusals(changes, error, words):
    with pytest.raises(error, match=re.escape(words)):
        call(**changes)


def test_limits_of_the_kernel():
    pool = torch.zeros(8, 1000, dtype=torch.uint8)
    with pytest.raises(ValueError, match="row stride of 1000 bytes"):
        decode_checks.kernel_limits(pool, FP4)
    with pytest.raises(ValueError, match="row stride of 416"):
        decode_checks.kernel_limits(torch.zeros(999, dtype=torch.uint8)[1:417].view(1, 416), FP4)
    with pytest.raises(ValueError, match="accumulators hold 512 values"):
        decode_checks.kernel_limits(pool, MLAKVCacheLayout.FP4.row_format(640, 64))


def test_gpus_before_hopper_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    fmt = MLAKVCacheLayout.FP4.row_format(512, 64)
    with pytest.raises(RuntimeError, match=r"mla_decode needs a Hopper GPU .* has 8\.0 \(cpu\)"):
        decode_checks.rows_on_cuda(torch.zeros(1, fmt.row_bytes, dtype=torch.uint8), fmt)


def test_importing_the_package_costs_neither_torch_nor_triton():
    code = "import sys, sgl_kvpool.srt.facts.readers; print({'torch', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    code = "import sys; from sgl_kvpool.attention.decode import mla_decode; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# ------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize("layout", list(MLAKVCacheLayout))
def test_every_shape_has_a_configuration(layout):
    tiles = set(chosen.table("triton", "gluon"))
    fmt = layout.row_format(512, 64)
    for heads in (1, 3, 8, 16, 17, 32, 64, 128):
        for queries in (1, 2, 4):
            for lists in (1, 2, 7, 64, 300, 5000):
                for rows in (0, 1, 64, 1000, 163840):
                    config = decode_config(fmt, heads, queries, lists, rows)
                    assert (layout, config.tile) in tiles
                    assert config.tiles * config.tile.query_heads >= heads * queries
                    assert (config.tiles - 1) * config.tile.query_heads < heads * queries
                    assert 1 <= config.splits <= MAX_SPLITS
                    assert config.splits <= max(1, -(-rows // config.tile.block_rows))
                    programs = config.splits * config.tiles * lists
                    assert config.splits == 1 or programs <= 2 * 132 * config.tile.programs_per_sm


def as_if(monkeypatch, interpreted):
    """Without a GPU, and with or without Triton's interpreter."""
    from triton import knobs

    try:
        # Before the change: with TRITON_INTERPRET=1 it cannot be imported later.
        from triton.experimental.gluon.language.nvidia import hopper  # noqa: F401
    except ImportError:
        pytest.skip("this Triton has no Gluon for Hopper")
    monkeypatch.setattr(knobs.runtime, "interpret", interpreted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("wish", "layout", "geometry", "interpreted", "found"),
    [
        (None, "fp4", (512, 64), False, "gluon"),
        ("auto", "fp8_block_scale", (512, 64), False, "gluon"),
        ("gluon", "fp8", (512, 64), False, "gluon"),
        ("triton", "fp4", (512, 64), False, "triton"),
        (None, "bf16", (512, 64), False, "triton"),
        (None, "fp4", (256, 64), False, "triton"),
        (None, "fp4", (512, 0), False, "gluon"),
        (None, "fp4", (512, 64), True, "triton"),
        ("gluon", "bf16", (512, 64), False, "rows of bf16 need no decoding"),
        ("gluon", "fp4", (256, 64), False, "kv_lora_rank=256 is not the 512"),
        ("gluon", "fp4", (512, 64), True, "TRITON_INTERPRET=1"),
        ("cuda", "fp4", (512, 64), False, "'cuda' is unknown; set it to auto or gluon or triton"),
    ],
)
def test_which_kernel(monkeypatch, wish, layout, geometry, interpreted, found):
    as_if(monkeypatch, interpreted)
    if wish is None:
        monkeypatch.delenv(env.DECODE_KERNEL, raising=False)
    else:
        monkeypatch.setenv(env.DECODE_KERNEL, wish)
    fmt = MLAKVCacheLayout(layout).row_format(*geometry)
    if found in ("gluon", "triton"):
        assert decode_kernel_of.__wrapped__(fmt) == found
    else:
        with pytest.raises(Refusal, match=found):
            decode_kernel_of.__wrapped__(fmt)


def test_the_gluon_kernel_is_for_hopper_alone(monkeypatch):
    """For another GPU LLVM could not compile it and would end the process."""
    as_if(monkeypatch, interpreted=False)
    monkeypatch.delenv(env.DECODE_KERNEL, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fmt = MLAKVCacheLayout.FP4.row_format(512, 64)
    for major, found in ((9, "gluon"), (10, "triton"), (12, "triton")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda major=major: (major, 0))
        assert decode_kernel_of.__wrapped__(fmt) == found
    monkeypatch.setenv(env.DECODE_KERNEL, "gluon")
    with pytest.raises(Refusal, match=r"compute capability \(12, 0\) has no wgmma"):
        decode_kernel_of.__wrapped__(fmt)


@pytest.mark.parametrize("layout", list(MLAKVCacheLayout))
def test_which_values_are_rounded(monkeypatch, layout):
    as_if(monkeypatch, interpreted=False)
    monkeypatch.setattr(chosen, "decode_kernel_of", decode_kernel_of.__wrapped__)
    fmt = layout.row_format(512, 64)
    found = [heads for heads in (1, 16, 17, 32, 64, 128) if chosen.rounds_values(fmt, heads)]
    assert found == ([17, 32, 64, 128] if layout == "fp8_block_scale" else [])


def test_an_unknown_kernel_is_found_at_start(monkeypatch):
    monkeypatch.setenv(env.DECODE_KERNEL, "cutlass")
    (line,) = env.problems()
    assert line == "KVPOOL_DECODE_KERNEL='cutlass' is unknown; set it to auto or gluon or triton"


def test_the_device_is_kept_busy():
    """By hand, for 132 multiprocessors of two programs: programs of all splits run in rounds of 264."""
    expected = {1: 256, 2: 132, 4: 66, 16: 16, 64: 4, 80: 3, 100: 5, 128: 2, 200: 1, 300: 1}
    for lists, splits in expected.items():
        assert decode_config(FP4, 16, 1, lists, 100_000).splits == splits, lists
    assert decode_config(FP4, 16, 1, 1, 100_000, sm_count=16).splits == 32
    assert decode_config(FP4, 16, 1, 1, 500).splits == 4  # 8 blocks of 64 rows, 2 at least each
    # 33 lists are an eighth of 264 programs: parts of 4 blocks at least.
    for lists, splits, min_blocks in ((32, 4, 2), (33, 2, 4), (64, 2, 4)):
        config = decode_config(FP4, 16, 1, lists, 500)
        assert (config.splits, config.min_blocks) == (splits, min_blocks)
    # One program per SM and 4 tiles of 32 for 128 heads: 4 blocks of 128 rows, 1 at least each
    assert decode_config(FP4, 128, 1, 16, 100_000).splits == 2
    assert decode_config(FP4, 128, 1, 1, 500).splits == 4


@pytest.mark.parametrize("queries", [1, 3])
def test_workspace_is_enough_for_every_batch(queries):
    size = workspace_bytes(FP4, 16, 60, 4096, queries_per_list=queries)
    needed = [
        4 * partial_elements(FP4, lists * queries, 16, decode_config(FP4, 16, queries, lists, rows).splits)
        for lists in range(1, 60 // queries + 1)
        for rows in (1, 64, 500, 4000, 4096)
    ]
    assert size == max(needed)
    assert 0 < size <= 4 * 513 * 16 * queries * 2 * 264  # two rounds of programs, each with its own results
    workspace = DecodeWorkspace(size, "cpu")
    assert workspace.size_bytes == size
    config = decode_config(FP4, 16, queries, 1, 4096)
    assert partial_results(workspace, config, FP4, queries, 16, workspace.buffer.device) is workspace.buffer
    with pytest.raises(ValueError, match="size it with workspace_bytes"):
        partial_results(DecodeWorkspace(4, "cpu"), config, FP4, queries, 16, workspace.buffer.device)
    with pytest.raises(ValueError, match="size_bytes=-1"):
        DecodeWorkspace(-1, "cpu")
    for name in ("heads", "queries_per_list", "sm_count"):
        with pytest.raises(ValueError, match=f"{name}=0 is not a positive integer"):
            workspace_bytes(FP4, **{"heads": 16, name: 0}, max_tokens=60, max_rows=4096)
