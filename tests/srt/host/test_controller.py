"""SGLang's own HiCache controller over our host tier, in this process: transfers and their failures."""

from types import MethodType

import numpy as np
import pytest
import torch
from host_tier import backup, host_bytes, slots, tier_of
from pools import GUARD, LAYERS, START, device_pool, fill, rows
from sglang.srt.managers.cache_controller import storage_model_name
from sglang.srt.mem_cache.pool_host import common
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from sgl_kvpool.srt.pool.mla import LayoutMLATokenToKVPool
from sgl_kvpool.transfer import cpu_engine


def pages(slots_of_pages, page_size=4):
    return [int(slot) // page_size for slot in slots_of_pages[::page_size]]


@pytest.mark.parametrize("layout", ["bf16", "fp8"])
def test_rows_in_sglangs_own_tier_are_named(controller_of, monkeypatch, layout):
    """On CUDA, SGLang's tier serves these two layouts; its file store reads the start of a longer file."""
    monkeypatch.setattr(LayoutMLATokenToKVPool, "has_our_tier", False)
    # Registering memory needs a CUDA driver.
    monkeypatch.setattr(common, "_cuda_host_register", lambda *_, **__: None)
    names = []
    for k_scales in ({}, {START + layer: 0.5 for layer in range(LAYERS)}):
        pool = device_pool(layout, k_scales=k_scales if layout == "fp8" else {})
        group = controller_of(pool).mem_pool_host
        assert type(group.anchor_entry.host_pool) is MLATokenToKVPoolHost
        names.append(storage_model_name("model", group.anchor_entry.host_pool))
    if layout == "bf16":
        assert names == ["model", "model"]  # as on servers without the plugin
        return
    assert names[0].startswith("model-sglang-fp8-r512-p64-b576-v1")
    assert names[1].startswith(f"{names[0]}-k")
    controller = controller_of(pool)
    with pytest.raises(ValueError, match="255 at most; give a shorter --served-model-name"):
        controller.attach_storage_backend("file", model_name="m" * 150)


# ------------------------------------------------------------------ checks of lists before queueing


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ([0, 1, 2, 3, 0, 1, 2, 3], "a page is listed twice"),
        ([0, 1, 2, 3, 8, 9, 10, 11], "not allocated"),
        ([0, 1, 2], "not a multiple of the page size"),
        ([1, 2, 3, 4], "not the 4 slots of one page in order"),
        ([0, 1, 3, 2], "not the 4 slots of one page in order"),
        ([4000, 4001, 4002, 4003], "the pool has 0 to"),
        ([-4, -3, -2, -1], "pages -1 to -1"),
    ],
)
def test_bad_host_lists_are_a_miss(controller_of, failures, caplog, bad, reason):
    controller = controller_of(device_pool("fp4", pages=9))
    kept = controller.write(controller.mem_pool_device_allocator.alloc(8), node_id=1)
    assert kept.tolist() == list(range(8))
    free = controller.mem_pool_device_allocator.available_size()
    assert controller.load(torch.tensor(bad), node_id=1) is None
    assert controller.load_queue == []
    assert controller.mem_pool_device_allocator.available_size() == free
    assert failures() == {"load_pages": 1}
    assert reason in caplog.text
    assert controller.load(kept, node_id=1) is not None


@pytest.mark.parametrize(
    ("given", "reason"), [([5, 5], "listed twice"), ([3, 9], "pages 3 to 9"), ([0, 3], "pages 0 to 3")]
)
def test_bad_device_lists_of_the_allocator_are_a_miss(controller_of, failures, caplog, given, reason):
    """Page 0 takes the writes of padded tokens."""
    controller = controller_of(device_pool("fp8", pages=9))
    allocator = controller.mem_pool_device_allocator
    kept = controller.write(allocator.alloc(8), node_id=1)
    allocator.alloc = MethodType(lambda self, need: slots(given, 4), allocator)
    assert controller.load(kept, node_id=1) is None
    assert controller.load_queue == []
    assert controller.load(kept, node_id=1, device_indices=slots(given, 4)) is None
    assert controller.load_queue == []
    assert failures() == {"load_pages": 2}
    assert reason in caplog.text


@pytest.mark.parametrize("bad", [[2, 2], [0, 1], [1, 9], [-1, 3]])
def test_bad_device_lists_are_not_backed_up(controller_of, failures, bad):
    controller = controller_of(device_pool("bf16", pages=9))
    free = tier_of(controller).available_size()
    host_bytes(tier_of(controller))[...] = GUARD
    assert controller.write(slots(bad, 4), node_id=1) is None
    assert tier_of(controller).available_size() == free
    assert (controller.write_queue, controller.ack_write_queue) == ([], [])
    assert (host_bytes(tier_of(controller)) == GUARD).all()
    assert failures() == {"backup_pages": 1}


def test_a_load_is_one_transfer_until_a_layer_is_loaded_again(controller_of, monkeypatch):
    """SGLang passes the same two tensors for each layer; the same tensors may also be a later load's."""
    tier = tier_of(controller_of(device_pool("fp4", pages=9)))
    backup(tier, [1, 2], [3, 5])
    (channel,) = tier._channels.to_device
    seen, run = [], channel.run
    monkeypatch.setattr(channel, "run", lambda transfer, part: (seen.append(transfer), run(transfer, part)))
    lists = [(slots([1, 2], 4), slots([3, 5], 4)) for _ in range(2)]
    for host, device in (lists[0], lists[0], lists[1], (lists[1][0], lists[0][1])):
        for layer in range(LAYERS):
            tier.load_to_device_per_layer(None, host, device, layer, "kernel")
    loads = [seen[first : first + LAYERS] for first in range(0, len(seen), LAYERS)]
    assert [len(set(map(id, load))) for load in loads] == [1] * 4
    assert len(set(map(id, seen))) == 4


# ------------------------------------------------------------------ engines that fail


class Broken:
    """An engine that writes garbage to some of the pages, and then fails."""

    name = "cpu"
    is_asynchronous = False
    wants_page_indices = True

    def __init__(self, plan):
        self.plan = plan

    def copy(self, transfer, part=None):
        group = self.plan.target_group
        for layer in group.layers if part is None else [group.layers[part]]:
            self.plan.target.view(group, layer.runs)[transfer.page_indices()[1][:1]] = 0x55
        raise OSError(5, "broken on purpose")


def broken(channels, patched):
    """Transfers of these channels fail, with the engine and with torch."""
    for channel in channels:
        for name in ("engine", "_torch"):
            patched.setattr(channel, name, Broken(channel.plan))


def test_a_backup_that_fails_twice_is_lost_and_nothing_else(controller_of, failures, monkeypatch):
    """SGLang's tree treats the pages as backed up: loads of them are misses, stores do not receive them."""
    pool = device_pool("fp4", pages=9)
    fill(pool)
    controller = controller_of(pool)
    tier = tier_of(controller)
    allocator = controller.mem_pool_device_allocator
    good = controller.write(allocator.alloc(4), node_id=1)
    with monkeypatch.context() as patched:
        broken(tier._channels.to_host, patched)
        lost = controller.write(allocator.alloc(8), node_id=2)
    assert failures() == {"backup": 1, "backup_lost": 1}
    assert controller.load(lost, node_id=2) is None
    assert controller.load(torch.cat([good, lost]), node_id=2) is None
    assert controller.load(good, node_id=1) is not None
    with pytest.raises(ValueError, match="lost in its backup"):
        tier.get_data_page(int(lost[4]))
    # Stores without copies get the addresses, because they fetch into them.
    assert len(tier.get_page_buffer_meta(lost)[0]) == 2
    assert tier.get_page_buffer_element_size() == tier.page_format.size_bytes
    # A load that bypasses the controller, as when SGLang restores retracted requests, stops the server.
    with pytest.raises(RuntimeError, match="cannot load a host page that was lost in its backup"):
        tier.load_to_device_per_layer(None, lost, slots([3, 5], 4), 0, "kernel")
    # After another backup, the pages are valid again.
    backup(tier, pages(lost), [2, 6])
    assert tier.host_indices_problem(lost) is None
    tier._lost.set(pages(lost), True)
    # The next owner of the pages writes them again.
    tier.free(lost)
    everything = tier.alloc(tier.available_size())
    assert set(lost.tolist()) <= set(everything.tolist())
    assert tier.host_indices_problem(lost) is None


def test_a_load_that_fails_twice_stops_the_server(controller_of, failures, monkeypatch, caplog):
    """The pages are already in the tree, so no request would compute them again."""
    controller = controller_of(device_pool("fp4", pages=9))
    kept = controller.write(controller.mem_pool_device_allocator.alloc(8), node_id=1)
    broken(tier_of(controller)._channels.to_device, monkeypatch)
    assert controller.load(kept, node_id=1) is not None
    # SGLang then waits for its stream, which torch.cpu's stream does not support: a second error.
    with pytest.raises((OSError, AttributeError)) as stopped:
        controller.start_loading()
    assert "broken on purpose" in f"{stopped.value} {stopped.value.__context__}"
    assert "transfer of 2 pages to_device failed" in caplog.text
    assert failures() == {"load": 1}


def test_an_engine_that_cannot_be_built(controller_of, failures, monkeypatch, caplog):
    def no_compiler():
        raise RuntimeError("no compiler on purpose")

    monkeypatch.setattr(cpu_engine, "_module", no_compiler)
    caplog.set_level("INFO")
    pool = device_pool("fp4", "page_major", pages=9)
    fill(pool)
    controller = controller_of(pool)
    taken = controller.mem_pool_device_allocator.alloc(12)
    kept = controller.write(taken, node_id=1)
    assert np.array_equal(host_bytes(tier_of(controller))[pages(kept), 2], rows(pool)[2][pages(taken)])
    assert failures() == {"engine_build": 1}
    assert "engine torch, runs of" in caplog.text
    assert "no compiler on purpose" in caplog.text
