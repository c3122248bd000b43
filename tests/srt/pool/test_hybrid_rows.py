"""Rows of LayoutHybridLinearKVPool by model layer: written, read and moved, also with states."""

from types import SimpleNamespace

import codec_oracle as oracle
import numpy as np
import pytest
import torch
from dsa_pools import layer, values
from hybrid_pools import (
    LAYOUTS,
    LINEAR_LAYERS,
    MLA_LAYERS,
    ROW_BYTES,
    as_bytes,
    hybrid_pool,
    rows,
    state_tensors,
)
from hybrid_rows import (
    GUARD,
    PACKED,
    everywhere,
    expected_rows,
    fill,
    guard,
    locations,
    paged,
    pages,
    states_are_guarded,
    written_by,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("published")]


# -------------------------------------------------------------------- writing


@pytest.mark.parametrize("kind", ["tensor", "slots", "rows"])
@pytest.mark.parametrize("method", ["set_kv_buffer", "set_mla_kv_buffer"])
@pages
@everywhere
@pytest.mark.parametrize("layout", LAYOUTS)
def test_writes_reach_the_rows_of_their_layer_and_no_others(layout, arrangement, page_size, method, kind):
    """The model's layer id selects the rows, not its index; row numbers are not taken for slots."""
    pool, slots = paged(layout, arrangement, page_size)
    guard(pool)
    nope, rope = values(4, 512, 64)
    written_by(method, pool, 3, locations(kind, pool, slots), nope, rope)

    found = np.array(rows(pool, 3))
    assert np.array_equal(found[slots.numpy()], expected_rows(layout, nope, rope))
    assert len(found) == pool.size + page_size
    assert (np.delete(found, slots.numpy(), axis=0) == GUARD).all()
    for other in (1, 4):
        assert (np.array(rows(pool, other)) == GUARD).all()
    assert states_are_guarded(pool)


@pytest.mark.parametrize("method", ["set_kv_buffer", "set_mla_kv_buffer"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_rope(layout, method):
    pool = hybrid_pool(layout, rope=0)
    nope, rope = values(3, 512, 0, seed=4)
    written_by(method, pool, 4, torch.tensor([2, 9, 5]), nope, rope)
    assert np.array_equal(rows(pool, 4)[[2, 9, 5]], expected_rows(layout, nope, rope, 0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layer_object_keeps_its_number(layout):
    """SGLang's own class changes it during a call; an error must not leave it changed."""
    pool = hybrid_pool(layout)
    nope, rope = values(2, 512, 64)
    attention = layer(4)
    pool.set_mla_kv_buffer(attention, torch.tensor([1, 2]), nope, rope)
    assert attention.layer_id == 4
    with pytest.raises(ValueError, match="cache_k_rope is None"):
        pool.set_mla_kv_buffer(attention, torch.tensor([1, 2]), nope, None)
    assert attention.layer_id == 4
    pool.get_mla_kv_buffer(attention, torch.tensor([1, 2]), torch.bfloat16)
    assert attention.layer_id == 4


# -------------------------------------------------------------------- reading


@everywhere
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reads_decode_what_was_stored(layout, arrangement):
    pool = hybrid_pool(layout, arrangement)
    nope, rope = values(5, 512, 64, seed=2)
    slots = torch.tensor([15, 4, 7, 1, 10])
    for other in (1, 4):
        pool.set_mla_kv_buffer(layer(other), slots, *values(5, 512, 64, seed=other))
    pool.set_mla_kv_buffer(layer(3), slots, nope, rope)
    wanted = oracle.decode(expected_rows(layout, nope, rope), layout, 512, 64)
    order = torch.tensor([3, 0, 4])
    found = pool.get_mla_kv_buffer(layer(3), slots[order], torch.float32)
    oracle.assert_same_values(torch.cat(found, -1).squeeze(1), torch.from_numpy(wanted[order.numpy()]))


@everywhere
@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_buffers_are_views_of_their_layers(layout, arrangement):
    pool = hybrid_pool(layout, arrangement)
    before = fill(pool)
    slots = torch.tensor([5, 14, 0, 9])
    for layer_id in MLA_LAYERS:
        buffer = pool.get_row_buffer(layer_id)
        assert (buffer.dtype, buffer.shape[1:]) == (torch.uint8, (1, ROW_BYTES[layout][0]))
        assert np.array_equal(
            buffer[pool.slot_to_row(slots)].squeeze(1).numpy(), before[layer_id][slots.numpy()]
        )
        place = MLA_LAYERS.index(layer_id)
        assert buffer.data_ptr() == pool.full_kv_pool.kv_buffer[place].data_ptr()


@pytest.mark.parametrize("start_layer", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reads_wait_for_a_load_of_their_layer_and_once(layout, start_layer):
    """The counter counts all layers of the stage, with linear layers; the inner pool has no counter."""
    pool = hybrid_pool(layout, start_layer=start_layer)
    waited = []
    pool.register_layer_transfer_counter(SimpleNamespace(wait_until=waited.append))
    assert pool.full_kv_pool.layer_transfer_counter is None
    for layer_id in MLA_LAYERS:
        pool.get_row_buffer(layer_id)
        pool.get_mla_kv_buffer(layer(layer_id), torch.tensor([1]), torch.bfloat16)
        if layout not in PACKED:
            pool.get_key_buffer(layer_id)
    each = 2 if layout in PACKED else 3
    assert waited == [layer_id - start_layer for layer_id in MLA_LAYERS for _ in range(each)]


def test_a_scale_is_that_of_the_models_layer():
    pool = hybrid_pool("fp8", k_scales={3: 0.5, 4: 0.125})
    assert [pool.k_scale(layer_id) for layer_id in MLA_LAYERS] == [1.0, 0.5, 0.125]
    assert [pool.full_kv_pool.k_scale(place) for place in range(3)] == [1.0, 0.5, 0.125]
    nope, rope = values(2, 512, 64)
    for layer_id, k_scale in zip(MLA_LAYERS, (1.0, 0.5, 0.125), strict=True):
        written_by("set_mla_kv_buffer", pool, layer_id, torch.tensor([2, 7]), nope, rope)
        assert np.array_equal(rows(pool, layer_id)[[2, 7]], expected_rows("fp8", nope, rope, k_scale=k_scale))
        found = pool.get_mla_kv_buffer(layer(layer_id), torch.tensor([2, 7]), torch.float32)
        wanted = oracle.decode(rows(pool, layer_id)[[2, 7]], "fp8", 512, 64, k_scale)
        oracle.assert_same_values(torch.cat(found, -1).squeeze(1), torch.from_numpy(wanted))
    assert hybrid_pool("fp4", k_scales={3: 0.5}).k_scale(3) == 1.0


@pytest.mark.parametrize("layer_id", [*LINEAR_LAYERS, 6, -1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_without_rows_are_refused(layout, layer_id):
    pool = hybrid_pool(layout)
    guard(pool)
    nope, rope = values(1, 512, 64)
    calls = (
        lambda: pool.get_row_buffer(layer_id),
        lambda: pool.get_key_buffer(layer_id),
        lambda: pool.k_scale(layer_id),
        lambda: pool.get_mla_kv_buffer(layer(layer_id), torch.tensor([1])),
        lambda: written_by("set_mla_kv_buffer", pool, layer_id, torch.tensor([1]), nope, rope),
        lambda: written_by(
            "set_kv_buffer", pool, layer_id, locations("rows", pool, torch.tensor([1])), nope, rope
        ),
    )
    for call in calls:
        with pytest.raises(ValueError, match=f"layer_id={layer_id} not in full attention layers"):
            call()
    assert all((np.array(rows(pool, other)) == GUARD).all() for other in MLA_LAYERS)


# -------------------------------------------------------------------- moving


@pages
@everywhere
@pytest.mark.parametrize("layout", LAYOUTS)
def test_moves_are_of_whole_rows_in_every_mla_layer(layout, arrangement, page_size):
    """One slot is source and target."""
    pool, (last, middle, other, _) = paged(layout, arrangement, page_size)
    guard(pool)
    before = fill(pool)
    target, source = torch.stack([middle, last]), torch.stack([other, middle])
    pool.move_kv_cache(target, source)
    for layer_id, wanted in before.items():
        wanted[target.numpy()] = wanted[source.numpy()]
        assert np.array_equal(np.array(rows(pool, layer_id)), wanted)
    assert states_are_guarded(pool)


@pages
@everywhere
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cpu_copies_carry_rows_and_states(layout, arrangement, page_size, monkeypatch):
    """As when SGLang retracts a request: its rows and states return in other slots, all else is unchanged."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    pool, slots = paged(layout, arrangement, page_size)
    before = fill(pool)
    generator = torch.Generator().manual_seed(3)
    for tensor in state_tensors(pool).values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    kept = {name: tensor.clone() for name, tensor in state_tensors(pool).items()}
    last, state = slots[0], torch.tensor([2, 5])
    slots = torch.cat([slots, torch.tensor([9])])  # three chunks
    pool.full_kv_pool.cpu_offloading_chunk_size = 2
    saved = pool.get_cpu_copy(slots, mamba_indices=state)
    for layer_id in MLA_LAYERS:
        rows(pool, layer_id)[slots.numpy()] = GUARD
    for tensor in state_tensors(pool).values():
        tensor[:, state] = 7
    others, other_state = torch.tensor([10, last - 1, 12, last - 2, 5]), torch.tensor([1, 3])
    pool.load_cpu_copy(saved, others, mamba_indices=other_state)
    for layer_id, wanted in before.items():
        wanted[others.numpy()] = wanted[slots.numpy()]
        wanted[slots.numpy()] = GUARD
        assert np.array_equal(np.array(rows(pool, layer_id)), wanted)
    for name, tensor in state_tensors(pool).items():
        wanted = kept[name]
        wanted[:, other_state] = wanted[:, state]
        wanted[:, state] = 7
        assert torch.equal(tensor, wanted)


@everywhere
@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_and_rows_do_not_share_a_byte(layout, arrangement):
    pool = hybrid_pool(layout, arrangement)
    for name, tensor in state_tensors(pool).items():
        guard(pool)
        tensor.view(torch.uint8).fill_(0x42)
        assert all((np.array(rows(pool, layer_id)) == GUARD).all() for layer_id in MLA_LAYERS)
        others = {other: t for other, t in state_tensors(pool).items() if other != name}
        assert all((as_bytes(other) == GUARD).all() for other in others.values())
    guard(pool)
    for tensor in pool.full_kv_pool.kv_buffer:
        tensor.view(torch.uint8).fill_(0x99)
    assert states_are_guarded(pool)


def test_states_are_described_by_their_own_pool():
    """For a transfer to a decode server, for example."""
    pool = hybrid_pool("fp4")
    assert pool.get_state_buf_infos() == pool.mamba_pool.get_contiguous_buf_infos()
    assert pool.get_state_layer_ids() == pool.mamba_pool.get_state_layer_ids()
    assert pool.get_state_dim_per_tensor() == pool.mamba_pool.get_state_dim_per_tensor()
    assert pool.get_state_slice_outer_counts() == pool.mamba_pool.get_state_slice_outer_counts()
    assert pool.get_state_conv_shard_groups() == pool.mamba_pool.get_state_conv_shard_groups()
    assert len(pool.get_state_slice_outer_counts()) == len(pool.get_state_conv_shard_groups()) != 0
    addresses = set(pool.get_state_buf_infos()[0])
    assert not addresses & set(pool.get_contiguous_buf_infos()[0])
