"""LayoutHybridLinearKVPool around a LayoutDSATokenToKVPool: rows and index keys by model layer.

Pooled index keys are in test_hybrid_pooled_keys.py, all other names of SGLang's class in
test_hybrid_methods.py.
"""

import codec_oracle as oracle
import numpy as np
import pytest
import torch
from dsa_pools import GUARD, INDEX_PAGE_BYTES, PAGE, PAGES, SLOTS, index_pages, layer, values
from hybrid_pools import (
    LAYOUTS,
    LINEAR_LAYERS,
    MLA_LAYERS,
    POOLED,
    ROW_BYTES,
    as_bytes,
    hybrid_pool,
    place,
    rows,
    state_tensors,
    stock_pool,
    waits,
)

pytestmark = pytest.mark.usefixtures("published")

every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_layer = pytest.mark.parametrize("layer_id", MLA_LAYERS)
#: By MLA layer: model layer 3 reuses layer 1's top-k, and has no index keys.
SHARED = [False, True, False]
PROPERTIES = [
    "dsa_kv_cache_store_fp8", "kv_cache_dim", "index_head_dim", "quant_block_size", "index_kpool",
    "index_page_size", "tail_extra_slots", "index_kpool_compress",
]  # fmt: skip


def everything(pool):
    """Views of all bytes: rows and index pages by model layer, states by name."""
    index = index_pages(pool.full_kv_pool)
    return {
        **{("rows", layer_id): rows(pool, layer_id) for layer_id in MLA_LAYERS},
        **{("index", layer_id): index[place] for place, layer_id in enumerate(MLA_LAYERS)},
        **{("state", name): as_bytes(tensor) for name, tensor in state_tensors(pool).items()},
    }


def guard(pool):
    for tensor in [*pool.full_kv_pool.kv_buffer, *pool.full_kv_pool.index_k_with_scale_buffer]:
        tensor.view(torch.uint8).fill_(GUARD)
    for tensor in state_tensors(pool).values():
        tensor.view(torch.uint8).fill_(GUARD)


def fill(pool, seed=0):
    """Different bytes in every row and every index page; returns copies of all."""
    generator = np.random.default_rng(seed)
    for (kind, _), part in everything(pool).items():
        if kind != "state":
            part[...] = generator.integers(0, 256, part.shape, dtype=np.uint8)
    return {name: part.copy() for name, part in everything(pool).items()}


def only(pool, *names):
    """Whether all bytes except those of `names` still are guard bytes."""
    return all((part == GUARD).all() for name, part in everything(pool).items() if name not in names)


def expected_rows(layout, nope, rope, k_scale=1.0):
    parts = nope.reshape(len(nope), -1), rope.reshape(len(nope), -1)
    return oracle.encode(*parts, layout, 512, 64, ROW_BYTES[layout][0], k_scale)


# -------------------------------------------------------------------- rows


@every_layer
@pytest.mark.parametrize("method", ["set_kv_buffer", "set_mla_kv_buffer"])
@every_layout
def test_rows_are_written_and_read_by_model_layer(layout, method, layer_id):
    k_scales = {1: 0.5, 3: 0.25, 4: 2.0} if layout == "fp8" else {}
    pool = hybrid_pool(layout, sparse=True, k_scales=k_scales)
    guard(pool)
    loc, (nope, rope) = torch.tensor([3, SLOTS - 1, 64, 1]), values(4, 512, 64, seed=layer_id)
    if method == "set_kv_buffer":
        pool.set_kv_buffer(layer(layer_id), loc, torch.cat([nope, rope], -1), nope)
    else:
        pool.set_mla_kv_buffer(layer(layer_id), loc, nope, rope)
    found, k_scale = rows(pool, layer_id), k_scales.get(layer_id, 1.0)
    oracle.assert_same_bytes(found[loc.numpy()], expected_rows(layout, nope, rope, k_scale))
    assert (np.delete(found, loc.numpy(), axis=0) == GUARD).all()
    assert only(pool, ("rows", layer_id))

    waited = waits(pool)
    stored = pool.get_row_buffer(layer_id)
    assert np.array_equal(stored[:, 0].numpy(), found)
    shown = pool.get_key_buffer(layer_id)
    assert shown.data_ptr() == stored.data_ptr() == pool.full_kv_pool.kv_buffer[place(layer_id)].data_ptr()
    got = pool.get_mla_kv_buffer(layer(layer_id), loc, torch.float32)
    wanted = oracle.decode(found[loc.numpy()], layout, 512, 64, k_scale)
    oracle.assert_same_values(torch.cat(got, -1).squeeze(1), torch.from_numpy(wanted))
    assert waited == [layer_id] * 3


@every_layout
def test_moves_take_rows_and_index_keys_of_every_layer(layout):
    """Token by token; slot 3 is source and target."""
    pool = hybrid_pool(layout, sparse=True, skip_topk_layers=SHARED)
    wanted, target, source = fill(pool), [3, 100, 64], [70, 3, 191]
    pool.move_kv_cache(torch.tensor(target), torch.tensor(source))
    for (kind, _), part in wanted.items():
        if kind == "rows":
            part[target] = part[source]
        elif len(part) and kind == "index":
            keys = part[:, :8192].reshape(-1, 128)
            scales = part[:, 8192:].reshape(-1, 4)
            keys[target], scales[target] = keys[source], scales[source]
            part[:, :8192], part[:, 8192:] = keys.reshape(len(part), 8192), scales.reshape(len(part), 256)
    for name, part in everything(pool).items():
        assert np.array_equal(part, wanted[name]), name
    assert not len(everything(pool)["index", 3])


@every_layout
def test_cpu_copies_carry_rows_index_keys_and_states(layout, monkeypatch):
    """A request is retracted, and restored to other pages."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    pool = hybrid_pool(layout, sparse=True, skip_topk_layers=SHARED)
    pool.full_kv_pool.cpu_offloading_chunk_size = 48  # more than one chunk
    was = fill(pool)
    for number, tensor in enumerate(state_tensors(pool).values()):
        tensor[:, 2] = number + 1
    saved = pool.get_cpu_copy(torch.arange(64, 192), mamba_indices=torch.tensor([2]))
    guard(pool)
    back = np.concatenate([np.arange(128, 192), np.arange(0, 64)])  # pages 2 and 0
    pool.load_cpu_copy(saved, torch.from_numpy(back), mamba_indices=torch.tensor([5]))
    for (kind, name), found in everything(pool).items():
        expected = np.full_like(found, GUARD)
        if kind == "rows":
            expected[back] = was[kind, name][64:]
        elif kind == "index" and len(found):
            expected[[2, 0]] = was[kind, name][[1, 2]]
        if kind != "state":
            assert np.array_equal(found, expected), (kind, name)
    for number, tensor in enumerate(state_tensors(pool).values()):
        assert (tensor[:, 5] == number + 1).all()
        others = torch.cat([tensor[:, :5], tensor[:, 6:]], dim=1)
        assert (as_bytes(others) == GUARD).all()


# -------------------------------------------------------------------- index keys


def index_values(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(tokens, 128, generator=generator).to(torch.float8_e4m3fn)
    return keys, torch.rand(tokens, 1, generator=generator)


@every_layer
@every_layout
def test_index_keys_reach_the_pages_of_their_model_layer(layout, layer_id):
    pool = hybrid_pool(layout, sparse=True)
    guard(pool)
    waited = waits(pool)
    loc, (keys, scales) = torch.tensor([1, 64, 190]), index_values(3, seed=layer_id)
    pool.set_index_k_scale_buffer(layer_id, loc, keys, scales)
    assert waited == []  # as in SGLang's pool: only readers wait
    wanted = np.full((PAGES, INDEX_PAGE_BYTES), GUARD, dtype=np.uint8)
    for number, slot in enumerate(loc.tolist()):
        page, token = divmod(slot, PAGE)
        wanted[page, token * 128 : token * 128 + 128] = keys[number].view(torch.uint8).numpy()
        wanted[page, 8192 + token * 4 : 8192 + token * 4 + 4] = scales[number].numpy().view(np.uint8)
    assert np.array_equal(everything(pool)["index", layer_id], wanted)
    assert only(pool, ("index", layer_id))


@pytest.mark.parametrize("start_layer", [0, 1])
@every_layer
@every_layout
def test_index_keys_are_read_from_their_model_layer(layout, layer_id, start_layer):
    pool = hybrid_pool(layout, sparse=True, start_layer=start_layer)
    pages = fill(pool)["index", layer_id]
    waited = waits(pool)
    assert pool.full_kv_pool.layer_transfer_counter is None
    for getter in ("get_index_k_with_scale_buffer", "get_broadcastable_index_k_with_scale_buffer"):
        buffer = getattr(pool, getter)(layer_id)
        assert buffer.data_ptr() == pool.full_kv_pool.index_k_with_scale_buffer[place(layer_id)].data_ptr()
        assert np.array_equal(buffer.numpy(), pages)
    # A request of 70 tokens on pages 2 and 1, gathered by SGLang's kernel.
    length, table = torch.tensor([70], dtype=torch.int32), torch.tensor([[2, 1]], dtype=torch.int32)
    keys, scales = pool.get_index_k_scale_buffer(layer_id, length, table, 70, 70)
    request = pages[[2, 1]]
    assert np.array_equal(keys.view(torch.uint8).numpy(), request[:, :8192].reshape(-1, 128)[:70])
    assert np.array_equal(scales.view(torch.uint8).numpy(), request[:, 8192:].reshape(-1, 4)[:70])
    assert waited == [layer_id - start_layer] * 3


@every_layout
def test_what_only_sharded_pools_have(layout, monkeypatch):
    """SGLang's wrapper calls two methods that only some inner pools have; they receive the inner layer id."""
    pool = hybrid_pool(layout, sparse=True)
    guard(pool)
    for layer_id in (*MLA_LAYERS, *LINEAR_LAYERS):
        assert pool.invalidate_index_buffer_for_layer(layer_id) is None
    assert only(pool)
    asked, kind = [], type(pool.full_kv_pool)
    for name in ("invalidate_index_buffer_for_layer", "_get_broadcastable_index_buffer"):
        monkeypatch.setattr(kind, name, lambda self, at, name=name: asked.append((name, at)), raising=False)
    for layer_id in MLA_LAYERS:
        pool.invalidate_index_buffer_for_layer(layer_id)
        pool.get_broadcastable_index_k_with_scale_buffer(layer_id)
        assert [at for _, at in asked] == [place(layer_id)] * 2
        assert len(dict(asked)) == 2
        asked.clear()
    with pytest.raises(ValueError, match="layer_id=2 not in full attention layers"):
        pool.invalidate_index_buffer_for_layer(2)


@pytest.mark.parametrize("layer_id", [*LINEAR_LAYERS, 6, -1])
@every_layout
def test_layers_without_index_keys_are_refused(layout, layer_id):
    pool = hybrid_pool(layout, sparse=True)
    guard(pool)
    keys, scales = index_values(1, seed=0)
    slots = torch.tensor([1])
    calls = (
        lambda: pool.set_index_k_scale_buffer(layer_id, slots, keys, scales),
        lambda: pool.get_index_k_with_scale_buffer(layer_id),
        lambda: pool.get_broadcastable_index_k_with_scale_buffer(layer_id),
        lambda: pool.get_index_k_scale_buffer(layer_id, slots, slots[None], 1, 1),
        lambda: pool.get_compress_tail_buffers(layer_id),
        lambda: pool.set_compress_tail_for_request(layer_id, slots, keys, keys, 1, 0),
        lambda: pool.kpool_decode_update_index_cache(layer_id, *[None] * 8),
        lambda: pool.get_row_buffer(layer_id),
        lambda: pool.set_mla_kv_buffer(layer(layer_id), slots, *values(1, 512, 64)),
    )
    for call in calls:
        with pytest.raises(ValueError, match=f"layer_id={layer_id} not in full attention layers"):
            call()
    assert only(pool)


# -------------------------------------------------------------------- attributes


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
        stock = stock_pool(layout, **asked)
        assert said == {name: getattr(stock, name) for name in PROPERTIES}
        assert pool.get_kv_size_bytes() == stock.get_kv_size_bytes()
        assert pool.mem_usage == stock.mem_usage


@every_layout
def test_host_pools_are_of_rows_and_index_keys(layout):
    pool = hybrid_pool(layout, sparse=True, skip_topk_layers=SHARED)
    kv, indexer = pool.host_pool_decls()
    assert (kv.pool_name.value, kv.is_primary, kv.device_pool) == ("kv", True, pool.full_kv_pool)
    assert (indexer.pool_name.value, indexer.is_primary) == ("indexer", False)
    assert indexer.device_pool is pool.full_kv_pool
    assert indexer.owned_device_layers == (0, 2)
    (alone,) = hybrid_pool(layout, sparse=True, skip_topk_layers=[True] * 3).host_pool_decls()
    assert alone.pool_name.value == "kv"
