"""Memory that processes share, flags of lost pages, and the log of the ranks' allocators."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from sgl_kvpool.srt.host.shared_tier import AllocationLog, LostPages, first_difference

HERE = Path(__file__).resolve().parent
RANKS = 3
PROLOGUE = """
import os, sys, torch, json
import torch.distributed as dist
from pathlib import Path
rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
meet = dist.FileStore(str(folder / "meet"), ranks)
dist.init_process_group("gloo", store=meet, rank=rank, world_size=ranks)
from sgl_kvpool.srt.host.shared_segment import NodeRanks, SharedSegment
"""
#: If a rank ends while others still communicate with it, gloo aborts them; and sometimes it aborts a
#: rank that destroys its process group ("terminate called without an active exception").
EPILOGUE = """
import time
meet.add("ended", 1)
while meet.add("ended", 0) < ranks:
    time.sleep(0.01)
sys.stdout.flush()
os._exit(0)
"""


def run(folder, code, ranks=RANKS):
    """Statuses and outputs of `ranks` processes that run this code."""
    command = [sys.executable, "-c", PROLOGUE + textwrap.dedent(code) + EPILOGUE]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env=environment,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], printed


def test_every_rank_sees_what_any_of_them_writes(tmp_path):
    """Also with a size that is not a multiple of the system's page or of the number of ranks."""
    statuses, printed = run(
        tmp_path,
        """
        node = NodeRanks.of(dist.group.WORLD)
        assert (node.count, node.rank, node.members) == (ranks, rank, tuple(range(ranks)))
        segment = SharedSegment(node, 3 * 4096 * 5 + 61)
        assert segment.memory.nbytes == 3 * 4096 * 5 + 61 and not segment.memory.any()
        node.gather(None)
        segment.memory[rank::ranks] = rank + 1
        node.gather(None)
        wanted = torch.arange(segment.memory.nbytes) % ranks + 1
        assert torch.equal(segment.memory.long(), wanted)
        assert node.minimum(rank, -rank) == [0, 1 - ranks]
        print("maps", sum("kvpool" in line for line in open("/proc/self/maps")))
        """,
    )
    assert statuses == [0] * RANKS, printed
    assert all("maps 1" in text for text in printed)


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_cannot_map_the_memory_refuses_on_all_ranks(tmp_path, who):
    statuses, printed = run(
        tmp_path,
        f"""
        node = NodeRanks.of(dist.group.WORLD)
        if rank == {who}:
            def refuse(*_):
                raise OSError(12, "Cannot allocate memory")
            os.ftruncate = os.open = refuse
        try:
            SharedSegment(node, 1 << 20)
        except ValueError as error:
            print(error)
        assert not [line for line in open("/proc/self/maps") if "kvpool" in line]
        """,
    )
    assert statuses == [0] * RANKS, printed
    said = "could not share 0.00 GB of host memory (OSError: [Errno 12] Cannot allocate memory)"
    assert all(said in text and "give --kv-host-sharing rank" in text for text in printed)


def test_a_machine_that_cannot_map_the_memory_refuses_on_all_machines(tmp_path):
    """Otherwise the other ranks would wait. Ranks 0 and 1 are on one machine, rank 2 on another."""
    statuses, printed = run(
        tmp_path,
        """
        from sgl_kvpool.srt.host import shared_segment
        shared_segment._machine = lambda: ("machine", rank // 2)
        node = NodeRanks.of(dist.group.WORLD)
        assert (node.count, node.rank, node.fewest) == ((2, rank, 1) if rank < 2 else (1, 0, 1))
        if rank == 2:
            def refuse(*_):
                raise OSError(12, "Cannot allocate memory")
            os.ftruncate = refuse
        try:
            SharedSegment(node, 1 << 20)
        except ValueError as error:
            print(error)
        """,
    )
    assert statuses == [0] * RANKS, printed
    assert all("could not share 0.00 GB" in text and "Cannot allocate memory" in text for text in printed)


def test_a_system_that_does_not_tell_its_machines_apart(monkeypatch, tmp_path):
    """Some sandboxes lack the file in /proc."""
    from sgl_kvpool.srt.host import shared_segment

    monkeypatch.setattr(shared_segment, "_BOOT_ID", tmp_path / "boot_id")
    with pytest.raises(ValueError, match="boot_id .* cannot be read .*; give --kv-host-sharing rank"):
        shared_segment._machine()


def test_no_memory_is_left_when_all_were_killed(tmp_path):
    """The kernel frees an anonymous file with its last mapping."""
    before = shared_bytes()
    statuses, _ = run(
        tmp_path,
        """
        segment = SharedSegment(NodeRanks.of(dist.group.WORLD), 64 << 20)
        os.kill(os.getpid(), 9)
        """,
    )
    assert statuses == [-9] * RANKS
    assert shared_bytes() - before < 32 << 20


def shared_bytes():
    """Bytes of shared memory of the whole machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Shmem:"))


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
    from sgl_kvpool.srt.host.shared_segment import NodeRanks
    from sgl_kvpool.srt.host.shared_tier import SharedTier
    from sgl_kvpool.transfer.slots import DevicePages

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
