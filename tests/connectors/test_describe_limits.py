"""Views of pools inside pools, and the pools that `describe` refuses.

C7 is an item of the vLLM checklist of tests/connectors.
"""

import pytest
import torch
from pools import ARRANGEMENTS
from real_pools import MLA, dsa, mha, mla, ours, swa

from sgl_kvpool.connectors.pools import describe

pytestmark = pytest.mark.usefixtures("published")


def test_a_window_pool_of_latent_rows():
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    kinds = {"full_kv_pool_class": MLATokenToKVPool, "swa_kv_pool_class": MLATokenToKVPool}
    full = {"page_size": 4, **MLA}
    pool = swa(**kinds, full_kv_pool_kwargs=full, swa_kv_pool_kwargs={**full, "kv_lora_rank": 128})
    caches = describe(pool)
    assert [r.layer_id for r in caches.group("full").layers] == [1, 3]
    assert [r.layer_id for r in caches.group("window").layers] == [0, 2, 4]
    assert caches.group("window").bytes_per_page == 3 * 4 * 192 * 2


# -------------------------------------------------------------------- refusals


def test_c7_unknown_kinds_are_refused_by_name():
    """C7: a subclass may store other bytes, so it is unknown as well. The message lists the known kinds."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool

    known = (
        "DSATokenToKVPool, HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool, MLATokenToKVPoolFP4, "
        "MambaPool, SWAKVPool, LayoutMLATokenToKVPool and LayoutHybridLinearKVPool"
    )

    class OtherRows(MLATokenToKVPool):
        pass

    other = OtherRows(size=12, page_size=4, dtype=torch.bfloat16, layer_num=3, **MLA)
    requests = ReqToTokenPool(size=4, max_context_len=16, device="cpu", enable_memory_saver=False)
    for pool, name in ((other, "OtherRows"), (requests, "ReqToTokenPool"), (None, "NoneType")):
        text = f"^the bytes of {name} are unknown; known kinds of pools are {known}$"
        with pytest.raises(TypeError, match=text):
            describe(pool)


def test_bytes_that_a_pool_stores_beside_what_it_describes_are_noticed():
    """SGLang's MHABufferInfo omits the scales of native FP4."""
    pool = mha()
    scales = [torch.zeros(4, 3, 4, 1, dtype=torch.uint8) for _ in range(2)]
    pool.native_k_scale_buffer = pool.native_v_scale_buffer = scales
    text = "MHATokenToKVPool stores 2880 bytes, of which 2688 are in described buffers"
    with pytest.raises(TypeError, match=text):
        describe(pool)


@pytest.mark.parametrize("index_buf_size", [512, 64])
def test_index_keys_with_page_numbers_of_their_own_are_refused(index_buf_size):
    """As under decode context parallelism, where a page of index keys spans the ranks."""
    with pytest.raises(TypeError, match="page indices of the two differ"):
        describe(dsa(index_buf_size=index_buf_size))


def test_pipeline_stages_without_layers():
    pools = [mla(layers=0), *(ours("fp4", arrangement, layers=0) for arrangement in ARRANGEMENTS)]
    for pool in pools:
        caches = describe(pool)
        assert caches.tensors == ()
        assert (caches.group("kv").num_pages, caches.group("kv").bytes_per_page) == (4, 0)
        assert pool.get_kv_size_bytes() == 0
