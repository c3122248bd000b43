"""LayoutHybridLinearKVPool, the real class on SGLang's real base class: attributes and refusals."""

import numpy as np
import pytest
import torch
from dsa_pools import layer, values
from hybrid_pools import (
    DTYPES,
    LAYOUTS,
    MLA_LAYERS,
    PAGE,
    ROW_BYTES,
    SIZE,
    as_bytes,
    hybrid_pool,
    stock_pool,
)
from hybrid_rows import PACKED, everywhere, fill

pytestmark = pytest.mark.usefixtures("published")


# -------------------------------------------------------------------- sizes and attributes


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("rope", [64, 0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_and_shapes(layout, rope, page_size):
    """Sizes count the rows only; the pool of states counts its own bytes."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    from sgl_kvpool.srt.pool import LayoutMLATokenToKVPool, RowPool

    pool = hybrid_pool(layout, rope=rope, page_size=page_size)
    row, slots = ROW_BYTES[layout][rope == 0], SIZE + page_size
    assert isinstance(pool, HybridLinearKVPool)
    assert isinstance(pool, RowPool)
    assert type(pool.full_kv_pool) is LayoutMLATokenToKVPool
    assert pool.row_pool is pool.full_kv_pool
    assert pool.get_kv_size_bytes() == slots * len(MLA_LAYERS) * row
    assert pool.mem_usage == pytest.approx(pool.get_kv_size_bytes() / 2**30)
    assert pool.get_kv_buffer_shape() == ((slots, 1, 512 + rope), (slots, 1, 512))
    assert pool.get_v_head_dim() == 512
    assert (pool.kv_lora_rank, pool.qk_rope_head_dim) == (512, rope)
    assert pool.row_format.row_bytes == row
    assert pool.kv_cache_dim * pool.full_kv_pool.store_dtype.itemsize == row
    pointers, sizes, page_bytes = pool.get_contiguous_buf_infos()
    assert pointers == [tensor.data_ptr() for tensor in pool.full_kv_pool.kv_buffer]
    assert (sizes, page_bytes) == ([slots * row] * 3, [page_size * row] * 3)
    assert pool.get_kv_layer_ids() == MLA_LAYERS
    (declared,) = pool.host_pool_decls()
    assert (declared.pool_name.value, declared.device_pool) == ("kv", pool.full_kv_pool)


@everywhere
@pytest.mark.parametrize("layout", LAYOUTS)
def test_requested_layout_arrangement_and_options_reach_the_pool(layout, arrangement):
    from sgl_kvpool.transfer.host_options import HostTierOptions

    options = HostTierOptions(engine="cpu")
    pool = hybrid_pool(layout, arrangement, options={"host_tier": options, "readers": ("kvpool_mla",)})
    assert pool.kv_cache_layout == layout
    assert pool.kv_cache_arrangement == arrangement
    assert pool.dtype == DTYPES[layout]
    assert pool.full_kv_pool.host_tier is options
    assert pool.get_kv_size_bytes() == (SIZE + PAGE) * 3 * ROW_BYTES[layout][0]
    assert pool.page_stride == pool.full_kv_pool.page_stride
    assert (pool.page_stride is None) == (arrangement != "page_major")


@pytest.mark.parametrize("layout", ["bf16", "fp8"])
def test_dense_rows_are_what_sglangs_pool_has(layout):
    """Every getter of rows of SGLang's pool, on the same bytes."""
    pool, stock = hybrid_pool(layout), stock_pool(layout)
    fill(pool)
    for ours, theirs in zip(pool.full_kv_pool.kv_buffer, stock.full_kv_pool.kv_buffer, strict=True):
        row_bytes = ours.view(torch.uint8)
        if layout == "fp8":  # without NaN, which Triton's interpreter decodes as 480
            row_bytes[row_bytes & 0x7F == 0x7F] = 0x7E
        theirs.view(torch.uint8).copy_(row_bytes)
    assert pool.get_v_head_dim() == stock.get_v_head_dim()
    assert pool.kv_cache_dim == stock.kv_cache_dim
    assert pool.get_kv_size_bytes() == stock.get_kv_size_bytes()
    for layer_id in MLA_LAYERS:
        for getter in ("get_key_buffer", "get_value_buffer"):
            found, wanted = getattr(pool, getter)(layer_id), getattr(stock, getter)(layer_id)
            assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
            assert np.array_equal(as_bytes(found), as_bytes(wanted))
        key, value = pool.get_kv_buffer(layer_id)
        assert (
            key.data_ptr()
            == value.data_ptr()
            == pool.full_kv_pool.kv_buffer[MLA_LAYERS.index(layer_id)].data_ptr()
        )
        for found, wanted in zip((key, value), stock.get_kv_buffer(layer_id), strict=True):
            assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        slots = torch.tensor([15, 4, 7, 1, 10])
        for dtype in (None, torch.bfloat16):
            parts = (each.get_mla_kv_buffer(layer(layer_id), slots, dtype) for each in (pool, stock))
            for found, wanted in zip(*parts, strict=True):
                assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
                assert np.array_equal(as_bytes(found), as_bytes(wanted))


@pytest.mark.parametrize("getter", ["get_key_buffer", "get_value_buffer", "get_kv_buffer"])
@pytest.mark.parametrize("layout", PACKED)
def test_packed_rows_have_no_values(layout, getter):
    with pytest.raises(TypeError, match=rf"on a {layout} pool: .*get_row_buffer.*kvpool_mla"):
        getattr(hybrid_pool(layout), getter)(3)


# -------------------------------------------------------------------- refusals


def test_models_and_pools_that_it_is_not_for():
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    with pytest.raises(ValueError, match="attention backend fa3 cannot read"):
        hybrid_pool("fp4", options={"readers": ("fa3",)})
    with pytest.raises(ValueError, match="SGLang sees layout .* as torch.bfloat16"):
        hybrid_pool("fp4", dtype=torch.float8_e4m3fn)
    assert hybrid_pool("fp4", full_kv_pool_class=MLATokenToKVPool).kv_cache_layout == "fp4"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0, "x", None])
def test_a_bad_scale_is_named_by_the_models_layer(bad):
    with pytest.raises(ValueError, match=r"^k_scale=.* of layer 4 is "):
        hybrid_pool("fp8", k_scales={4: bad})


def test_lists_of_layers():
    pool = hybrid_pool("fp4", full_attention_layer_ids=(layer_id for layer_id in (4, 1)))
    assert pool.get_kv_layer_ids() == [4, 1]
    assert pool.get_row_buffer(4).data_ptr() == pool.full_kv_pool.kv_buffer[0].data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layer_objects_id_does_not_change_during_a_call(layout):
    """Threads may share the object."""
    pool, attention = hybrid_pool(layout), layer(4)
    nope, rope = values(1, 512, 64)
    combined, seen = torch.cat([nope, rope], -1), set()
    inner = pool.full_kv_pool

    def spy(method):
        original = getattr(inner, method)

        def call(layer, *args, **kwargs):
            seen.add(layer.layer_id)
            return original(layer, *args, **kwargs)

        setattr(inner, method, call)

    for method in ("set_kv_buffer", "set_mla_kv_buffer", "get_mla_kv_buffer"):
        spy(method)
    pool.set_kv_buffer(attention, torch.tensor([1]), combined, combined)
    pool.set_mla_kv_buffer(attention, torch.tensor([1]), nope, rope)
    pool.get_mla_kv_buffer(attention, torch.tensor([1]))
    assert seen == {4}


def test_a_stage_without_mla_layers():
    """A pipeline stage."""
    pool = hybrid_pool("fp4", full_attention_layer_ids=[])
    assert pool.get_kv_size_bytes() == 0
    assert pool.get_contiguous_buf_infos() == ([], [], [])
    assert pool.get_kv_layer_ids() == []
