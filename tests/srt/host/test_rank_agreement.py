"""A fault of one rank is a miss on all ranks that schedule the same requests: two processes, two_ranks.py."""

import pytest
import rank_processes
from two_ranks import CASES, LONGER, RANKS, SHARDS, SHORT

LONG, LESS = len(LONGER), len(SHORT)


@pytest.fixture(scope="module")
def seen(fresh, tmp_path_factory):
    """`seen[case]`: the results of both ranks."""
    return rank_processes.run(fresh, "two_ranks.py", RANKS, tmp_path_factory.mktemp("ranks"), CASES)


def agreed(ranks):
    """Lengths that both ranks found and the failures that each counted; no load may be left in the queue."""
    one, other = ({k: v for k, v in rank.items() if k != "failures"} for rank in ranks)
    assert one == other
    assert one["queued"] == 0
    return one["lengths"], *(rank["failures"] for rank in ranks)


def test_what_no_rank_lost_is_loaded_on_both(seen):
    assert agreed(seen["nothing"]) == ([LONG, LESS], {}, {})


#: Lengths after a loss: a miss, the shorter prefix, again only the shorter, a hit after recomputation.
AFTER_A_LOSS = [0, LESS, LESS, LONG]
ITS_OWN_LOSS = {"backup": 1, "backup_lost": 1, "load_pages": 2}


@pytest.mark.parametrize(
    "case", ["rows", "states", "rows-context", "rows-tensor-alone", *(f"rows-{one}" for one in SHARDS)]
)
def test_a_backup_that_one_rank_lost_is_a_miss_on_both(seen, case):
    assert agreed(seen[f"lost-{case}"]) == (AFTER_A_LOSS, {"load_elsewhere": 2}, ITS_OWN_LOSS)


def test_ranks_with_other_requests_are_not_asked(seen):
    """DP attention: ranks load independently."""
    one, other = seen["lost-rows-data"]
    assert (one["lengths"], one["failures"]) == ([LONG, LESS, LONG, LONG], {})
    assert (other["lengths"], other["failures"]) == (AFTER_A_LOSS, ITS_OWN_LOSS)


def test_a_list_that_one_rank_refuses_is_a_miss_on_both(seen):
    assert agreed(seen["free-host-pages"]) == ([0, LONG], {"load_elsewhere": 1}, {"load_pages": 1})


@pytest.mark.parametrize(("which", "kind"), [("rows", "page_read"), ("states", "page_checksum")])
def test_what_one_rank_cannot_read_of_a_store_is_a_miss_on_both(seen, which, kind):
    """SGLang agrees on the fetched pages (`_reduce_prefetch_ack`), if our hooks count right on each rank."""
    assert agreed(seen[f"unreadable-{which}"]) == ([0, LESS, LONG], {}, {kind: 1})


@pytest.mark.parametrize("part", [*SHARDS, "index-keys"])
def test_a_rank_that_cannot_read_its_page_shortens_the_prefix_of_all(seen, part):
    """Of a sparse model a rank's page has its own rows, and the index keys that all ranks have."""
    assert agreed(seen[f"unreadable-{part}"]) == ([LESS, LESS, LONG], {}, {"page_checksum": 1})


def test_pipeline_stages_cannot_agree_and_end(seen):
    """The first stage has already loaded when the second stage finds the loss."""
    first, second = seen["lost-in-the-second-stage"]
    assert first["lengths"] == [LONG]
    (error,) = second["lengths"]
    assert "a host page of the list was lost in its backup" in error
    assert "pipeline stages cannot agree on a miss" in error
    assert second["failures"] == {"backup": 1, "backup_lost": 1, "load_pages": 1}
