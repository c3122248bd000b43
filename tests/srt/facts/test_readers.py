"""The table of attention backends, and the functions through which the pool uses it."""

import re

import pytest

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.srt.facts.readers import SGLANG_READERS, STRIDED_READERS, can_read, check_readers, readers
from sgl_kvpool.srt.facts.readers import suggestions as suggested

STOCK = frozenset().union(*(line.backends for line in SGLANG_READERS.values()))
EVERY_BACKEND = ["kvpool_mla", *sorted(STOCK), "dsa", "unheard_of"]
#: The backends of SGLang's own list for MLA, and torch_native, which indexes with torch.
STRIDED = {"triton", "fa3", "trtllm_mla", "flashinfer", "cutedsl_mla", "flashmla", "torch_native"}


@pytest.mark.parametrize("layout", list(MLAKVCacheLayout))
@pytest.mark.parametrize("arrangement", list(KVArrangement))
def test_check_readers_is_the_table(layout, arrangement):
    stock = set(SGLANG_READERS[layout].backends)
    stock &= {"layer_major": stock, "token_major": STRIDED}.get(arrangement, set())
    able = {"kvpool_mla", *stock} if arrangement != "head_major" else set()
    assert set(readers(layout, arrangement)) == able
    for backend in EVERY_BACKEND:
        assert can_read(backend, layout, arrangement) == (backend in able)
        if backend in able:
            check_readers(layout, arrangement, (backend, backend))
            continue
        with pytest.raises(
            ValueError, match=f"{backend} cannot read {arrangement} rows of KV cache layout {layout}"
        ):
            check_readers(layout, arrangement, (backend,))
    check_readers(layout, arrangement, ())


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
        assert suggested(bf16, device, KVArrangement.LAYER_MAJOR) == suggested(bf16, device)
