"""Stores that read and write the tier's memory: checksums inside the pages, bad pages, failed reads."""

import itertools

import numpy as np
import pytest
from codec_oracle import ROW_BYTES
from direct_stores import GOT, KEYS, PUT, Operation, filled, flipped, get, put, put_in
from host_tier import page_memory, slots, stride_bytes, tier_of
from pools import GUARD, LAYERS

#: Layouts with different row sizes; page sizes include 61, a prime; one of two ranks with `--dcp-size`.
CASES = [*itertools.product(["bf16", "fp4"], [1, 2, 61, 64], [1]), ("fp4", 4, 2)]


@pytest.mark.parametrize(("layout", "page_size", "ranks"), CASES)
def test_round_trip(direct, layout, page_size, ranks):
    """Stored pages end with a checksum; no other byte of the tier changes in either direction."""
    server = {"rank": ranks - 1, "tp_size": ranks, "dcp_size": ranks}
    first = direct(layout, page_size, server=server)
    was = filled(tier_of(first))
    assert put(first)
    size = stride_bytes(LAYERS, page_size, ROW_BYTES[layout])
    assert was.shape[1] == size
    assert tier_of(first).is_stride_page_aligned(4096) == (size % 4096 == 0)
    sealed = page_memory(tier_of(first)).copy()
    assert np.array_equal(sealed[:, :-16], was[:, :-16])
    untouched = np.delete(sealed[:, -16:], PUT, axis=0)
    assert (untouched == GUARD).all()
    assert (sealed[PUT, -16:] != GUARD).any(axis=1).all()
    assert [len(page) for page in first.storage_backend.pages.values()] == [size] * 4

    again = direct(layout, page_size, store=first.storage_backend, server=server)
    hits, memory = get(again)
    assert hits == 4
    assert np.array_equal(memory[GOT], sealed[PUT])
    assert (np.delete(memory, GOT, axis=0) == GUARD).all()


def test_padding_holds_nothing_of_others(direct, monkeypatch):
    """Stores read the padding, so it must not keep what the memory held before."""
    from sglang.srt.mem_cache.pool_host.common import HostTensorAllocator

    allocate = HostTensorAllocator.allocate
    monkeypatch.setattr(HostTensorAllocator, "allocate", lambda *args, **kw: allocate(*args, **kw).fill_(7))
    tier = tier_of(direct("fp4", 64))
    assert page_memory(tier)[:, : tier.page_bytes].any()
    assert not page_memory(tier)[:, tier.page_bytes : -16].any()


DAMAGE = {
    "cut and filled up": lambda page: page[: len(page) // 2].ljust(len(page), b"\0"),
    "row": lambda page: flipped(page, 0),
    "padding": lambda page: flipped(page, len(page) - 17),
    "checksum": lambda page: flipped(page, len(page) - 1),
    "zeros": lambda page: bytes(len(page)),
}


@pytest.mark.parametrize("whole_batches", [False, True])
@pytest.mark.parametrize("layout", ["bf16", "fp4"])
@pytest.mark.parametrize("damage", [*DAMAGE, None])
def test_a_damaged_or_unreadable_page_ends_the_prefix(
    direct, failures, caplog, damage, layout, whole_batches
):
    controller = direct(layout, 64, whole_batches=whole_batches)
    sealed, store = put_in(controller), controller.storage_backend
    if damage is None:
        store.broken.add(KEYS[2])
    else:
        store.pages[KEYS[2]] = DAMAGE[damage](store.pages[KEYS[2]])
    hits, memory = get(controller)
    assert hits == 2
    assert np.array_equal(memory[[0, 5]], sealed[[3, 1]])
    assert failures() == {"page_checksum" if damage else "page_read": 1}
    assert f"page {KEYS[2]} of the store, host slot {2 * 64}" in caplog.text
    # One batch; if it fails as a whole, page by page up to the bad page.
    assert store.calls == (4 if whole_batches and damage is None else 1)
    assert get(controller, [4], [KEYS[3]])[0] == 1


def test_a_store_that_writes_nothing(direct, failures):
    """It reports success; the page still has a checksum of another key, or none."""
    put_in(controller := direct("fp4", 64))
    store = controller.storage_backend
    store.batch_get_v1 = lambda keys, *args: [True] * len(keys)
    assert controller._page_get_zero_copy(Operation(), KEYS[1:2], slots([3], 64)) == 0
    assert get(controller)[0] == 0
    assert failures() == {"page_checksum": 2}


def test_a_store_that_is_gone(direct, failures):
    """Two attempts, whatever the length of the list."""
    put_in(controller := direct("fp4", 64))
    store = controller.storage_backend
    store.broken.update(KEYS)
    assert get(controller)[0] == 0
    assert (store.calls, failures()) == (2, {"page_read": 1})

    def raises(*args):
        raise OSError(5, "gone on purpose")

    store.batch_get_v1 = raises
    assert get(controller)[0] == 0
    assert failures() == {"page_read": 2}


@pytest.mark.parametrize("way", ["raises", "refuses"])
def test_a_store_that_fails_once(direct, failures, caplog, way):
    sealed, store = put_in(controller := direct("fp4", 64)), controller.storage_backend
    read = store.batch_get_v1

    def flaky(keys, *args):
        store.batch_get_v1 = read
        if way == "raises":
            raise OSError(5, "flaky on purpose")
        return [False] * len(keys)

    store.batch_get_v1 = flaky
    hits, memory = get(controller)
    assert hits == 4
    assert np.array_equal(memory[GOT], sealed[PUT])
    assert failures() == {"page_read": 1}
    assert "all of which a retry has read" in caplog.text


def test_a_lost_page_gets_no_checksum(direct, failures):
    controller = direct("fp4", 64)
    filled(tier_of(controller))
    tier_of(controller)._lost.set(4, True)
    assert not put(controller)
    assert list(controller.storage_backend.pages) == KEYS[:2]
    assert (page_memory(tier_of(controller))[[4, 0], -16:] == GUARD).all()
    assert failures() == {"page_write": 1}
