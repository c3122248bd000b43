"""Prefill and decode servers of models with sparse attention: what peers compare."""

from contextlib import nullcontext

import pytest
from codec_oracle import LAYOUTS, OURS_ALONE
from managers import STRINGS, pool_of
from pools import DSA_PAGE as PAGE
from pools import INDEX_PAGE_BYTES, LAYERS, dsa_pool, dsa_row_bytes

#: For sparse models SGLang sees scaled rows with another dtype than for dense ones; raw rows keep theirs.
DSA_STRINGS = STRINGS | {"bf16": "bfloat16"}
DSA_STRINGS["fp8_block_scale"] = "fp8_e4m3+kvpool:fp8_block_scale-r512-p64-b656-v1"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_pools_name_their_rows_and_send_index_keys_beside_them(manager_of, layout):
    """Index keys stay SGLang's own: they are sent as a state, separate from the pages of rows."""
    pool = pool_of(layout, make=dsa_pool, skip_topk_layers=[False, True, False])
    manager = manager_of("prefill", pool)
    args = manager.kv_args
    assert manager.kv_cache_dtype_str == DSA_STRINGS[layout]
    assert args.kv_data_ptrs == [layer.data_ptr() for layer in pool.kv_buffer]
    assert args.kv_item_lens == [PAGE * dsa_row_bytes(layout)] * LAYERS
    assert [kind.value for kind in args.state_types] == ["dsa"]
    assert args.state_data_ptrs == [[pages.data_ptr() for pages in pool.index_k_with_scale_buffer]]
    assert args.state_item_lens == [[INDEX_PAGE_BYTES, 0, INDEX_PAGE_BYTES]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stock_peer_of_a_sparse_model(manager_of, bootstrap, layout):
    """A stock server says `fp8_e4m3` for raw and for scaled rows, so neither is accepted as ours."""
    stock = dsa_pool("bf16" if layout in OURS_ALONE else layout, stock=True)
    manager_of("prefill", stock, layout=None)
    peer = manager_of("decode", pool_of(layout, make=dsa_pool))
    refused = pytest.raises(RuntimeError, match=f"stores SGLang's own rows .* rows of layout {layout} ")
    with nullcontext() if layout == "bf16" else refused:
        assert peer.try_ensure_parallel_info(bootstrap)


def test_rows_of_264_bytes_are_not_those_of_a_dense_pool(manager_of, bootstrap):
    """Dense pools pad them to 272 bytes, and SGLang sees another dtype."""
    manager_of("prefill", pool_of("fp8_block_scale", page_size=PAGE, kv_lora_rank=256, qk_rope_head_dim=0))
    peer = manager_of("decode", pool_of("fp8_block_scale", make=dsa_pool, rank=256, rope=0))
    assert peer.kv_cache_dtype_str == "fp8_e4m3+kvpool:fp8_block_scale-r256-p0-b264-v1"
    with pytest.raises(RuntimeError, match=r"-b272-v1\), .*-b264-v1\)"):
        peer.try_ensure_parallel_info(bootstrap)
