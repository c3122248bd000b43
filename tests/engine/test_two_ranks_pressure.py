"""Two ranks that share a host tier over Mooncake's store, with clients that leave and too little memory."""

import pytest
from ranked_pressure import PAGE_SIZE, PROMPT_TOKENS, SECONDS

pytestmark = pytest.mark.engine("two-ranks-pressure")


@pytest.fixture
def answers(record):
    return record("two-ranks-pressure")


def test_no_answer_is_wrong(answers):
    assert answers["info"]["kv_host_sharing"] == "node"
    assert answers["errors"] == []
    assert answers["wrong"] == []
    # A machine that is busy with other tests may take several seconds for an answer.
    assert answers["answers"] > SECONDS // 6
    assert answers["left"] > 0


def test_rows_are_the_same_bytes_on_both_ranks(answers):
    """Rows of bf16 are the values themselves; rows of other layouts are encoded from these values."""
    first, second = answers["rows"]
    assert len(first) > len(PROMPT_TOKENS)
    assert first == second


def test_prefixes_came_from_everywhere(answers):
    assert all(answers["tiers"][tier] > 0 for tier in ("device", "host", "storage"))


def test_nothing_failed_and_the_tier_goes_on(answers):
    assert answers["failures"] == {}
    assert "allocated different pages" not in answers["log"]
    assert "Found rank divergence" not in answers["log"]


@pytest.mark.parametrize("when", ["stored", "stored_again"])
def test_what_was_flushed_comes_from_the_store(answers, when):
    """Also after the store was detached and attached at run time.

    Pages come through the host tier: beside the first two prompts it has room for 176 tokens of the third.
    """
    assert answers["keys"] > 0
    whole = [(tokens - 1) // PAGE_SIZE * PAGE_SIZE for tokens in PROMPT_TOKENS[:2]]
    cached = [[found["cached"][tier] for tier in ("device", "host", "storage")] for found in answers[when]]
    assert cached == [[0, 0, tokens] for tokens in (*whole, 176)]
    assert [found["ids"] for found in answers[when]] == [cold["ids"] for cold in answers["cold"][:3]]


def test_requests_to_the_store_at_run_time(answers):
    assert answers["detached"][0] == answers["attached"][0] == 200
    for status, text in answers["write_back"]:
        assert status == 400
        assert "--hicache-write-policy write_back does not work with --kv-host-sharing node" in text


def test_killed_ranks_leave_no_memory(answers):
    """The kernel frees an anonymous file with its last mapping (test_shared_segment.py)."""
    assert len(answers["mappings"]) == 2
    assert answers["left_processes"] == answers["still_mapped_by"] == []
