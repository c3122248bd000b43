"""One minute of `scripts.soak`, and that it reports what is broken on purpose."""

import pytest


@pytest.fixture
def leg(record):
    (leg,) = record("soak")["legs"]
    return leg


@pytest.mark.engine("soak")
def test_nothing_leaks_and_every_output_is_that_of_a_cold_run(record, leg):
    report = record("soak")
    assert leg["violations"] == []
    assert (report["status"], report["violations"]) == (0, 0), report["printed"]
    outputs = leg["outputs"]
    assert outputs["mismatches"] == {"count": 0, "first": []}
    assert outputs["same_outputs"] + outputs["near_ties"] == outputs["outputs"]
    assert leg["transfers_compared"]["wrong_pages"] == 0


@pytest.mark.engine("soak")
def test_the_minute_was_one_of_pressure(leg):
    """Without this, the test above would also pass with a server that got no requests."""
    assert leg["traffic_seconds"] >= 59
    assert leg["too_few"] == []
    assert leg["answers_complete"] >= 20
    assert leg["answers_given_up"] >= 2
    assert leg["outputs"]["outputs"] >= 20
    assert leg["server"]["prompt_tokens"] > 6 * leg["server"]["max_total_num_tokens"]
    assert all(leg["found_tokens"][tier] > 0 for tier in ("device", "host", "storage"))
    counts = leg["server_counts"]
    assert counts["evicted_tokens"] > leg["server"]["max_total_num_tokens"]
    assert min(counts["backed_up_tokens"], counts["loaded_tokens"], counts["fetched_tokens"]) > 0
    page_tokens = leg["server"]["page_size"]
    assert leg["transfers_compared"]["backed_up_pages"] * page_tokens == counts["backed_up_tokens"]
    assert leg["transfers_compared"]["loaded_pages"] * page_tokens == counts["loaded_tokens"]
    assert leg["censuses"] >= 5
    assert leg["pages_in_both_tiers_compared"] > 0


@pytest.mark.engine("soak-broken")
@pytest.mark.parametrize(
    "found", ["loaded wrongly", "pages leaked", "differ from a cold run", "differ between"]
)
def test_what_is_broken_is_reported(record, found):
    """Loads with the pages in the wrong order, and a host page that is forgotten when it is freed."""
    report = record("soak-broken")
    (leg,) = report["legs"]
    assert report["status"] == 1
    assert report["violations"] == len(leg["violations"])
    assert any(found in violation for violation in leg["violations"]), leg["violations"]
    assert report["broken_on_purpose"] == ["load-order", "host-leak"]
