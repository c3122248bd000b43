"""The table of attention backends, and the functions through which the pool uses it."""

import re

import pytest

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.srt.facts.readers import STRIDED_READERS, can_read, check_readers, readers
from sgl_kvpool.srt.facts.readers import suggestions as suggested

#: The backends of SGLang's own list for MLA, and torch_native, which indexes with torch.
STRIDED = {"triton", "fa3", "trtllm_mla", "flashinfer", "cutedsl_mla", "flashmla", "torch_native"}
BF16, FP8, BLOCK, FP4 = "bf16", "fp8", "fp8_block_scale", "fp4"


@pytest.mark.parametrize(
    ("backend", "layout", "arrangement", "able"),
    [
        *((name, BF16, "token_major", True) for name in ("kvpool_mla", *sorted(STRIDED))),
        *((name, BF16, "token_major", False) for name in ("intel_amx", "fa4", "unheard_of")),
        *((name, BF16, "page_major", name == "kvpool_mla") for name in ("kvpool_mla", "fa3", "torch_native")),
        *((name, BF16, "layer_major", True) for name in ("kvpool_mla", "fa3", "intel_amx", "fa4")),
        *((name, FP8, "layer_major", name != "fa3") for name in ("kvpool_mla", "flashmla", "fa3")),
        *((name, layout, "layer_major", name == "kvpool_mla")
          for layout in (BLOCK, FP4, "fp4_fp8_rope") for name in ("kvpool_mla", "triton", "flashmla", "dsa")),
        *((name, layout, "head_major", False) for layout in (BF16, FP4) for name in ("kvpool_mla", "fa3")),
    ],
)  # fmt: skip
def test_who_can_read(backend, layout, arrangement, able):
    """By what their kernels read: SGLANG_READERS says why."""
    layout, arrangement = MLAKVCacheLayout(layout), KVArrangement(arrangement)
    assert can_read(backend, layout, arrangement) == (backend in readers(layout, arrangement)) == able
    check_readers(layout, arrangement, ())
    if able:
        check_readers(layout, arrangement, (backend, backend))
        return
    words = f"{backend} cannot read {arrangement} rows of KV cache layout {layout}"
    with pytest.raises(ValueError, match=words):
        check_readers(layout, arrangement, (backend,))


def test_the_table_is_sglangs_allow_list():
    """The first list in SGLang's function is its list for MLA."""
    import inspect

    from sglang.srt.arg_groups.kv_cache_hook import handle_page_major_kv_layout

    source = inspect.getsource(handle_page_major_kv_layout)
    listed = re.search(r"if use_mla_backend\(server_args\):\s*allowed_full = \{([^}]*)\}", source)
    audited = set(re.findall(r'"(\w+)"', listed[1]))
    assert STRIDED_READERS[KVArrangement.TOKEN_MAJOR] == audited | {"torch_native"}


def test_suggestions():
    bf16, fp4 = MLAKVCacheLayout.BF16, MLAKVCacheLayout.FP4
    assert suggested(bf16, "cpu", KVArrangement.TOKEN_MAJOR) == ("torch_native",)
    assert suggested(bf16, "cuda", KVArrangement.TOKEN_MAJOR) == ("fa3", "flashinfer", "flashmla", "triton")
    for device in ("cpu", "cuda"):
        assert suggested(bf16, device, KVArrangement.PAGE_MAJOR) == ()
        assert suggested(fp4, device, KVArrangement.TOKEN_MAJOR) == ()
