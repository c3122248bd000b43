"""LayoutDSATokenToKVPool, the real class on SGLang's real base class: bytes written, moved and described."""

from types import SimpleNamespace

import codec_oracle as oracle
import numpy as np
import pytest
import torch
from dsa_pools import (
    CASES,
    DTYPES,
    GEOMETRIES,
    GUARD,
    INDEX_BYTES,
    INDEX_PAGE_BYTES,
    LAYERS,
    LAYOUTS,
    PAGE,
    PAGES,
    SLOTS,
    START,
    dsa_pool,
    fill,
    guard,
    index_pages,
    layer,
    row_bytes,
    rows,
    values,
)

pytestmark = pytest.mark.usefixtures("published")

#: The second layer reuses the first layer's top-k, and has no index keys.
SHARED = [False, True, False]


@pytest.fixture
def no_gpu_to_wait_for(monkeypatch):
    """SGLang's copies to the CPU call `torch.cuda.synchronize`, the only part that needs a GPU."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def expected_rows(layout, nope, rope, rank, rope_dim, k_scale=1.0):
    parts = nope.reshape(len(nope), -1), rope.reshape(len(nope), -1) if rope_dim else None
    return oracle.encode(*parts, layout, rank, rope_dim, row_bytes(layout, rank, rope_dim), k_scale)


# -------------------------------------------------------------------- sizes


@pytest.mark.parametrize("skipped", [None, SHARED])
@pytest.mark.parametrize(("layout", "rank", "rope"), CASES)
def test_buffers_and_sizes(layout, rank, rope, skipped):
    pool = dsa_pool(layout, rank, rope, skip_topk_layers=skipped)
    row, with_index = row_bytes(layout, rank, rope), LAYERS - (skipped is not None)
    assert [part.shape for part in rows(pool)] == [(SLOTS, row)] * LAYERS
    lengths = [0 if skip else PAGES for skip in skipped or [False] * LAYERS]
    assert [part.shape for part in index_pages(pool)] == [(pages, INDEX_PAGE_BYTES) for pages in lengths]
    assert pool.get_kv_size_bytes() == SLOTS * (LAYERS * row + with_index * INDEX_BYTES)
    assert pool.mem_usage == pytest.approx(pool.get_kv_size_bytes() / 2**30)
    assert pool.row_format.padding_bytes == 0

    rows_of = [tensor.data_ptr() for tensor in pool.kv_buffer]
    assert pool.get_contiguous_buf_infos() == (rows_of, [SLOTS * row] * LAYERS, [PAGE * row] * LAYERS)
    pointers, sizes, page_sizes = pool.get_state_buf_infos()
    assert pointers == [tensor.data_ptr() for tensor in pool.index_k_with_scale_buffer]
    assert sizes == [pages * INDEX_PAGE_BYTES for pages in lengths]
    assert page_sizes == [INDEX_PAGE_BYTES if pages else 0 for pages in lengths]


def test_a_pool_of_no_whole_number_of_pages():
    """SGLang rounds the number of index pages up."""
    pool = dsa_pool("fp4", size=100)
    assert [part.shape for part in rows(pool)] == [(164, 416)] * LAYERS
    assert [part.shape for part in index_pages(pool)] == [(2, INDEX_PAGE_BYTES)] * LAYERS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_host_pools_that_it_declares(layout):
    """As in SGLang's class: rows, whose host pool is ours, and index keys, whose host pool is SGLang's."""
    pool = dsa_pool(layout, skip_topk_layers=SHARED)
    kv, indexer = pool.host_pool_decls()
    assert (kv.pool_name.value, kv.is_primary, kv.device_pool) == ("kv", True, pool)
    assert (indexer.pool_name.value, indexer.is_primary, indexer.device_pool) == ("indexer", False, pool)
    assert indexer.storage_info.bytes_per_token_per_layer == INDEX_BYTES
    assert indexer.owned_device_layers == (0, 2)
    (alone,) = dsa_pool(layout, skip_topk_layers=[True] * LAYERS).host_pool_decls()
    assert alone.pool_name.value == "kv"


@pytest.mark.parametrize(("layout", "rank", "rope"), CASES)
def test_shapes_never_raise(layout, rank, rope):
    pool = dsa_pool(layout, rank, rope)
    assert pool.get_kv_buffer_shape() == ((SLOTS, 1, rank + rope), (SLOTS, 1, rank))
    assert pool.get_v_head_dim() == rank


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attributes_that_sglang_reads(layout):
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    pool = dsa_pool(layout)
    assert isinstance(pool, DSATokenToKVPool)
    assert pool.dtype == DTYPES[layout]
    assert pool.use_dsa
    # With this flag SGLang's backend and host tier tell scaled rows from other rows.
    assert pool.dsa_kv_cache_store_fp8 is (layout == "fp8_block_scale")
    (info,) = pool.get_device_pool_infos()
    info.buffer_info.validate(layer_ids=info.layer_ids)
    assert info.layer_ids == (2, 3, 4)
    assert info.buffer_info.kv_cache_dim * info.buffer_info.dtype.itemsize == row_bytes(layout)


# -------------------------------------------------------------------- rows


def written_by(method, pool, layer_id, loc, nope, rope, **extra):
    if method == "set_kv_buffer":
        combined = torch.cat([nope, rope], -1)
        pool.set_kv_buffer(layer(layer_id), loc, combined, combined[..., : nope.shape[-1]], **extra)
    else:
        pool.set_mla_kv_buffer(layer(layer_id), loc, nope, rope, **extra)


@pytest.mark.parametrize("method", ["set_mla_kv_buffer", "set_kv_buffer"])
@pytest.mark.parametrize(("layout", "rank", "rope"), CASES)
def test_writes_reach_their_rows_and_nothing_else(layout, rank, rope, method):
    pool = dsa_pool(layout, rank, rope)
    guard(pool)
    loc = torch.tensor([3, SLOTS - 1, 64, 1, 127])
    nope, keys = values(5, rank, rope)
    written_by(method, pool, 3, loc, nope, keys)
    found = rows(pool, 3)
    oracle.assert_same_bytes(found[loc.numpy()], expected_rows(layout, nope, keys, rank, rope))
    assert (np.delete(found, loc.numpy(), axis=0) == GUARD).all()
    assert (rows(pool, 2) == GUARD).all()
    assert (rows(pool, 4) == GUARD).all()
    assert all((part == GUARD).all() for part in index_pages(pool))


@pytest.mark.parametrize("method", ["set_mla_kv_buffer", "set_kv_buffer"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_locations_and_the_layer_that_is_named(layout, method):
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool = dsa_pool(layout)
    nope, keys = values(2, 512, 64, seed=2)
    written_by(method, pool, START, KVWriteLoc(torch.tensor([130, 5])), nope, keys, layer_id_override=4)
    wanted = expected_rows(layout, nope, keys, 512, 64)
    assert np.array_equal(rows(pool, 4)[[130, 5]], wanted)
    assert not rows(pool, 2).any()
    # SGLang's graphs pass int32 locations.
    written_by(method, pool, 2, torch.tensor([7, 9], dtype=torch.int32), nope, keys)
    assert np.array_equal(rows(pool, 2)[[7, 9]], wanted)
    written_by(method, pool, 3, torch.tensor([-7, 11, 9, 12])[1::2], nope, keys)
    assert np.array_equal(rows(pool, 3)[[11, 12]], wanted)


@pytest.mark.parametrize("method", ["set_mla_kv_buffer", "set_kv_buffer"])
@pytest.mark.parametrize(("rank", "rope"), GEOMETRIES)
def test_values_that_are_e4m3_already(rank, rope, method):
    """Raw rows store e4m3 values unchanged: SGLang's fused rope kernel returns them."""
    pool = dsa_pool("fp8", rank, rope)
    nope, keys = (part.to(torch.float8_e4m3fn) for part in values(3, rank, rope, seed=3))
    written_by(method, pool, 3, torch.tensor([1, 70, 71]), nope, keys)
    wanted = torch.cat([nope, keys], -1).squeeze(1).view(torch.uint8).numpy()
    assert np.array_equal(rows(pool, 3)[[1, 70, 71]], wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rope", [None, "empty"])
def test_no_rope_and_no_tokens(layout, rope):
    nope, _ = values(2, 512, 0, seed=4)
    keys = None if rope is None else nope[..., :0]
    pool = dsa_pool(layout, 512, 0)
    pool.set_mla_kv_buffer(layer(3), torch.tensor([8, 5]), nope, keys)
    assert np.array_equal(rows(pool, 3)[[8, 5]], expected_rows(layout, nope, None, 512, 0))
    other = dsa_pool(layout)
    with pytest.raises(ValueError, match="cache_k_rope is None, but rows of this pool hold 64"):
        other.set_mla_kv_buffer(layer(3), torch.tensor([8, 5]), nope, None)
    other.set_mla_kv_buffer(layer(3), torch.tensor([], dtype=torch.int64), nope[:0], nope[:0, :, :64])
    assert not rows(other, 3).any()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("layout", "rank", "rope"), CASES)
def test_reads_decode_what_was_stored(layout, rank, rope, dtype):
    pool = dsa_pool(layout, rank, rope)
    nope, keys = values(4, rank, rope, seed=5)
    loc = torch.tensor([11, 3, 190, 64])
    pool.set_mla_kv_buffer(layer(4), loc, nope, keys)
    read = torch.tensor([190, 11], dtype=torch.int32)
    got_nope, got_keys = pool.get_mla_kv_buffer(layer(4), read, dtype)
    if layout == "fp8" and dtype is None:  # the stored values, in the dtype SGLang sees
        assert np.array_equal(got_nope.view(torch.uint8)[:, 0], rows(pool, 4)[read.numpy(), :rank])
        return
    wanted = oracle.decode(rows(pool, 4)[read.numpy()], layout, rank, rope)
    # Scaled rows are not e4m3 values, although SGLang sees that dtype.
    wanted = oracle.cast(wanted, dtype or torch.bfloat16)
    oracle.assert_same_values(got_nope.squeeze(1), wanted[:, :rank])
    if rope:
        oracle.assert_same_values(got_keys.squeeze(1), wanted[:, rank:])
    else:
        assert got_keys is None


def test_a_k_scale_divides_raw_rows():
    pool = dsa_pool("fp8", options={"k_scales": {3: 0.25}})
    nope, keys = values(2, 512, 64, seed=6)
    for layer_id, k_scale in ((3, 0.25), (4, 1.0)):
        pool.set_mla_kv_buffer(layer(layer_id), torch.tensor([4, 2]), nope, keys)
        wanted = expected_rows("fp8", nope, keys, 512, 64, k_scale)
        assert np.array_equal(rows(pool, layer_id)[[4, 2]], wanted)


# -------------------------------------------------------------------- index keys


@pytest.mark.parametrize("layout", LAYOUTS)
def test_index_keys_are_written_and_read_as_sglang_does(layout):
    pool = dsa_pool(layout)
    guard(pool)
    generator = torch.Generator().manual_seed(7)
    loc = torch.tensor([1, 64, 190])
    keys = torch.randn(3, 128, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 1, generator=generator)
    pool.set_index_k_scale_buffer(3, loc, keys, scales)
    wanted = np.full((PAGES, INDEX_PAGE_BYTES), GUARD, dtype=np.uint8)
    for number, slot in enumerate(loc.tolist()):
        page, place = divmod(slot, 64)
        wanted[page, place * 128 : place * 128 + 128] = keys[number].view(torch.uint8).numpy()
        wanted[page, 8192 + place * 4 : 8192 + place * 4 + 4] = scales[number].numpy().view(np.uint8)
    oracle.assert_same_bytes(pool.get_index_k_with_scale_buffer(3).numpy(), wanted)
    assert all((index_pages(pool)[n] == GUARD).all() for n in (0, 2))
    assert all((part == GUARD).all() for part in rows(pool))


# -------------------------------------------------------------------- whole tokens


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moves_take_rows_and_index_keys(layout):
    """Token by token; slot 3 is source and target."""
    pool = dsa_pool(layout, skip_topk_layers=SHARED)
    was_rows, was_index = fill(pool)
    target, source = [3, 100, 64], [70, 3, 191]
    pool.move_kv_cache(torch.tensor(target), torch.tensor(source))
    for found, was in zip(rows(pool), was_rows, strict=True):
        was[target] = was[source]
        assert np.array_equal(found, was)
    assert not len(index_pages(pool)[1])
    for found, was in zip(index_pages(pool)[::2], was_index[::2], strict=True):
        keys, scales = (part.reshape(-1, size) for part, size in ((was[:, :8192], 128), (was[:, 8192:], 4)))
        keys[target], scales[target] = keys[source], scales[source]
        pages = np.concatenate([keys.reshape(len(was), 8192), scales.reshape(len(was), 256)], axis=1)
        assert np.array_equal(found, pages)
    pool.move_kv_cache(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_on_the_cpu_hold_rows_and_index_keys(no_gpu_to_wait_for, layout):
    """A request is retracted: its pages go to others, and it is restored to other pages."""
    pool = dsa_pool(layout, skip_topk_layers=SHARED)
    pool.cpu_offloading_chunk_size = 48  # more than one chunk
    was_rows, was_index = fill(pool)
    saved = pool.get_cpu_copy(torch.arange(64, 192))
    guard(pool)
    back = torch.cat([torch.arange(128, 192), torch.arange(0, 64)])  # pages 2 and 0
    pool.load_cpu_copy(saved, back)
    for found, was in zip(rows(pool), was_rows, strict=True):
        expected = np.full_like(was, GUARD)
        expected[back.numpy()] = was[64:]
        assert np.array_equal(found, expected)
    for found, was in zip(index_pages(pool), was_index, strict=True):
        expected = np.full_like(was, GUARD)
        if len(was):
            expected[[2, 0]] = was[[1, 2]]
        assert np.array_equal(found, expected)


# -------------------------------------------------------------------- the load fence


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_reader_waits_for_loads(layout):
    pool = dsa_pool(layout)
    waited = []
    pool.layer_transfer_counter = SimpleNamespace(wait_until=waited.append)
    slots = torch.tensor([1])
    readers = [
        lambda: pool.get_row_buffer(3),
        lambda: pool.get_key_buffer(3),
        lambda: pool.get_mla_kv_buffer(layer(3), slots, torch.bfloat16),
        lambda: pool.get_index_k_with_scale_buffer(3),
    ]
    if layout not in oracle.PACKED:
        readers.append(lambda: pool.get_value_buffer(3))
    for read in readers:
        read()
        assert waited == [1], read  # the layer's index in the pool
        waited.clear()
    nope, keys = values(1, 512, 64)
    pool.set_mla_kv_buffer(layer(3), slots, nope, keys)
    assert waited == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layer_id", [1, 5])
def test_layers_outside_of_the_pool(layout, layer_id):
    """A negative index would read another layer's rows."""
    pool = dsa_pool(layout)
    nope, keys = values(1, 512, 64)
    slots = torch.tensor([1])
    for call in (
        lambda: pool.get_key_buffer(layer_id),
        lambda: pool.get_row_buffer(layer_id),
        lambda: pool.get_mla_kv_buffer(layer(layer_id), slots, torch.bfloat16),
        lambda: pool.set_mla_kv_buffer(layer(layer_id), slots, nope, keys),
        lambda: pool.set_kv_buffer(layer(layer_id), slots, torch.cat([nope, keys], -1), None),
    ):
        with pytest.raises(IndexError, match=f"layer {layer_id} is outside of this pool.*2 to 4"):
            call()
    assert not any(part.any() for part in rows(pool))
