"""LayoutHybridLinearKVPool: what it passes on to the pool of rows and to the pool of states.

Pooled index keys are in test_hybrid_pooled_keys.py, all other names of SGLang's class in
test_hybrid_methods.py.
"""

import codec_oracle as oracle
import numpy as np
import pytest
import torch
from pools import (
    ARRANGEMENTS,
    DTYPES,
    LINEAR_LAYERS,
    MLA_LAYERS,
    POOLED,
    assert_holds,
    copied,
    fill,
    guard,
    hybrid_pool,
    layer,
    values,
    waits,
)

pytestmark = pytest.mark.usefixtures("published")


LAYOUTS = oracle.LAYOUTS
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
PROPERTIES = [
    "dsa_kv_cache_store_fp8", "kv_cache_dim", "index_head_dim", "quant_block_size", "index_kpool",
    "index_page_size", "tail_extra_slots", "index_kpool_compress",
]  # fmt: skip


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


# -------------------------------------------------------------------- attributes


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@every_layout
def test_requested_layout_arrangement_and_options_reach_the_pool(layout, arrangement):
    from sgl_kvpool.srt.pool import LayoutMLATokenToKVPool
    from sgl_kvpool.transfer.host_options import HostTierOptions

    options = HostTierOptions(engine="cpu")
    pool = hybrid_pool(layout, arrangement, host_tier=options, readers=("kvpool_mla",))
    assert pool.kv_cache_layout == layout
    assert pool.kv_cache_arrangement == arrangement
    assert pool.dtype == DTYPES[layout]
    assert pool.full_kv_pool.host_tier is options
    assert type(pool.row_pool) is LayoutMLATokenToKVPool
    assert pool.row_pool is pool.full_kv_pool
    assert pool.get_kv_layer_ids() == MLA_LAYERS
    (declared,) = pool.host_pool_decls()
    assert (declared.pool_name.value, declared.device_pool) == ("kv", pool.full_kv_pool)
    assert pool.page_stride == pool.full_kv_pool.page_stride
    assert (pool.page_stride is None) == (arrangement != "page_major")


@pytest.mark.parametrize("layout", ["bf16", "fp8"])
def test_dense_rows_are_what_sglangs_pool_has(layout):
    """Every getter of rows of SGLang's pool, on the same bytes."""
    pool, stock = hybrid_pool(layout), hybrid_pool(layout, stock=True)
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


# -------------------------------------------------------------------- refusals


def test_models_and_pools_that_it_is_not_for():
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    with pytest.raises(ValueError, match="attention backend fa3 cannot read"):
        hybrid_pool("fp4", readers=("fa3",))
    with pytest.raises(ValueError, match="SGLang sees layout .* as torch.bfloat16"):
        hybrid_pool("fp4", dtype=torch.float8_e4m3fn)
    assert hybrid_pool("fp4", full_kv_pool_class=MLATokenToKVPool).kv_cache_layout == "fp4"


def test_lists_of_layers():
    pool = hybrid_pool("fp4", layers=(layer_id for layer_id in (4, 1)))
    assert pool.get_kv_layer_ids() == [4, 1]
    assert pool.get_row_buffer(4).data_ptr() == pool.full_kv_pool.kv_buffer[0].data_ptr()


@every_layout
def test_the_layer_objects_id_does_not_change_during_a_call(layout):
    """Threads may share the object."""
    pool, attention = hybrid_pool(layout), layer(4)
    nope, rope = values(1)
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
    pool = hybrid_pool("fp4", layers=[])
    assert pool.get_kv_size_bytes() == 0
    assert pool.get_contiguous_buf_infos() == ([], [], [])
    assert pool.get_kv_layer_ids() == []


def test_states_are_described_by_their_own_pool():
    """For a transfer to a decode server, for example."""
    pool = hybrid_pool("fp4")
    assert pool.get_state_buf_infos() == pool.mamba_pool.get_contiguous_buf_infos()
    assert pool.get_state_layer_ids() == pool.mamba_pool.get_state_layer_ids()
    assert pool.get_state_dim_per_tensor() == pool.mamba_pool.get_state_dim_per_tensor()
    assert pool.get_state_slice_outer_counts() == pool.mamba_pool.get_state_slice_outer_counts()
    assert pool.get_state_conv_shard_groups() == pool.mamba_pool.get_state_conv_shard_groups()
    assert len(pool.get_state_slice_outer_counts()) == len(pool.get_state_conv_shard_groups()) != 0


# -------------------------------------------------------------------- sparse attention


@pytest.mark.parametrize("start_layer", [0, 1])
def test_broadcastable_index_keys_are_those_of_their_model_layer(start_layer):
    pool = hybrid_pool("fp4", sparse=True, start_layer=start_layer)
    wanted, waited = fill(pool), waits(pool)
    for place, layer_id in enumerate(MLA_LAYERS):
        buffer = pool.get_broadcastable_index_k_with_scale_buffer(layer_id)
        assert buffer.data_ptr() == pool.full_kv_pool.index_k_with_scale_buffer[place].data_ptr()
        assert np.array_equal(buffer.numpy(), wanted["index", layer_id])
    assert waited == [layer_id - start_layer for layer_id in MLA_LAYERS]


def test_what_only_sharded_pools_have(monkeypatch):
    """SGLang's wrapper calls two methods that only some inner pools have; they receive the inner layer id."""
    pool = hybrid_pool("fp4", sparse=True)
    guard(pool)
    wanted = copied(pool)
    for layer_id in (*MLA_LAYERS, *LINEAR_LAYERS):
        assert pool.invalidate_index_buffer_for_layer(layer_id) is None
    assert_holds(pool, wanted)
    asked, kind = [], type(pool.full_kv_pool)
    for name in ("invalidate_index_buffer_for_layer", "_get_broadcastable_index_buffer"):
        monkeypatch.setattr(kind, name, lambda self, at, name=name: asked.append((name, at)), raising=False)
    for place, layer_id in enumerate(MLA_LAYERS):
        pool.invalidate_index_buffer_for_layer(layer_id)
        pool.get_broadcastable_index_k_with_scale_buffer(layer_id)
        assert [at for _, at in asked] == [place] * 2
        assert len(dict(asked)) == 2
        asked.clear()
    with pytest.raises(ValueError, match="layer_id=2 not in full attention layers"):
        pool.invalidate_index_buffer_for_layer(2)


@pytest.mark.parametrize("layer_id", [*LINEAR_LAYERS, 6, -1])
def test_layers_without_index_keys_are_refused(layer_id):
    pool = hybrid_pool("fp4", sparse=True)
    guard(pool)
    keys, scales, slots, wanted = torch.ones(1, 128), torch.ones(1, 1), torch.tensor([1]), copied(pool)
    calls = (
        lambda: pool.set_index_k_scale_buffer(layer_id, slots, keys, scales),
        lambda: pool.get_index_k_with_scale_buffer(layer_id),
        lambda: pool.get_broadcastable_index_k_with_scale_buffer(layer_id),
        lambda: pool.get_index_k_scale_buffer(layer_id, slots, slots[None], 1, 1),
        lambda: pool.get_compress_tail_buffers(layer_id),
        lambda: pool.set_compress_tail_for_request(layer_id, slots, keys, keys, 1, 0),
        lambda: pool.kpool_decode_update_index_cache(layer_id, *[None] * 8),
    )
    for call in calls:
        with pytest.raises(ValueError, match=f"layer_id={layer_id} not in full attention layers"):
            call()
    assert_holds(pool, wanted)


@pytest.mark.parametrize("pooled", [False, True])
@every_layout
def test_properties_are_those_of_the_inner_pool(layout, pooled):
    asked = POOLED if pooled else {"sparse": True}
    pool = hybrid_pool(layout, **asked)
    said = {name: getattr(pool, name) for name in PROPERTIES}
    assert said == {name: getattr(pool.full_kv_pool, name) for name in PROPERTIES}
    wanted = (128, 128, 4, 64, 2, True) if pooled else (128, 128, 1, 64, 0, False)
    assert tuple(said[name] for name in PROPERTIES[2:]) == wanted
    assert said["dsa_kv_cache_store_fp8"] is (layout == "fp8_block_scale")
    if layout not in oracle.OURS_ALONE:  # SGLang's pool has no such rows
        stock = hybrid_pool(layout, stock=True, **asked)
        assert said == {name: getattr(stock, name) for name in PROPERTIES}
        assert pool.get_kv_size_bytes() == stock.get_kv_size_bytes()
        assert pool.mem_usage == stock.mem_usage
