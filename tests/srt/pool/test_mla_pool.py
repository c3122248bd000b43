"""LayoutMLATokenToKVPool, the real class on SGLang's real base class, in every layout."""

from types import SimpleNamespace

import codec_oracle as oracle
import numpy as np
import pytest
import torch

pytestmark = pytest.mark.usefixtures("published")

SIZE, LAYERS, START = 37, 3, 5  # slots without the padded page, layers, first model layer


def make_pool(layout, *, rank=512, rope=64, page_size=1, size=SIZE, k_scales=None, **extra):
    from sgl_kvpool.layout import MLAKVCacheLayout
    from sgl_kvpool.srt.pool import LayoutMLATokenToKVPool, PoolOptions

    shown = MLAKVCacheLayout(layout).sglang_kv_cache_dtype()
    arguments = {
        "page_size": page_size,
        "dtype": {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}[shown],
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
        "start_layer": START,
        "end_layer": START + LAYERS - 1,
    }
    arguments.update(extra)
    return LayoutMLATokenToKVPool(size, options=PoolOptions(layout, k_scales), **arguments)


def layer_object(layer_id):
    return SimpleNamespace(layer_id=layer_id)


def values(tokens, rank, rope, seed=0):
    """Non-contiguous bf16 latent and rope of `tokens` tokens, [tokens, 1, width]."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(tokens, 1, rank + 3 + rope, generator=generator, dtype=torch.bfloat16)
    return wide[..., :rank], wide[..., rank + 3 :]


def stored(pool, layer_id):
    """Bytes of a layer as numpy [slots, row_bytes], without the pool's methods."""
    tensor = pool.kv_buffer[layer_id - pool.start_layer]
    return tensor.view(torch.uint8).numpy().reshape(tensor.shape[0], -1)


def expected_rows(layout, nope, rope, rank, rope_dim, row_bytes, k_scale=1.0):
    rope = rope.squeeze(1) if rope_dim else None
    return oracle.encode(nope.squeeze(1), rope, layout, rank, rope_dim, row_bytes, k_scale)


LAYOUTS = oracle.LAYOUTS
PACKED, ROW_BYTES = oracle.PACKED, oracle.ROW_BYTES


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 2, 61, 64])
def test_buffers_and_sizes(layout, page_size):
    pool = make_pool(layout, page_size=page_size, size=page_size * 3)
    slots = page_size * 4  # SGLang pads one page
    assert [tuple(t.shape[:2]) for t in pool.kv_buffer] == [(slots, 1)] * LAYERS
    total = LAYERS * slots * ROW_BYTES[layout]
    assert pool.get_kv_size_bytes() == total == sum(t.nbytes for t in pool.kv_buffer)
    pointers, lengths, items = pool.get_contiguous_buf_infos()
    assert pointers == [t.data_ptr() for t in pool.kv_buffer]
    assert lengths == [slots * ROW_BYTES[layout]] * LAYERS
    assert items == [page_size * ROW_BYTES[layout]] * LAYERS
    assert pool.mem_usage == pytest.approx(total / 2**30)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_device_pool_infos_describe_the_bytes(layout):
    pool = make_pool(layout, page_size=2)
    (info,) = pool.get_device_pool_infos()
    info.buffer_info.validate(layer_ids=info.layer_ids)
    assert info.layer_ids == (5, 6, 7)
    itemsize = info.buffer_info.dtype.itemsize
    assert info.buffer_info.kv_cache_dim * itemsize == ROW_BYTES[layout]
    assert info.buffer_info.data_ptrs.tolist() == [t.data_ptr() for t in pool.kv_buffer]
    assert info.buffer_info.scales is None
    assert info.buffer_info.packed_fp8 is False


@pytest.mark.parametrize("layout", PACKED)
def test_packed_rows_are_bytes(layout):
    pool = make_pool(layout)
    assert all(t.dtype == torch.uint8 for t in pool.kv_buffer)
    assert pool.store_dtype == torch.uint8
    assert pool.dtype == torch.bfloat16


@pytest.mark.parametrize("layout", ["bf16", "fp8"])
def test_unpacked_rows_are_sglangs_own_tensors(layout):
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    pool = make_pool(layout)
    stock = MLATokenToKVPool(SIZE, 1, pool.dtype, 512, 64, LAYERS, "cpu", False, START, START + 2)
    assert [(t.shape, t.dtype) for t in pool.kv_buffer] == [(t.shape, t.dtype) for t in stock.kv_buffer]
    assert pool.get_key_buffer(6).dtype == stock.get_key_buffer(6).dtype
    assert pool.get_value_buffer(6).shape == stock.get_value_buffer(6).shape


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (512, 0), (256, 64), (128, 0)])
def test_writes_reach_their_bytes_and_no_others(layout, rank, rope):
    pool = make_pool(layout, rank=rank, rope=rope)
    for tensor in pool.kv_buffer:
        tensor.view(torch.uint8).fill_(0xEE)
    loc = torch.tensor([3, 36, 1, 17], dtype=torch.int64)
    nope, rope_values = values(4, rank, rope)
    pool.set_mla_kv_buffer(layer_object(6), loc, nope, rope_values if rope else None)

    found = stored(pool, 6)
    rows = expected_rows(layout, nope, rope_values, rank, rope, found.shape[1])
    assert np.array_equal(found[loc.numpy()], rows)
    untouched = np.setdiff1d(np.arange(len(found)), loc.numpy())
    assert (found[untouched] == 0xEE).all()
    assert (stored(pool, 5) == 0xEE).all()
    assert (stored(pool, 7) == 0xEE).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_combined_rows_equal_separate_ones(layout):
    nope, rope = values(5, 512, 64, seed=1)
    loc = torch.tensor([9, 2, 4, 30, 31])
    one, two = make_pool(layout), make_pool(layout)
    one.set_mla_kv_buffer(layer_object(7), loc, nope, rope)
    combined = torch.cat([nope, rope], -1)
    two.set_kv_buffer(layer_object(7), loc, combined, combined[..., :512])
    assert np.array_equal(stored(one, 7), stored(two, 7))
    assert stored(one, 7)[loc.numpy()].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", ["set_kv_buffer", "set_mla_kv_buffer"])
def test_layer_id_override_and_write_locations(layout, method):
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    nope, rope = values(2, 512, 64, seed=2)
    loc = torch.tensor([8, 5], dtype=torch.int32)
    pool = make_pool(layout)
    parts = (nope, rope) if method == "set_mla_kv_buffer" else (torch.cat([nope, rope], -1), None)
    getattr(pool, method)(None, KVWriteLoc(loc.long()), *parts, layer_id_override=7)
    found = stored(pool, 7)
    rows = expected_rows(layout, nope, rope, 512, 64, found.shape[1])
    assert np.array_equal(found[[8, 5]], rows)
    assert not stored(pool, 5).any()
    assert not stored(pool, 6).any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rope", [64, 0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reads_decode_what_was_stored(layout, rope, dtype):
    pool = make_pool(layout, rope=rope)
    nope, rope_values = values(6, 512, rope, seed=3)
    loc = torch.tensor([11, 3, 35, 6, 20, 1])
    pool.set_mla_kv_buffer(layer_object(5), loc, nope, rope_values)
    picked = torch.tensor([2, 0, 5], dtype=torch.int32)
    got_nope, got_rope = pool.get_mla_kv_buffer(layer_object(5), loc[picked.long()].int(), dtype)

    rows = stored(pool, 5)[loc[picked.long()].numpy()]
    wanted = oracle.decode(rows, layout, 512, rope)
    assert got_nope.shape == (3, 1, 512)
    assert got_nope.is_contiguous()
    oracle.assert_same_values(got_nope.squeeze(1), oracle.cast(wanted[:, :512], dtype))
    if rope:
        assert got_rope.shape == (3, 1, 64)
        assert got_rope.is_contiguous()
        oracle.assert_same_values(got_rope.squeeze(1), oracle.cast(wanted[:, 512:], dtype))
    else:
        assert got_rope is None


def test_fp8_without_a_dtype_gives_the_stored_values():
    pool = make_pool("fp8", k_scales={5: 0.25})
    nope, rope = values(2, 512, 64, seed=4)
    loc = torch.tensor([4, 2])
    pool.set_mla_kv_buffer(layer_object(5), loc, nope, rope)
    got, _ = pool.get_mla_kv_buffer(layer_object(5), loc)
    assert got.dtype == torch.float8_e4m3fn
    assert np.array_equal(got.view(torch.uint8).numpy()[:, 0], stored(pool, 5)[[4, 2], :512])


def test_k_scale_belongs_to_the_pool_and_layer_not_to_the_layer_object():
    pool = make_pool("fp8", k_scales={5: 0.25, 7: 3.0})
    nope, rope = values(2, 512, 64, seed=5)
    loc = torch.tensor([4, 2])
    # As in SGLang's prefill: the layer object has no scale, or a wrong one.
    for layer_id, k_scale in ((5, 0.25), (6, 1.0), (7, 3.0)):
        layer = SimpleNamespace(layer_id=layer_id, k_scale=None, k_scale_float=99.0)
        pool.set_mla_kv_buffer(layer, loc, nope, rope)
        rows = expected_rows("fp8", nope, rope, 512, 64, 576, k_scale)
        assert np.array_equal(stored(pool, layer_id)[[4, 2]], rows)
        back, _ = pool.get_mla_kv_buffer(layer, loc, torch.float32)
        wanted = oracle.decode(rows, "fp8", 512, 64, k_scale)[:, :512]
        oracle.assert_same_values(back.squeeze(1), oracle.cast(wanted, torch.float32))


@pytest.mark.parametrize("layout", ["bf16", *PACKED])
def test_other_layouts_ignore_k_scale(layout):
    nope, rope = values(2, 512, 64, seed=6)
    loc = torch.tensor([1, 2])
    plain, scaled = make_pool(layout), make_pool(layout, k_scales={5: 0.5})
    for pool in (plain, scaled):
        pool.set_mla_kv_buffer(layer_object(5), loc, nope, rope)
    assert np.array_equal(stored(plain, 5), stored(scaled, 5))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan"), 1e-46, 1e39])
def test_damaged_k_scale_is_refused(bad):
    with pytest.raises(ValueError, match="layer 6"):
        make_pool("fp8", k_scales={6: bad})
    with pytest.raises(ValueError, match="key '6'"):
        make_pool("fp8", k_scales={"6": 1.0})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_move_and_cpu_copy_move_whole_rows(layout):
    pool = make_pool(layout)
    for number, tensor in enumerate(pool.kv_buffer):
        data = tensor.view(torch.uint8)
        generator = torch.Generator().manual_seed(number)
        data.copy_(torch.randint(0, 256, data.shape, generator=generator, dtype=torch.uint8))
    before = [stored(pool, START + i).copy() for i in range(LAYERS)]
    # Overlapping: slot 3 is source and target.
    pool.move_kv_cache(torch.tensor([3, 20]), torch.tensor([7, 3]))
    for i, rows in enumerate(before):
        rows[[3, 20]] = rows[[7, 3]]
        assert np.array_equal(stored(pool, START + i), rows)

    pool.cpu_offloading_chunk_size = 2  # more than one chunk
    slots = torch.tensor([5, 36, 9, 2, 1])
    saved = pool.get_cpu_copy(slots)
    for tensor in pool.kv_buffer:
        tensor.view(torch.uint8)[slots] = 0xEE
    other = torch.tensor([10, 11, 12, 13, 14])
    pool.load_cpu_copy(saved, other)
    for i, rows in enumerate(before):
        rows[other.numpy()] = rows[slots.numpy()]
        rows[slots.numpy()] = 0xEE
        assert np.array_equal(stored(pool, START + i), rows)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_buffer_is_a_view_and_waits_for_loads(layout):
    pool = make_pool(layout)
    waited = []
    pool.layer_transfer_counter = SimpleNamespace(wait_until=waited.append)
    rows = pool.get_row_buffer(6)
    assert rows.shape == (SIZE + 1, 1, ROW_BYTES[layout])
    assert rows.dtype == torch.uint8
    assert rows.data_ptr() == pool.kv_buffer[1].data_ptr()
    assert waited == [1]
    pool.get_mla_kv_buffer(layer_object(7), torch.tensor([1]), torch.bfloat16)
    assert waited[-1] == 2


@pytest.mark.parametrize("layout", PACKED)
@pytest.mark.parametrize("getter", ["get_key_buffer", "get_value_buffer", "get_kv_buffer"])
def test_getters_of_packed_rows_name_the_way_out(layout, getter):
    with pytest.raises(TypeError, match=r"get_row_buffer"):
        getattr(make_pool(layout), getter)(5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layer_id", [4, 2, 8])
def test_layers_outside_of_the_pool_are_refused(layout, layer_id):
    """A negative index would read another layer's rows."""
    pool = make_pool(layout)
    nope, rope = values(1, 512, 64)
    loc = torch.tensor([3])
    for call in (
        lambda: pool.set_mla_kv_buffer(layer_object(layer_id), loc, nope, rope),
        lambda: pool.set_kv_buffer(layer_object(layer_id), loc, torch.cat([nope, rope], -1), None),
        lambda: pool.get_row_buffer(layer_id),
        lambda: pool.get_mla_kv_buffer(layer_object(layer_id), loc, torch.bfloat16),
    ):
        with pytest.raises(IndexError, match=f"layer {layer_id} is outside of this pool.*5 to 7"):
            call()
    assert not any(stored(pool, START + i).any() for i in range(LAYERS))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_rope_is_refused_and_no_tokens_are_fine(layout):
    pool = make_pool(layout)
    nope, rope = values(2, 512, 64)
    with pytest.raises(ValueError, match="cache_k_rope is None, but rows of this pool hold 64"):
        pool.set_mla_kv_buffer(layer_object(5), torch.tensor([3, 4]), nope, None)
    empty = torch.empty(0, dtype=torch.int64)
    pool.set_mla_kv_buffer(layer_object(5), empty, nope[:0], rope[:0])
    assert not stored(pool, 5).any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes_never_raise(layout):
    pool = make_pool(layout, page_size=2, size=6)
    assert pool.get_kv_buffer_shape() == ((8, 1, 576), (8, 1, 512))
    assert pool.get_v_head_dim() == 512


@pytest.mark.parametrize("layout", PACKED)
def test_sglangs_host_accounting_sees_row_bytes(layout):
    """HiCache compares target and draft pools by these attributes."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    pool = make_pool(layout)
    assert isinstance(pool, MLATokenToKVPool)
    assert (pool.kv_cache_dim, pool.store_dtype) == (ROW_BYTES[layout], torch.uint8)


def test_wrong_dtype_and_geometry_are_refused():
    with pytest.raises(ValueError, match=r"SGLang sees layout fp4 as torch\.bfloat16"):
        make_pool("fp4", dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="kv_lora_rank=448"):
        make_pool("fp4", rank=448)
    with pytest.raises(ValueError, match="qk_rope_head_dim=32"):
        make_pool("fp4", rope=32)


def test_memory_saver_region_wraps_the_allocation(monkeypatch):
    """SGLang's memory saver must see our allocation as it sees its own."""
    from contextlib import contextmanager

    from sglang.srt.mem_cache import memory_pool

    regions = []

    @contextmanager
    def region(tag, **kwargs):
        regions.append(("in", tag))
        yield
        regions.append(("out", tag))

    adapter = SimpleNamespace(region=region, enabled=True)
    monkeypatch.setattr(memory_pool.TorchMemorySaverAdapter, "create", lambda enable: adapter)
    make_pool("fp4", enable_memory_saver=True)
    tag = memory_pool.GPU_MEMORY_TYPE_KV_CACHE
    assert regions == [("in", tag), ("out", tag)]
