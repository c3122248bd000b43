"""Three ranks that share a host tier, with SGLang's trees, controllers and store: see sharing_ranks.py."""

import re

import pytest
import rank_processes
from codec_oracle import ROW_BYTES
from sharing_model import LONGER, OTHER, PAGE_SIZE, RANKS, SHORT, TOKENS
from sharing_ranks import CASES, NARROW, PLACED, SEEDS, WIDE

NO_FAILURES = [{}] * RANKS
ALL = [len(SHORT), len(LONGER), len(OTHER)]


@pytest.fixture(scope="module")
def seen(fresh, tmp_path_factory):
    """`seen[case]`: the results of the ranks, in order."""
    return rank_processes.run(fresh, "sharing_ranks.py", RANKS, tmp_path_factory.mktemp("sharing"), CASES)


def agreed(ranks):
    """The lengths, which must be equal on all ranks, and the failures that each rank counted."""
    lengths = [rank["lengths"] for rank in ranks]
    assert lengths == [lengths[0]] * RANKS
    return lengths[0], [rank["failures"] for rank in ranks]


#: Cases of `there_and_back` -> row bytes on the device and on the host, and page size.
THERE_AND_BACK = {
    **{arrangement: (ROW_BYTES[layout], ROW_BYTES[layout], PAGE_SIZE)
       for arrangement, layout in PLACED.items()},
    **dict.fromkeys(("narrower", "draft-narrower"), (ROW_BYTES[WIDE], ROW_BYTES[NARROW], PAGE_SIZE)),
    **{f"pages-of-{size}": (416, 416, size) for size in (1, 2)},
    "draft": (576, 576, PAGE_SIZE),
    "two-drafts": (416, 416, PAGE_SIZE),
}  # fmt: skip


def drafts_of(case):
    return 2 if case == "two-drafts" else int("draft" in case)


@pytest.mark.parametrize("case", THERE_AND_BACK)
def test_every_rank_stores_its_pages_and_all_load_from_the_one_copy(seen, case):
    """Each process compares the bytes."""
    wide, narrow, page_size = THERE_AND_BACK[case]
    assert agreed(seen[case]) == ([*ALL, *reversed(ALL)], NO_FAILURES)
    # LONGER extends SHORT, so its pages include SHORT's.
    pages = (len(LONGER) + len(OTHER)) // page_size
    # The target and each draft store the same pages.
    for rank, found in enumerate(seen[case]):
        assert found["kept"] == [list(range(rank, pages, RANKS))] * (1 + drafts_of(case))
    # --hicache-ratio 1: each rank's part has the bytes of its pool; SGLang adds one page.
    # As in SGLang, the ratio counts the target's bytes, and drafts add their rows to each page.
    in_bytes = RANKS * TOKENS * wide // narrow
    for rank in seen[case]:
        assert rank["alone"] == TOKENS
        assert in_bytes - page_size < rank["tokens"] - page_size <= in_bytes


@pytest.mark.parametrize("direction", ["to_host", "to_device"])
@pytest.mark.parametrize("rank", [0, 2])
def test_others_wait_for_a_rank_that_is_slow(seen, rank, direction):
    assert agreed(seen[f"slow-{rank}-{direction}"]) == ([len(LONGER)] * 4, NO_FAILURES)


@pytest.mark.parametrize("what", ["lost", "lost-draft"])
@pytest.mark.parametrize("rank", range(RANKS))
def test_what_one_rank_lost_is_a_miss_on_all(seen, rank, what):
    """Also where it lost the drafts' rows alone of a page."""
    lengths, failures = agreed(seen[f"{what}-{rank}"])
    assert lengths == [0, len(SHORT), len(LONGER), len(OTHER)]
    lost = {"backup": 1, "backup_lost": 1}
    assert failures == [{**(lost if other == rank else {}), "load_pages": 1} for other in range(RANKS)]


def test_a_draft_with_a_host_pool_of_its_own_is_refused(seen):
    """Refused before it allocates; the launcher chooses sharing only where SGLang builds no such pool."""
    assert agreed(seen["own-draft"]) == ([len(LONGER)], NO_FAILURES)
    for found in seen["own-draft"]:
        assert found["pools"] == 1
        assert "does not work with --kv-host-sharing node" in found["error"]
        assert found["error"].endswith("; start the server with --kv-host-sharing rank")


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_backup_that_one_rank_refuses_is_made_by_none(seen, rank):
    """All ranks refuse it, so that their allocators stay equal, and the tier goes on."""
    assert agreed(seen[f"refused-{rank}"]) == ([0, len(OTHER)], [{"backup_pages": 1}] * RANKS)
    assert len({found["free"] for found in seen[f"refused-{rank}"]}) == 1


def allocations_differ(moved):
    words = (f"rank {rank}: alloc of {4 if rank == moved else 20} slots from 8" for rank in range(RANKS))
    return "at operation 3, " + "; ".join(words)


@pytest.mark.parametrize("rank", range(RANKS))
def test_ranks_that_give_out_other_pages_end_the_tier(seen, rank):
    """The tier ends before a copy is submitted; then no rank serves any page, not even one stored before."""
    case = f"moved-{rank}"
    lengths, failures = agreed(seen[case])
    assert lengths == [0, 0, 0]
    assert all(found["tier_disagreement"] == 1 for found in failures)
    for found in seen[case]:
        assert (found["kept"], found["detail"]) == ([[]], allocations_differ(rank))


@pytest.mark.parametrize("rank", [0, 2])
def test_ranks_that_would_load_other_pages_end_the_tier(seen, rank):
    """All these pages are allocated and were stored, so only the lists differ."""
    case = f"other-list-{rank}"
    counted = {"tier_disagreement": 1, "load_elsewhere": 1, "load_pages": 1}
    assert agreed(seen[case]) == ([len(OTHER), 0, 0], [counted] * RANKS)
    starts = [24 if other == rank else 0 for other in range(RANKS)]
    words = "; ".join(f"rank {other}: 28 slots from {start}" for other, start in enumerate(starts))
    assert {found["detail"] for found in seen[case]} == {f"at a load, {words}"}


def test_no_request_changes_ranks_that_share_a_tier_to_write_back(seen):
    """SGLang takes the policy from a request to attach a store, even if a store is already attached."""
    assert agreed(seen["write-back-later"]) == ([len(LONGER)], NO_FAILURES)
    for found in seen["write-back-later"]:
        assert found["policy"] == "write_through"
        assert found["done"] == [True, True]
        for ok, said in found["refused"]:
            assert not ok
            assert "--hicache-write-policy write_back does not work with --kv-host-sharing node" in said


def test_pages_of_an_aborted_request_are_not_reused_while_the_first_rank_reads_into_them(seen):
    """The other ranks finished long before. A store that is detached and attached again finds its pages."""
    assert agreed(seen["aborted"]) == ([16] * 8 + [len(LONGER)], NO_FAILURES)
    for found in seen["aborted"]:
        assert (found["held"], found["leaked"], found["done"]) == (len(LONGER), 0, [True, True])


def test_each_machine_has_a_copy(seen):
    """Two ranks on one machine and one rank on another, whose own tier has the same size."""
    assert agreed(seen["machines"]) == ([*ALL, *reversed(ALL)], NO_FAILURES)
    pages = range((len(LONGER) + len(OTHER)) // PAGE_SIZE)
    assert [rank["kept"] for rank in seen["machines"]] == [[[*pages[::2]]], [[*pages[1::2]]], [[*pages]]]
    assert {rank["tokens"] for rank in seen["machines"]} == {TOKENS + PAGE_SIZE}


@pytest.mark.parametrize(
    ("case", "reading"), [("store-2", (0,)), ("store-draft", (0,)), ("machines-store", (0, 2))]
)
def test_the_first_rank_of_each_machine_reads_the_store(seen, case, reading):
    """The drafts' rows too; a file that another rank could not read does no harm."""
    assert agreed(seen[case]) == ([len(LONGER)], NO_FAILURES)
    pages = len(LONGER) // PAGE_SIZE
    assert [rank["reads"] for rank in seen[case]] == [pages * (rank in reading) for rank in range(RANKS)]
    assert {rank["files"] for rank in seen[case]} == {pages}


def test_ranks_of_another_machine_are_named(seen):
    """The two ranks of the other machine agree with each other."""
    _, failures = agreed(seen["machines-moved"])
    assert all(found["tier_disagreement"] == 1 for found in failures)
    assert {found["detail"] for found in seen["machines-moved"]} == {allocations_differ(2)}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mixture_of_pressure_and_faults(seen, seed):
    """Each process compares the bytes of every hit; some hits are whole prompts, some requests miss."""
    case = f"mixture-{seed}"
    lengths, failures = agreed(seen[case])
    assert 0 in lengths
    assert any(length == asked for length, asked in zip(lengths, seen[case][0]["asked"], strict=True))
    assert all(found.keys() <= {"backup", "backup_lost", "load_pages"} for found in failures)
    assert sum(found.get("backup_lost", 0) for found in failures) > 0
    assert [rank["leaked"] for rank in seen[case]] == [0] * RANKS


def test_a_tier_that_was_flushed_goes_on(seen):
    assert agreed(seen["flushed"]) == ([0, len(OTHER)], NO_FAILURES)


def test_what_the_first_rank_cannot_read_ends_the_prefix_on_all(seen):
    assert agreed(seen["store-0"]) == ([4 * PAGE_SIZE], [{"page_read": 1}, {}, {}])


def test_a_load_that_fails_on_one_rank_ends_the_check_on_all(seen):
    """A rank that left earlier would be waited for."""
    own = "rows of fp4 loaded from the host tier: byte 0 of layer 0, token 0"
    other = "the host tier: another rank found a difference, see its log"
    for rank, text in zip(seen["checked-loaded"], (other, other, own), strict=True):
        assert rank["found"].startswith(text)
        assert rank["same"]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        *((case, r"could not share 0.00 GB of host memory \(OSError: \[Errno 12\] .*--kv-host-sharing rank")
          for case in ("unmapped-0", "unmapped-2", "machines-unmapped")),
        ("empty-2", r"\(OSError: \[Errno 14\] Bad address\)"),
        *((f"no-memory-{rank}", "a rank's part of the tier of 3 ranks needs") for rank in (0, 2)),
    ],
)  # fmt: skip
def test_memory_that_one_rank_lacks_is_an_error_of_all(seen, case, said):
    """On its machine and on others, whose ranks would wait for it; no rank allocates what others lack."""
    (error,) = {found["error"] for found in seen[case]}
    assert re.search(said, error)


@pytest.mark.parametrize("case", ["alone-0", "alone-2", "machines-alone"])
def test_sharing_that_auto_chose_and_the_system_refuses_is_left_out_by_all(seen, case):
    """One rank warns."""
    assert agreed(seen[case]) == ([len(LONGER)], NO_FAILURES)
    assert [found["own"] for found in seen[case]] == [True] * RANKS
    ((line,), *others) = (found["said"] for found in seen[case])
    assert others == [[], []]
    assert "(PermissionError: [Errno 1] Operation not permitted)" in line
