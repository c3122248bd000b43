"""Prefill and decode servers of hybrid models: SGLang's queues describe rows and states of real pools."""

import pytest
from managers import pool_of
from pools import LAYOUTS, MLA_LAYERS, hybrid_pool


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_and_states_are_described_and_rows_compared(manager_of, bootstrap, layout, sparse):
    """Rows are described by model layer, states by SGLang as without a layout."""
    pool = pool_of(layout, hybrid_pool, sparse=sparse)
    prefill = manager_of("prefill", pool, with_rows=MLA_LAYERS)
    described, rows = prefill.kv_args, pool.full_kv_pool
    assert described.kv_data_ptrs == [tensor.data_ptr() for tensor in rows.kv_buffer]
    assert described.kv_item_lens == [pool.page_size * rows.row_format.row_bytes] * 3
    assert described.kv_layer_ids == MLA_LAYERS
    assert [kind.value for kind in described.state_types] == ["mamba", *(["dsa"] if sparse else [])]
    assert described.state_data_ptrs[0] == pool.mamba_pool.get_contiguous_buf_infos()[0]
    # The rows of bf16 are SGLang's own.
    assert ("+kvpool:" in prefill.kv_cache_dtype_str) == (layout != "bf16")

    peer = pool_of(layout, hybrid_pool, sparse=sparse)
    decode = manager_of("decode", peer, with_rows=MLA_LAYERS)
    assert decode.try_ensure_parallel_info(bootstrap)
    assert decode.kv_cache_dtype_str == prefill.kv_cache_dtype_str
