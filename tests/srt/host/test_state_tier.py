"""HierarchicalStatePoolHost: round trips of states, the view of stores, sizes, GPU engines."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import crossed
from host_tier import LABELS
from pools import GUARD, STATES, fill, guard, state_pool, state_tensors

from sgl_kvpool.srt.host.states import HierarchicalStatePoolHost
from sgl_kvpool.transfer import gpu_engine
from sgl_kvpool.transfer.engines import GPU_ENGINES
from sgl_kvpool.transfer.slots import DevicePages, Transfer

pytestmark = pytest.mark.usefixtures("no_reserve")


def stride_of(content_bytes):
    """Bytes from a slot to the next, a multiple of 16: states, padding, 16 bytes of checksum."""
    return -(-(content_bytes + 16) // 16) * 16


def state_tier(pool, label="page_first", ratio=2.0, size=0, **extra):
    """Host tier with guard bytes everywhere."""
    tier = HierarchicalStatePoolHost(pool, ratio, size, label, **extra)
    host_bytes(tier)[...] = GUARD
    return tier


def host_bytes(tier):
    """`[slots, slot bytes]` of the tier's memory, padding included."""
    (buffer,) = tier.get_hybrid_pool_buffer()
    return buffer.numpy()


def state_bytes(pool, slot):
    """Bytes of a slot in the order of SGLang's stores: ssm of all layers, then each convolution."""
    return np.concatenate([part[:, slot].ravel() for part in state_tensors(pool)])


def move(tier, name, host, device, layers=3):
    lists = torch.tensor(host), torch.tensor(device)
    if name == "backup":
        tier.backup_from_device_all_layer(None, *lists, "kernel")
        return
    for layer in range(layers):
        tier.load_to_device_per_layer(None, *lists, layer, "kernel")


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("kind", STATES)
def test_states_there_and_back(kind, label):
    """Bit for bit and slot by slot; other slots, padding and the source stay unchanged."""
    pool = state_pool(kind)
    fill(pool)
    was = [part.copy() for part in state_tensors(pool)]
    tier = state_tier(pool, label)
    size = sum(part[:, 0].size for part in was)
    assert tier.page_bytes == size
    assert tier.size_per_token == tier.get_size_per_token() == stride_of(size)
    move(tier, "backup", [7, 0, 4], [2, 6, 3])
    expected = np.full_like(host_bytes(tier), GUARD)
    for there, here in zip([7, 0, 4], [2, 6, 3], strict=True):
        expected[there, :size] = state_bytes(pool, here)
    assert np.array_equal(host_bytes(tier), expected)
    assert all(map(np.array_equal, state_tensors(pool), was))

    guard(pool)
    move(tier, "load", [4, 7, 7], [1, 5, 2])  # host slot 7 goes to a node and to a request
    for part, before in zip(state_tensors(pool), was, strict=True):
        back = np.full_like(part, GUARD)
        back[:, [1, 5, 2]] = before[:, [3, 2, 2]]
        assert np.array_equal(part, back)
    assert np.array_equal(host_bytes(tier), expected)


def test_convolutions_of_cpus_with_amx():
    """SGLang permutes their axes on such CPUs; the bytes of memory are stored under a different tag."""
    plain, pool = state_pool(), state_pool()
    conv = pool.mamba_cache.conv[0]
    conv.as_strided_(conv.size(), (conv.stride(0), conv.stride(1), 1, conv.size(2)))
    assert not conv.is_contiguous()
    raw = conv.untyped_storage()
    memory_of = torch.empty(0, dtype=torch.uint8).set_(raw).numpy().reshape(3, 7, -1)
    memory_of[...] = np.random.default_rng(0).integers(0, 256, memory_of.shape, dtype=np.uint8)
    was = memory_of.copy()
    tier = state_tier(pool)
    assert tier.storage_format_tag != state_tier(plain).storage_format_tag
    move(tier, "backup", [1], [4])
    memory_of[...] = GUARD
    move(tier, "load", [1], [2])
    expected = np.full_like(was, GUARD)
    expected[:, 2] = was[:, 4]
    assert np.array_equal(memory_of, expected)


def test_a_slot_has_one_owner():
    tier = state_tier(state_pool())
    mine = tier.alloc(3)
    assert tier.free(mine) == 3
    assert tier.free(mine[:2]) == 0  # twice
    assert tier.available_size() == tier.size


def test_what_is_not_carried_is_refused():
    """Side states, which no MLA model has."""
    pool = state_pool()
    side = torch.zeros(7, 4)
    beside = SimpleNamespace(iter_transfer_state_entries=lambda: [("side", side, None, None)])
    pool.register_slot_state(beside)
    with pytest.raises(ValueError, match="extra_0 beside the states .*leave out --enable-hierarchical-cache"):
        state_tier(pool)
    with pytest.raises(ValueError, match="a draft's pool has 4 state slots, its target's 7"):
        state_tier(state_pool(), draft_pools=[state_pool(slots=3, layers=[0])])


@pytest.mark.parametrize("kind", STATES)
def test_stores_get_the_order_of_sglang(kind):
    """Copied pages are SGLang's bytes and a checksum; stores without copies get one address per component."""
    pool = state_pool(kind)
    fill(pool)
    tier = state_tier(pool)
    move(tier, "backup", [2, 9], [4, 1])
    page, content = tier.get_data_page(9), state_bytes(pool, 1)
    assert len(page) == -(-stride_of(len(content)) // 4096) * 4096  # O_DIRECT needs multiples of 4096
    assert np.array_equal(page[: len(content)].numpy(), content)
    assert tier.get_dummy_flat_data_page().shape == page.shape
    addresses, sizes = tier.get_page_buffer_meta(torch.tensor([9, 2]))
    components = state_tensors(pool)
    assert len(addresses) == 2 * len(components)
    # Mooncake's keys: one for the temporal states if there are any, then one per convolution.
    assert len(components) == (tier.temporal_state_elem_size > 0) + len(tier.conv_buffer)
    wanted = [part[:, slot].tobytes() for slot in (1, 4) for part in components]
    found = [ctypes.string_at(a, size) for a, size in zip(addresses, sizes, strict=True)]
    last = len(components) - 1  # with padding and checksum
    assert [part[: len(want)] for part, want in zip(found, wanted, strict=True)] == wanted
    trailing = [len(part) - len(want) for part, want in zip(found, wanted, strict=True)]
    assert trailing == [*[0] * last, tier.size_per_token - tier.page_bytes] * 2
    assert tier.get_page_buffer_element_size() == sizes[0]
    (buffer,) = tier.get_hybrid_pool_buffer()
    assert all(buffer.data_ptr() <= a < buffer.data_ptr() + buffer.nbytes for a in addresses)
    addresses, sizes = tier.get_page_buffer_meta(torch.arange(tier.size))
    for alignment in (1, 2, 4, 8, 16, 64, 4096):
        aligned = not any(number % alignment for number in addresses + sizes)
        assert tier.is_stride_page_aligned(alignment) == aligned
    with pytest.raises(IndexError):
        tier.get_page_buffer_meta(torch.tensor([tier.size]))


def test_checksums_of_slots_are_written_and_verified_in_place():
    """For stores without copies: every byte and the key are covered; other slots are not touched."""
    pool = state_pool("odd")
    fill(pool)
    tier = state_tier(pool)
    move(tier, "backup", [2, 9], [4, 1])
    before, slots = host_bytes(tier).copy(), torch.tensor([9, 2])
    with tier.stored_under({9: "a", 2: "b"}):
        tier.write_checksums(slots)
        assert tier.first_damaged(slots) is None
    changed = np.argwhere(host_bytes(tier) != before)
    assert set(changed[:, 0]) == {2, 9}
    assert changed[:, 1].min() >= tier.size_per_token - 16
    with tier.stored_under({9: "a", 2: "a"}):
        assert tier.first_damaged(slots)[0] == 1
    for place in (0, tier.page_bytes - 1, tier.size_per_token - 17, tier.size_per_token - 1):
        host_bytes(tier)[9, place] ^= 1
        with tier.stored_under({9: "a", 2: "b"}):
            assert tier.first_damaged(slots)[0] == 0
        host_bytes(tier)[9, place] ^= 1


def test_tags_tell_states_apart():
    tags = {kind: state_tier(state_pool(kind)).storage_format_tag for kind in STATES}
    tags["layers"] = state_tier(state_pool(layers=[0, 2])).storage_format_tag
    tags["other layers"] = state_tier(state_pool(layers=[0, 2, 4])).storage_format_tag
    tags["draft"] = state_tier(state_pool(), draft_pools=[state_pool(layers=[0])]).storage_format_tag
    assert len(set(tags.values())) == len(tags)
    assert state_tier(state_pool(slots=9)).storage_format_tag == tags["kda"]


def test_sizes_by_ratio_and_by_gigabytes():
    pool = state_pool()
    slot = stride_of(3 * (3 * 96 * 2 + 2 * 16 * 16 * 4))
    assert state_tier(pool, ratio=3.5).size == int(6 * 3.5) + 1
    assert state_tier(pool, size=1e-3).size == int(1e6 // slot) + 1
    with pytest.raises(ValueError, match=r"needs .* GB for \d+ states .*--hicache-size"):
        state_tier(pool, size=1e6)


@pytest.mark.parametrize(
    ("engine", "kind", "slot_bytes"),
    [(engine, *of) for engine in GPU_ENGINES for of in crossed([*STATES], [1 << 20, 4096])],
)
def test_engines_of_gpus_move_states(engine, kind, slot_bytes, monkeypatch, nothing_left_out):
    """Through page buffers that hold a whole slot of states, and through smaller ones for a few parts."""
    from emulated import calls, tools

    pool = state_pool(kind)
    fill(pool)
    was = [part.copy() for part in state_tensors(pool)]
    tier = state_tier(pool)
    (channel,), (back,) = tier._channels.to_host, tier._channels.to_device
    monkeypatch.setattr(gpu_engine, "_SLOT_BYTES", slot_bytes)
    staged = gpu_engine.staged_state_bytes(tier.page_bytes, tier._view.largest_part_bytes)
    assert staged <= max(slot_bytes, tier._view.largest_part_bytes)
    there, here = np.array([7, 0, 4]), DevicePages(torch.tensor([2, 6, 3]), 1)
    store = GPU_ENGINES[engine](channel.plan, tools(staged), True)  # keep it: its steps are only enqueued
    store.copy(Transfer(there, here, to_host=True))
    calls().play(1)
    expected = np.full_like(host_bytes(tier), GUARD)
    for host, slot in zip([7, 0, 4], [2, 6, 3], strict=True):
        expected[host, : tier.page_bytes] = np.concatenate([part[:, slot].ravel() for part in was])
    assert np.array_equal(host_bytes(tier), expected)
    guard(pool)
    load = GPU_ENGINES[engine](back.plan, tools(staged), False)
    there, here = np.array([4, 7, 7]), DevicePages(torch.tensor([1, 5, 2]), 1)
    transfer = Transfer(there, here, to_host=False)
    for layer in range(3):
        for part in tier._view.parts_by_layer[layer]:
            load.copy(transfer, part)
    calls().play(2)
    for part, before in zip(state_tensors(pool), was, strict=True):
        wanted = np.full_like(part, GUARD)
        wanted[:, [1, 5, 2]] = before[:, [3, 2, 2]]
        assert np.array_equal(part, wanted)
