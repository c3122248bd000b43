"""Flags of lost pages, parts of ranks, logs of allocators; memory that ranks share: test_sharing_ranks.py."""

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from host_tier import host_pool
from pools import device_pool

from sgl_kvpool.srt.host import shared_segment
from sgl_kvpool.srt.host.shared_segment import NodeRanks, SharedSegment
from sgl_kvpool.srt.host.shared_tier import AllocationLog, LostPages, SharedTier, first_difference
from sgl_kvpool.transfer.slots import DevicePages


def test_a_system_that_does_not_tell_its_machines_apart(monkeypatch, tmp_path, process_group):
    """Some sandboxes lack the file in /proc."""
    monkeypatch.setattr(shared_segment, "_BOOT_ID", tmp_path / "boot_id")
    with pytest.raises(ValueError, match="boot_id .* cannot be read .*; give --kv-host-sharing rank"):
        shared_segment.NodeRanks.of(process_group)


class Mapping(mmap.mmap):
    """A mapping whose calls of madvise are recorded; `at[advice]` is called or raised before it."""

    def __new__(cls, descriptor, size):
        cls.file = os.dup(descriptor)
        return super().__new__(cls, descriptor, size)

    def madvise(self, advice, *part):
        self.calls.append((advice, *part))
        act = self.at.get(advice, int)
        if isinstance(act, OSError):
            raise act
        act()
        return super().madvise(advice, *part)


@pytest.fixture
def mapping(monkeypatch):
    monkeypatch.setattr(mmap, "mmap", Mapping)
    Mapping.calls, Mapping.at = [], {}
    yield Mapping
    os.close(Mapping.file)


def area_of(memory):
    """Fields of /proc/self/smaps of the mapping that begins with this memory."""
    fields = Path("/proc/self/smaps").read_text().split(f"\n{memory.data_ptr():x}-")[1].splitlines()[1:25]
    return {name: value.split() for name, _, value in (line.partition(":") for line in fields)}


POPULATE = 23  # MADV_POPULATE_WRITE


def test_huge_pages_are_asked_for_before_the_memory_is_there(process_group, mapping):
    """Where the kernel allows them for shared memory (`shmem_enabled`), some are mapped."""
    segment = SharedSegment(NodeRanks.of(process_group), 32 << 20)
    area = area_of(segment.memory)
    assert area["Size"] == area["Rss"] == ["32768", "kB"]
    assert mapping.calls == [(mmap.MADV_HUGEPAGE,), (POPULATE, 0, 32 << 20)]
    assert "hg" in area.get("VmFlags", ["hg"])  # which some kernels do not show
    assert area["THPeligible"] == ["0"] or int(area["ShmemPmdMapped"][0]) > 0


def test_a_kernel_without_huge_pages_and_populating(process_group, mapping, monkeypatch):
    mapping.at = {mmap.MADV_HUGEPAGE: OSError(errno.EINVAL, "Invalid argument")}
    monkeypatch.setattr(shared_segment, "_MADV_POPULATE_WRITE", 12345)  # which this kernel does not know
    segment = shared_segment.SharedSegment(shared_segment.NodeRanks.of(process_group), 1 << 20)
    assert area_of(segment.memory)["Rss"] == ["1024", "kB"]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: os.ftruncate(Mapping.file, 4096), "Bad address"),  # an access would end the process: SIGBUS
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
    ],
)
def test_memory_that_the_kernel_does_not_provide(process_group, no_reserve, mapping, call, reason):
    mapping.at = {POPULATE: call}
    said = rf"needs 0\.\d\d GB for \d+ tokens .*{reason}.* Give a smaller --hicache-ratio"
    with pytest.raises(ValueError, match=said):
        host_pool(device_pool("fp4"), node_ranks=NodeRanks.of(process_group))


def test_a_rank_cannot_clear_what_another_one_lost():
    flags = np.zeros((3, 10), dtype=np.uint8)
    ranks = [LostPages(flags, rank) for rank in range(3)]
    ranks[1].set(np.array([4, 5]), True)
    ranks[2].set(np.array([5]), True)
    for rank in (ranks[0], ranks[2]):
        rank.set(slice(None), False)
    assert all(rank.of(np.arange(10)).tolist() == [n in (4, 5) for n in range(10)] for rank in ranks)
    assert ranks[0].any(np.array([1, 4]))
    assert not ranks[0].any(np.array([1, 6]))
    ranks[1].set(np.array([4]), False)
    assert not ranks[0].any(4)
    ranks[2].set(np.array([5]), True)
    for rank in ranks:
        rank.close()
        assert rank.of(np.arange(10)).all()
        assert rank.any(1)
        # For loads on which the ranks agreed before the close.
        assert [rank.any_flagged(page) for page in (1, 5)] == [False, True]
    ranks[0].set(slice(None), False)
    assert ranks[0].of(np.arange(10)).all()


@pytest.mark.parametrize("page_size", [1, 2, 61])
def test_ranks_divide_a_backup(page_size):
    """Each host page goes to one rank with its device page; the device list may be on a GPU."""
    generator = np.random.default_rng(page_size)
    host, device = generator.permutation(50)[:17], generator.permutation(90)[:17] + 1
    slots = (device[:, None] * page_size + np.arange(page_size)).ravel()
    for rank in range(3):
        tier = SharedTier(NodeRanks(None, (0, 1, 2), rank, 3))
        own = host % 3 == rank
        there, here = tier.own_part(host, DevicePages(torch.from_numpy(slots), page_size))
        assert np.array_equal(there, host[own])
        assert np.array_equal(here.page_indices(), device[own])
        assert np.array_equal(tier.own_part(host, device)[1], device[own])


def test_the_first_operation_in_which_ranks_differ_is_named():
    one, two = AllocationLog(), AllocationLog()
    for log in (one, two):
        log.add("alloc", np.arange(128))
        log.add("free", np.arange(64, 128))
    assert one.digest == two.digest
    assert 0 <= one.digest < 1 << 62
    one.add("alloc", np.arange(64, 128))
    assert one.digest != two.digest
    said = first_difference([one.latest(), two.latest()])
    assert said == "operation 3, rank 0: alloc of 64 slots from 64; rank 1: nothing"
    two.add("alloc", np.arange(128, 192))
    two.add("free", np.arange(3))
    said = first_difference([one.latest(), two.latest()])
    assert said == "operation 3, rank 0: alloc of 64 slots from 64; rank 1: alloc of 64 slots from 128"


@pytest.mark.parametrize("change", ["order", "kind", "slots"])
def test_every_difference_changes_the_digest(change):
    one, two = AllocationLog(), AllocationLog()
    first, second = ("alloc", np.arange(4)), ("free", np.arange(4, 8))
    other = {
        "order": [second, first],
        "kind": [first, ("alloc", second[1])],
        "slots": [first, ("free", np.arange(4, 9))],
    }
    for log, operations in ((one, [first, second]), (two, other[change])):
        for operation in operations:
            log.add(*operation)
    assert one.digest != two.digest


def test_a_difference_older_than_the_logs_of_both_ranks():
    one, two = AllocationLog(), AllocationLog()
    one.add("alloc", np.arange(4))
    two.add("alloc", np.arange(5))
    for log in (one, two):
        for _ in range(2000):
            log.add("free", np.arange(2))
    said = first_difference([one.latest(), two.latest()])
    assert said.startswith("operation 978, rank 0: free of 2 slots from 0")
