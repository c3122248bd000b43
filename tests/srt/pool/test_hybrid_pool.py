"""LayoutHybridLinearKVPool: what it passes on to the pool of rows and to the pool of states."""

import codec_oracle as oracle
import pytest
import torch
from pools import ARRANGEMENTS, DTYPES, MLA_LAYERS, POOLED, assert_holds, fill, hybrid_pool

pytestmark = pytest.mark.usefixtures("published")

LAYOUTS = oracle.LAYOUTS
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
PROPERTIES = [
    "dsa_kv_cache_store_fp8", "kv_cache_dim", "index_head_dim", "quant_block_size", "index_kpool",
    "index_page_size", "tail_extra_slots", "index_kpool_compress",
]  # fmt: skip


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@every_layout
def test_requested_layout_arrangement_and_options_reach_the_pool(layout, arrangement):
    from sgl_kvpool.srt.pool.mla import LayoutMLATokenToKVPool
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


def test_a_stage_without_mla_layers():
    """A pipeline stage."""
    pool = hybrid_pool("fp4", layers=[])
    assert pool.get_kv_size_bytes() == 0
    assert pool.get_contiguous_buf_infos() == ([], [], [])
    assert pool.get_kv_layer_ids() == []


def test_cpu_copies_carry_the_tails_of_pooled_index_keys(monkeypatch):
    """To the tail of another request, and to another page of keys."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    pool = hybrid_pool("bf16", **POOLED)
    was, state, generator = fill(pool), torch.tensor([1]), torch.Generator().manual_seed(1)
    tails = [part for layer_id in MLA_LAYERS for part in pool.get_compress_tail_buffers(layer_id)]
    wanted = [part.copy_(torch.randn(part.shape, generator=generator)).clone() for part in tails]
    saved = pool.get_cpu_copy(torch.arange(256, 512), mamba_indices=state, req_pool_index=1)
    pool.load_cpu_copy(saved, torch.arange(512, 768), mamba_indices=state, req_pool_index=3)
    for found, part in zip(tails, wanted, strict=True):
        part[3] = part[1]
        assert torch.equal(found, part)
    for layer_id in MLA_LAYERS:
        was["rows", layer_id][2] = was["rows", layer_id][1]
        was["index", layer_id][2] = was["index", layer_id][1]
    assert_holds(pool, was)


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
