"""The self-check of three ranks that share a host tier: see self_check_ranks.py."""

import pytest
import rank_processes
from self_check_ranks import CASES
from sharing_ranks import RANKS


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """`seen[case]`: the results of the ranks, in order."""
    return rank_processes.run("self_check_ranks.py", RANKS, tmp_path_factory.mktemp("self-check"), CASES)


@pytest.mark.parametrize("case", ["fp4", "narrower", "pages-of-1"])
def test_all_ranks_pass_and_leave_the_tier_as_it_was(seen, case):
    """The check uses one page more than there are ranks, so that each rank stores a page."""
    assert [rank["found"] for rank in seen[case]] == [f"{RANKS + 1} pages to the host tier and back"] * RANKS
    assert all(rank["same"] for rank in seen[case])
    assert all(rank["failures"] == {} for rank in seen[case])
    assert len({rank["digest"] for rank in seen[case]}) == 1  # all allocators did the same operations


@pytest.mark.parametrize("broken", range(RANKS))
def test_a_page_that_one_rank_stored_wrongly_is_seen_by_all(seen, broken):
    for rank in seen[f"stored-{broken}"]:
        assert rank["found"].startswith(
            "rows of fp4 in the host tier: byte 3 of layer 0 of 3, token 0 of host page "
        )
        assert rank["same"]


@pytest.mark.parametrize("broken", range(RANKS))
def test_a_load_that_fails_on_one_rank_ends_the_check_on_all(seen, broken):
    for number, rank in enumerate(seen[f"loaded-{broken}"]):
        if number == broken:
            assert rank["found"].startswith(
                "rows of fp4 loaded from the host tier: byte 0 of layer 0, token 0"
            )
        else:
            assert rank["found"] == "the host tier: another rank found a difference, see its log"
        assert rank["same"]
