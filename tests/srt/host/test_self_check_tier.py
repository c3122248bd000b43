"""The self-check of a host tier, over SGLang's own controller and allocators."""

import pytest
from cases import crossed
from codec_oracle import LAYOUTS, narrower
from host_tier import LABELS, page_memory, tier_of
from pools import ARRANGEMENTS, START, device_pool, fill, memory

from sgl_kvpool.srt.host import rows
from sgl_kvpool.srt.self_check import Difference, check_rows, check_tier
from sgl_kvpool.transfer.host_options import HostTierOptions


def alone(good):
    """The agreement among ranks on a server with one rank."""
    return good


class Left:
    """The state that a check must leave unchanged."""

    def __init__(self, controller):
        self.controller, self.tier = controller, tier_of(controller)
        self.pool = controller.mem_pool_host.anchor_entry.device_pool
        page_memory(self.tier)[...] = 0xEE
        fill(self.pool)
        self.before = self.now()

    def now(self):
        tier, allocator = self.tier, self.controller.mem_pool_device_allocator
        free = (tier.available_size(), allocator.available_size(), int(tier.slot_used.sum()))
        return [part.tobytes() for part in (*memory(self.pool), page_memory(tier))], free

    def check(self):
        assert check_tier(self.controller, alone) == "2 pages to the host tier and back"
        assert self.now() == self.before
        assert not self.controller.has_inflight_device_transfers()


@pytest.mark.parametrize(
    ("layout", "arrangement", "page_size", "label"), crossed(LAYOUTS, ARRANGEMENTS, [1, 4], LABELS)
)
def test_pages_of_the_same_layout(controller_of, layout, arrangement, page_size, label):
    Left(controller_of(device_pool(layout, arrangement, page_size, pages=9), label)).check()


@pytest.mark.parametrize(
    ("layout", "host"), [(layout, host) for layout in LAYOUTS for host in narrower(layout)]
)
def test_pages_of_a_narrower_layout(controller_of, layout, host):
    scales = {START: 0.5} if layout == "fp8" else {}
    pool = device_pool(layout, pages=9, host_tier=HostTierOptions(layout=host), k_scales=scales)
    controller = controller_of(pool)
    assert tier_of(controller).row_format.layout.value == host
    Left(controller).check()


@pytest.mark.parametrize(
    ("kind", "page_size"), [("hybrid", 4), ("hybrid DSA", 64), ("DSA, packed draft", 64)]
)
def test_hybrid_and_sparse_models(model_of, kind, page_size):
    model = model_of(kind, page_size=page_size)
    left = Left(model.controller)
    assert check_rows(model.pool).startswith("rows of ")
    left.check()


def test_a_tier_without_free_pages(controller_of):
    controller = controller_of(device_pool("fp4", pages=9))
    tier_of(controller).alloc(tier_of(controller).available_size())
    assert check_tier(controller, alone) == "no free page for the host tier's check"


# ------------------------------------------------------------------ broken on purpose


def difference(controller):
    left = Left(controller)
    with pytest.raises(Difference) as found:
        check_tier(controller, alone)
    assert left.now()[1] == left.before[1]  # slots are returned nevertheless
    return str(found.value)


def test_a_backup_that_changes_a_byte(controller_of, monkeypatch):
    controller = controller_of(device_pool("fp8", pages=9))
    tier = tier_of(controller)
    backup = tier.backup_from_device_all_layer

    def damaged(*args):
        backup(*args)
        page_memory(tier)[0, 5] ^= 1

    monkeypatch.setattr(tier, "backup_from_device_all_layer", damaged)
    assert "rows of fp8 in the host tier: byte 5 of layer 0 of 3, token 0" in difference(controller)


@pytest.mark.parametrize("layer", [0, 2])
def test_index_keys_of_the_target_or_the_draft_that_are_not_loaded(model_of, layer, monkeypatch):
    controller = model_of("DSA, packed draft", page_size=64).controller
    channel = tier_of(controller)._channels.to_device[2 + layer // 2]  # behind those of both pools' rows
    monkeypatch.setattr(channel, "run", lambda *args: None)
    assert "index keys loaded from the host tier: byte 0 of layer 0" in difference(controller)


@pytest.mark.parametrize("host", ["same", "fp4"])
def test_a_load_of_other_pages(controller_of, host, monkeypatch):
    controller = controller_of(device_pool("bf16", pages=9, host_tier=HostTierOptions(layout=host)))
    tier = tier_of(controller)
    load = tier.load_to_device_per_layer

    def swapped(pool, host_indices, device_indices, *more, **named):
        load(pool, host_indices.roll(4), device_indices, *more, **named)

    monkeypatch.setattr(tier, "load_to_device_per_layer", swapped)
    assert "rows of bf16 loaded from the host tier: byte 0 of layer 0, token 0" in difference(controller)


def test_a_conversion_with_k_scales_of_other_layers(controller_of, monkeypatch):
    build = rows.build_channels

    def reversed_scales(pages, views, device_rows, host_rows, k_scales, *rest):
        return build(pages, views, device_rows, host_rows, [one[::-1] for one in k_scales], *rest)

    monkeypatch.setattr(rows, "build_channels", reversed_scales)
    options = {"host_tier": HostTierOptions(layout="fp4_fp8_rope"), "k_scales": {START: 0.5}}
    pool = device_pool("fp8", pages=9, **options)
    assert "rows of fp4_fp8_rope in the host tier: byte " in difference(controller_of(pool))


def test_a_backup_that_fails(controller_of, monkeypatch, failures):
    """There is no exception: SGLang goes on, and the pages count as lost."""
    controller = controller_of(device_pool("fp4", pages=9))
    (channel,) = tier_of(controller)._channels.to_host
    monkeypatch.setattr(channel, "run", lambda *args: 1 / 0)
    lost = "the host tier: a host page of the list was lost in its backup, see the log"
    assert difference(controller) == lost
    assert failures() == {"backup_lost": 1}


def test_a_controller_that_refuses(controller_of, monkeypatch):
    controller = controller_of(device_pool("fp4", pages=9))
    monkeypatch.setattr(controller, "load", lambda host: None)
    assert difference(controller) == "the host tier: SGLang's controller refused a load, see the log"


def test_another_rank_that_fails(controller_of):
    """Ranks agree after every step; this rank has found no difference."""
    controller = controller_of(device_pool("fp4", pages=9))
    left = Left(controller)
    for step in range(1, 6):
        answers = iter([True] * step + [False])
        with pytest.raises(Difference, match="another rank found a difference, see its log"):
            check_tier(controller, lambda good, answers=answers: next(answers))
        assert left.now() == left.before
