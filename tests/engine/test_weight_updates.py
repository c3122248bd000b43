"""Servers whose weights change while they serve: no page of other weights comes from the store."""

import re

import pytest
from cluster_questions import CACHED, PAGES, same

pytestmark = pytest.mark.engine("weights")

#: Steps after a flush: nothing of earlier weights is found, what was computed is stored and found again.
FLUSHED = ["start", "new weights", "v2", "old weights", "paused", "session"]
#: Steps of weights that were not flushed: nothing is stored.
UNSETTLED = ["not flushed", "refused", "failed", "in a session", "version alone"]


@pytest.fixture
def answers(record):
    return record("weights")


def digits(files):
    """The digits that name the weights of some files; a file without a name counts by its hash."""
    return {file.partition("_")[0][-16:] for file in files}


@pytest.mark.parametrize("name", FLUSHED)
def test_pages_of_earlier_weights_are_misses_and_own_pages_are_hits(answers, name):
    step = answers["updated"][name]
    assert step["first"]["cached"] == 0
    assert len(step["stored"]) == PAGES
    assert step["again"]["details"]["storage"] == CACHED
    assert same([step["again"]]) == same([step["first"]])


def test_the_text_is_that_of_the_weights(answers):
    """The old weights give their first answer again, the new ones another, in whatever way they came."""
    steps = answers["updated"]
    old, new = same([steps["start"]["first"]]), same([steps["new weights"]["first"]])
    assert old != new
    assert same([steps["v2"]["first"]]) == new
    assert same([steps["old weights"]["first"]]) == old
    (other,) = same([steps["not flushed"]["first"]])
    # The replica computed this prompt alone, from its start on.
    assert same([answers["replica"]["alone"]["first"]]) == [other]
    assert same([steps["paused"]["first"]]) == [other]


@pytest.mark.parametrize("name", UNSETTLED)
def test_nothing_is_stored_or_fetched_before_a_flush(answers, name):
    steps = answers["updated"]
    assert steps[name]["stored"] == []
    assert (steps[name]["first"]["details"] or {"storage": 0})["storage"] == 0
    # The step flushes the device in between.
    assert steps[name]["again"]["cached"] == 0


def test_what_was_not_stored_is_counted(answers):
    lost = [step["lost"] for step in answers["updated"].values()]
    assert lost == sorted(lost)
    assert lost[0] == 0
    assert answers["updated"]["not flushed"]["lost"] == PAGES
    assert all(step["failures"] == {} for step in answers["updated"].values())
    assert answers["log"].count("and the caches were not flushed since; pages are not stored (") == 1


def test_names_of_files(answers):
    """Without a version and an update SGLang's hashes, then one name for all pages of some weights."""
    steps = answers["updated"]
    assert len(digits(steps["start"]["stored"])) == PAGES
    named = [digits(steps[name]["stored"]) for name in FLUSHED[1:]]
    assert all(len(one) == 1 for one in named)
    assert len(set.union(*named)) == len(named)
    assert re.search(rf"keys in stores end with {next(iter(named[0]))} now", answers["log"])


def test_what_sglang_answered(answers):
    assert answers["update"]["success"]
    assert answers["paused"]["success"]
    assert not answers["refused"]["success"]
    assert "the cache was not flushed" in answers["refused"]["message"]
    assert not answers["failed"]["success"]
    assert [one["success"] for one in answers["session"]] == [True] * 4
    assert answers["version"]["success"]


def test_a_replica_that_starts_with_the_version_shares_pages(answers):
    updated, replica = answers["updated"]["v2"], answers["replica"]["v2"]
    assert replica["first"]["details"]["storage"] == CACHED
    assert same([replica["first"]]) == same([updated["first"]])
