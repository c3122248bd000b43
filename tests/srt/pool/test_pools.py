"""Each of our pool classes in each layout: rows are written, read, moved and described.

The real classes on SGLang's real base classes. What one class alone does is in test_dense_pool.py,
test_dsa_pool.py and test_hybrid_pool.py. A1, A5, B2 and B3 are items of the vLLM checklist of
tests/connectors.
"""

from functools import partial

import codec_oracle as oracle
import numpy as np
import pools
import pytest
import torch
from pool_kinds import KINDS, LAYOUTS, METHODS, PACKED, SHARED, Pool
from pools import assert_holds, at, copied, fill, layer, rows

pytestmark = pytest.mark.usefixtures("published")

#: Two layouts per kind, and so every layout per class and arrangement.
CASES = [(kind, LAYOUTS[(n + more) % len(LAYOUTS)]) for n, kind in enumerate(KINDS) for more in (0, 2)]
every_pool = pytest.mark.parametrize(("kind", "layout"), CASES)


@pytest.fixture(autouse=True)
def no_gpu_to_wait_for(monkeypatch):
    """SGLang's copies to the CPU call `torch.cuda.synchronize`, the only part that needs a GPU."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@every_pool
def test_sizes_and_descriptions(kind, layout):
    case = Pool(kind, layout)
    pool, row, page = case.pool, case.row_bytes, case.page_size
    slots = pool.size + page
    total, one_buffer = 3 * slots * row, "major" in kind
    assert [part.shape for part in rows(pool)] == [(slots // page, page, row)] * 3
    assert [len(part) for part in pools.memory(pool)] == ([total] if one_buffer else [total // 3] * 3)
    index = sum(part.nbytes for part in pools.index_pages(pool))
    assert pool.get_kv_size_bytes() == total + index
    assert pool.mem_usage == pytest.approx((total + index) / 2**30)
    assert pool.get_kv_buffer_shape() == ((slots, 1, case.rank + case.rope), (slots, 1, case.rank))
    assert pool.get_v_head_dim() == case.rank
    pointers, lengths, items = pool.get_contiguous_buf_infos()
    buffers, per_buffer = (1, 3) if one_buffer else (3, 1)
    assert lengths == [total // buffers] * buffers
    assert items == [per_buffer * page * row] * buffers
    # A transfer engine reads page 1 as the second item of each buffer.
    for place, part in enumerate(rows(pool)):
        begin = part[1].__array_interface__["data"][0] - pointers[place // per_buffer]
        last = begin + sum((n - 1) * step for n, step in zip(part[1].shape, part[1].strides, strict=True))
        assert items[0] <= begin <= last < 2 * items[0]
    inner = getattr(pool, "full_kv_pool", pool)
    assert pool.dtype == (pools.DSA_DTYPES if case.is_sparse else pools.DTYPES)[layout]
    assert inner.store_dtype == (torch.bfloat16 if layout == "bf16" else torch.uint8)
    assert pool.kv_cache_dim * inner.store_dtype.itemsize == row  # HiCache compares target and draft by these
    assert pool.row_format.row_bytes == row
    assert (pool.kv_lora_rank, pool.qk_rope_head_dim) == (case.rank, case.rope)
    numbers = torch.tensor([5, -1])
    slots_are_rows = pool.slot_to_row(numbers) is numbers
    assert slots_are_rows == ("page_major" not in kind or page == 1)
    if slots_are_rows and not case.is_hybrid:
        (info,) = pool.get_device_pool_infos()
        info.buffer_info.validate(layer_ids=info.layer_ids)
        assert info.layer_ids == tuple(case.layers)
        assert info.buffer_info.kv_cache_dim * info.buffer_info.dtype.itemsize == row
        assert info.buffer_info.data_ptrs.tolist() == [tensor.data_ptr() for tensor in pool.kv_buffer]
        assert info.buffer_info.scales is None


@pytest.mark.parametrize("method", METHODS)
@every_pool
def test_b3_writes_reach_their_rows_and_nothing_else(kind, layout, method):
    """A5, B3: by slots of both integer types, by SGLang's location, and by row numbers as in our backends."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    from sgl_kvpool.srt.pool.row_pool import RowWriteLoc

    case = Pool(kind, layout)
    wanted, slots = copied(case.pool), torch.tensor(case.slots)
    locations = [slots, KVWriteLoc(slots), RowWriteLoc(case.pool.slot_to_row(slots))]
    for place, (layer_id, loc) in enumerate(zip(case.layers, locations, strict=True)):
        nope, rope = case.values(seed=place)
        attention = layer(layer_id)
        case.write(method, attention, loc, nope, rope)
        assert attention.layer_id == layer_id
        wanted["rows", layer_id][at(case.pool, case.slots)] = case.encoded(place, nope, rope)
        assert_holds(case.pool, wanted)
    # SGLang's graphs pass int32 locations; a part of a list is not contiguous.
    part, (nope, rope) = torch.tensor([-7, 11, 9, 12], dtype=torch.int32)[1::2], case.values(2, seed=9)
    case.write(method, layer(case.layers[1]), part, nope, rope)
    wanted["rows", case.layers[1]][at(case.pool, [11, 12])] = case.encoded(1, nope, rope)
    assert_holds(case.pool, wanted)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["dense", "page_major-2", "dsa"])
def test_the_layer_that_is_named_takes_the_rows(kind, layout, method):
    case = Pool(kind, layout)
    wanted, (nope, rope) = copied(case.pool), case.values()
    for attention in (None, layer(case.layers[0])):
        case.write(method, attention, torch.tensor(case.slots), nope, rope, layer_id_override=case.layers[2])
        wanted["rows", case.layers[2]][at(case.pool, case.slots)] = case.encoded(2, nope, rope)
        assert_holds(case.pool, wanted)


@every_pool
def test_no_tokens_and_no_rope(kind, layout):
    case = Pool(kind, layout)
    nope, rope = case.values()
    attention, wanted = layer(case.layers[0]), copied(case.pool)
    case.pool.set_mla_kv_buffer(attention, torch.tensor([], dtype=torch.int64), nope[:0], rope[:0])
    if case.rope:
        with pytest.raises(ValueError, match="cache_k_rope is None, but rows of this pool hold 64"):
            case.pool.set_mla_kv_buffer(attention, torch.tensor(case.slots), nope, None)
    else:
        case.pool.set_mla_kv_buffer(attention, torch.tensor(case.slots), nope, rope)  # of no values
        wanted["rows", case.layers[0]][at(case.pool, case.slots)] = case.encoded(0, nope, rope)
    assert attention.layer_id == case.layers[0]
    assert_holds(case.pool, wanted)


@every_pool
def test_reads_decode_what_is_stored(kind, layout):
    case = Pool(kind, layout)
    stored = case.stored()
    dtypes = {None: torch.int64, torch.bfloat16: torch.int32, torch.float32: torch.int64}
    for place, layer_id in enumerate(case.layers):
        picked = stored[layer_id][[3, 0, 2]]
        decoded = oracle.decode(picked, layout, case.rank, case.rope, case.scales[place])
        for dtype, integer in dtypes.items():
            slots = torch.tensor(case.slots)[[3, 0, 2]].to(integer)
            nope, rope = case.pool.get_mla_kv_buffer(layer(layer_id), slots, dtype)
            assert nope.shape == (3, 1, case.rank)
            assert nope.is_contiguous()
            if layout == "fp8" and dtype is None:  # the stored values, in the dtype SGLang sees
                assert nope.dtype == torch.float8_e4m3fn
                assert np.array_equal(nope.view(torch.uint8).numpy()[:, 0], picked[:, : case.rank])
                continue
            wanted = oracle.cast(decoded, dtype or torch.bfloat16)
            oracle.assert_same_values(nope.squeeze(1), wanted[:, : case.rank])
            if not case.rope:
                assert rope is None
                continue
            assert rope.shape == (3, 1, case.rope)
            assert rope.is_contiguous()
            oracle.assert_same_values(rope.squeeze(1), wanted[:, case.rank :])


@every_pool
def test_b2_row_buffers_are_views_of_their_layers(kind, layout):
    case = Pool(kind, layout)
    was, slots = fill(case.pool), torch.tensor(case.slots)
    inner = getattr(case.pool, "full_kv_pool", case.pool)
    for place, layer_id in enumerate(case.layers):
        buffer = case.pool.get_row_buffer(layer_id)
        assert (buffer.dtype, buffer.shape[1:]) == (torch.uint8, (1, case.row_bytes))
        found = buffer[case.pool.slot_to_row(slots)].squeeze(1).numpy()
        assert np.array_equal(found, was["rows", layer_id][at(case.pool, case.slots)])
        views = [buffer]
        if case.has_keys:
            views.append(case.pool.get_key_buffer(layer_id))
        if case.has_keys and layout not in PACKED:
            views += [case.pool.get_value_buffer(layer_id), *case.pool.get_kv_buffer(layer_id)]
            for view in views[1:]:  # slots are rows, at any stride
                some = view[slots].view(torch.uint8).squeeze(1).numpy()
                assert np.array_equal(some, found[:, : some.shape[1]])
        assert {view.data_ptr() for view in views} == {inner.kv_buffer[place].data_ptr()}
        assert case.pool.k_scale(layer_id) == case.scales[place]
    if inner.cross_layer is not None:
        homes = {view.untyped_storage().data_ptr() for view in inner.kv_buffer}
        assert homes == {inner.cross_layer.untyped_storage().data_ptr()}
        assert inner.cross_layer.untyped_storage().nbytes() == inner.get_kv_size_bytes()


@every_pool
def test_every_reader_waits_for_loads_of_its_layer(kind, layout):
    case = Pool(kind, layout)
    waited = pools.waits(case.pool)
    if case.is_hybrid:
        assert case.pool.full_kv_pool.layer_transfer_counter is None
    for place, layer_id in enumerate(case.layers):
        readers = case.readers(layer_id)
        if case.is_sparse and not SHARED[place]:
            readers.append(partial(case.pool.get_index_k_with_scale_buffer, layer_id))
        for read in readers:
            read()
            assert waited == [case.waits_for(layer_id)], read
            waited.clear()
        for write in case.writers(layer_id):
            write()
        assert waited == []


@every_pool
def test_layers_without_rows_are_refused(kind, layout):
    """A negative index would read another layer's rows."""
    case = Pool(kind, layout)
    wanted, first, last = copied(case.pool), case.layers[0], case.layers[-1]
    for layer_id in [*pools.LINEAR_LAYERS, 6, -1] if case.is_hybrid else [first - 1, first - 3, last + 1]:
        calls = [*case.readers(layer_id), *case.writers(layer_id)]
        error, text = IndexError, f"layer {layer_id} is outside of this pool.*{first} to {last}"
        if case.is_hybrid:
            error, text = ValueError, f"layer_id={layer_id} not in full attention layers"
            calls.append(partial(case.pool.k_scale, layer_id))
        for call in calls:
            with pytest.raises(error, match=text):
                call()
    assert_holds(case.pool, wanted)


@every_pool
def test_moves_take_rows_and_index_keys(kind, layout):
    """Token by token; one slot is source and target: all are read before any is written."""
    case = Pool(kind, layout)
    pool, wanted = case.pool, fill(case.pool)
    last, middle, other, _ = case.slots
    target, source = [middle, last, 9], [other, middle, 12]
    for (what, _), part in wanted.items():
        if what == "rows":
            part[at(pool, target)] = part[at(pool, source)]
        elif what == "index" and len(part):
            keys, scales = part[:, :8192].reshape(-1, 128), part[:, 8192:].reshape(-1, 4)
            keys[target], scales[target] = keys[source], scales[source]
            part[:, :8192], part[:, 8192:] = keys.reshape(len(part), 8192), scales.reshape(len(part), 256)
    pool.move_kv_cache(torch.tensor([middle, 0, last, 0, 9])[::2], torch.tensor(source, dtype=torch.int32))
    assert_holds(pool, wanted)
    pool.move_kv_cache(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    assert_holds(pool, wanted)
