"""The CUDA part of `sgl-kvpool warmup`, never run on a GPU: which kernels it launches, see launches.py."""

import inspect
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from live_processes import ran

PROGRAM = Path(__file__).resolve().parent / "launches.py"
SHAPE = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 96,
    "num_attention_heads": 8, "layers": 3, "context_len": 4096, "page_size_tokens": 16, "tensor_parallel": 2,
}  # fmt: skip
CASES = {
    "fp4 by pages, with drafts": {"layout": "fp4", "arrangement": "page_major", "draft_tokens": 3},
    "fp8_block_scale by tokens": {"layout": "fp8_block_scale", "arrangement": "token_major"},
    "bf16": {"layout": "bf16"},
    "fp8 without rope": {"layout": "fp8", "qk_rope_head_dim": 0, "tensor_parallel": 1},
    "fp4_fp8_rope by pages": {"layout": "fp4_fp8_rope", "arrangement": "page_major"},
    "fp4 over two ranks, with drafts": {"layout": "fp4", "dcp_size": 2, "draft_tokens": 3},
    "sparse fp4_fp8_rope": {"layout": "fp4_fp8_rope", "top_k": 2048},
    "sparse fp4": {"layout": "fp4", "top_k": 2048},
    "sparse fp8_block_scale": {"layout": "fp8_block_scale", "top_k": 2048},
    "sparse bf16": {"layout": "bf16", "top_k": 2048},
    "sparse bf16 over two ranks": {"layout": "bf16", "top_k": 2048, "dcp_size": 2},
}
#: The kernel that attends rows other than `bf16` with a latent of 512 and a rope of 64 or none.
GLUON = "gluon_decode_kernel"


@pytest.fixture(scope="module")
def found():
    """Launches and calls by case and step."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    cases = json.dumps([{**SHAPE, **case} for case in CASES.values()])
    done = ran(sys.executable, PROGRAM, cases, env=environment)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


def kernels(step):
    return {launch["kernel"] for launch in step["launched"]}


def decodes(step):
    """The parts of a decode kernel's cache key that depend on the server."""
    names = ("ROW_STRIDE", "PAGE", "PAGE_ROWS", "HEADS", "QUERIES", "SPLIT")
    launched = step["launched"]
    taken = [launch["arguments"] for launch in launched if launch["kernel"] in ("decode_kernel", GLUON)]
    return {(*(a[n][1] for n in names), a["kv_lens_ptr"][0], a["kv_indices_list_stride"][1]) for a in taken}


def both(*server, counts, stride):
    """With splits and without."""
    return {(*map(str, server), split, counts, stride) for split in ("True", "False")}


def test_decode_over_pages_and_with_drafts(found):
    steps = found["fp4 by pages, with drafts"]
    # A page of 3 layers of 16 rows; 8 heads on two ranks. Lists of 4096 + 4 + 3 slots: an odd stride.
    assert decodes(steps["decode"]) == both(416, 16, 48, 4, 1, counts="*i64", stride="")
    assert decodes(steps["verification of drafts"]) == both(416, 16, 48, 4, 3, counts="*i32", stride="")
    assert decodes(steps["extend of a draft"]) == both(416, 16, 48, 4, 3, counts="*i32", stride="")
    assert decodes(steps["steps of a draft"]) == both(416, 16, 48, 4, 1, counts="*i32", stride="")
    for name in ("decode", "verification of drafts", "extend of a draft", "steps of a draft"):
        assert kernels(steps[name]) == {"store_kernel", GLUON, "merge_kernel"}


def test_decode_of_other_arrangements_and_models(found):
    by_tokens = decodes(found["fp8_block_scale by tokens"]["decode"])
    assert by_tokens == both(3 * 656, 0, 0, 4, 1, counts="*i64", stride="")
    assert decodes(found["bf16"]["decode"]) == both(1152, 0, 0, 4, 1, counts="*i64", stride="")
    assert decodes(found["fp8 without rope"]["decode"]) == both(512, 0, 0, 8, 1, counts="*i64", stride="")
    assert GLUON in kernels(found["fp8 without rope"]["decode"])
    # bf16 rows in SGLang's own arrangement are written by SGLang: on CUDA by a kernel, here by torch.
    assert kernels(found["bf16"]["decode"]) == {"decode_kernel", "merge_kernel"}
    assert "store_kernel" in kernels(found["fp8_block_scale by tokens"]["decode"])
    for case, steps in found.items():
        if "sparse" not in case:
            assert ("steps of a draft" in steps) == ("drafts" in case)


def test_decode_over_ranks(found):
    """The heads of both; the list of rank 1 begins 4 bytes behind that of rank 0."""
    decode = found["fp4 over two ranks, with drafts"]["decode"]
    assert decodes(decode) == both(416, 1, 1, 8, 1, counts="*i32", stride="")
    taken = [launch["arguments"] for launch in decode["launched"] if launch["kernel"] == GLUON]
    assert {(a["DCP_SIZE"][1], a["kv_indices_ptr"][1]) for a in taken} == {("2", "D"), ("2", "")}
    in_chunks = kernels(found["fp4 over two ranks, with drafts"]["prefill in chunks"])
    assert in_chunks == {"store_kernel", "gather_kernel", "_fwd_kernel", "merge_state_kernel"}
    steps = found["fp4 over two ranks, with drafts"]
    assert decodes(steps["verification of drafts"]) == both(416, 1, 1, 8, 3, counts="*i32", stride="")
    # A draft has all rows, and the heads of one rank.
    assert decodes(steps["extend of a draft"]) == both(416, 0, 0, 4, 3, counts="*i32", stride="")
    assert decodes(steps["steps of a draft"]) == both(416, 0, 0, 4, 1, counts="*i32", stride="")
    of_a_draft = kernels(steps["prefill of a draft in chunks"])
    assert of_a_draft == in_chunks | {"create_flashinfer_kv_indices_triton"}


def test_prefill(found):
    for case in ("fp4 by pages, with drafts", "fp8_block_scale by tokens", "bf16"):
        steps = found[case]
        assert kernels(steps["reading rows as keys"]) == {"gather_kernel"}
        chunks = kernels(steps["prefill in chunks"])
        assert {"create_flashinfer_kv_indices_triton", "gather_kernel", "merge_state_kernel"} < chunks
        assert not steps["prefill in chunks"]["called"]
        plan, run = steps["prefill in one call"]["called"]
        wrapper = "BatchMLAPagedAttentionWrapper"
        assert (plan["method"], run["method"]) == (f"{wrapper}.plan", f"{wrapper}.run")
        assert (plan["num_heads"], plan["head_dim_ckv"], plan["head_dim_kpe"]) == (4, 512, 64)
        plan, run = steps["prefill in the MHA form"]["called"]
        assert run["method"] == "BatchPrefillWithRaggedKVCacheWrapper.forward"
        assert (plan["num_qo_heads"], plan["head_dim_qk"], plan["head_dim_vo"]) == (4, 192, 96)
    without = found["fp8 without rope"]
    assert set(without) == {"decode", "reading rows as keys", "prefill in chunks"}


def test_sparse_models(found):
    steps = found["sparse fp4"]
    assert kernels(steps["writing rows"]) == {"store_kernel"}
    assert kernels(steps["top-k lists"]) == {GLUON, "merge_kernel", "gather_kernel"}
    assert decodes(steps["top-k lists"]) == both(416, 0, 0, 4, 1, counts="*i32", stride="D")
    assert set(found["sparse fp8_block_scale"]) == {"writing rows"}  # SGLang's kernels read them
    assert found["sparse bf16"] == {}
    # A rank attends the heads of both, and for a draft its own.
    rows, lists = found["sparse bf16 over two ranks"].values()
    assert kernels(rows) == {"store_kernel"}
    localise = "transform_index_page_table_dcp_kernel"
    assert kernels(lists) == {"decode_kernel", "merge_kernel", "gather_kernel", localise}
    names = ("DCP_RANK", "DCP_SIZE", "TOPK", "row_stride")
    launched = [launch["arguments"] for launch in lists["launched"] if launch["kernel"] == localise]
    assert [[a[n][1] for n in names] for a in launched] == [[str(r), "2", "2048", "2048"] for r in range(2)]
    draft, target = (both(1152, 0, 0, n, 1, counts="*i32", stride="D") for n in (4, 8))
    assert decodes(lists) == draft | target


def test_lists_are_as_long_as_sglang_makes_them():
    """The width of the request table is compiled into kernels."""
    from sglang.srt.mem_cache import kv_cache_configurator

    from sgl_kvpool.commands.warmup.served import DEEPSEEK_V3

    source = inspect.getsource(kv_cache_configurator)
    assert set(re.findall(r"extra_max_context_len = (\d+)", source)) == {"4"}
    assert "extra_max_context_len += get_spec().speculative_num_draft_tokens" in source
    assert DEEPSEEK_V3.table_width == DEEPSEEK_V3.context_len + 4
    assert replace(DEEPSEEK_V3, draft_tokens=5).table_width == DEEPSEEK_V3.context_len + 9
