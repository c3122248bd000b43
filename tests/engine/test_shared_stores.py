"""Mooncake's store and NIXL's files under real servers: a fresh server finds what another one stored.

Both move the host tier's memory themselves, so a page is verified after it was read. The model has 3 layers;
its `fp4` pages of 64 tokens are 81920 bytes with padding and checksum.
"""

import pytest
from cluster_questions import CACHED, PAGE_SIZE, PAGES, same
from store_servers import BAD_PAGE, FP4_PAGE_BYTES

#: Tokens before the damaged page.
BEFORE_BAD = BAD_PAGE * PAGE_SIZE

mooncake = pytest.mark.engine("mooncake")
nixl = pytest.mark.parametrize(
    ("name", "direct_io"),
    [
        pytest.param("nixl", True, marks=pytest.mark.engine("nixl"), id="direct-io"),
        pytest.param("nixl-buffered", False, marks=pytest.mark.engine("nixl-buffered"), id="buffered"),
    ],
)


def from_store(answer):
    """Tokens that came from the store; none of the prefix may have come from elsewhere."""
    details = answer["details"] or {"device": 0, "host": 0, "storage": 0}
    assert details["device"] == details["host"] == 0
    return details["storage"]


@mooncake
def test_mooncake_stores_every_page_once(record):
    answers = record("mooncake")
    assert answers["info"]["kv_cache_layout"] == "fp4"
    assert len(answers["keys"]) == 4 * PAGES
    # SGLang's client stores one entry more, of a few bytes.
    assert 0 <= answers["stored_bytes"] - 4 * PAGES * FP4_PAGE_BYTES < 2 * FP4_PAGE_BYTES
    assert answers["first_failures"] == {}


@mooncake
def test_a_fresh_server_gets_mooncakes_pages_and_gives_the_same_answers(record):
    answers = record("mooncake")
    assert same(answers["second"]) == same(answers["first"])
    assert [from_store(answers["second"][place]) for place in (0, 2)] == [CACHED, CACHED]
    assert answers["before_damage"] == {}


@mooncake
def test_a_damaged_page_of_mooncake_ends_the_prefix(record):
    answers = record("mooncake")
    assert from_store(answers["second"][1]) == BEFORE_BAD
    assert answers["damaged"] == {"page_checksum": 1}


@mooncake
def test_a_killed_store_service_is_a_miss(record):
    """The master still lists the pages; what cannot be read is computed and counted."""
    answers = record("mooncake")
    assert from_store(answers["second"][3]) == 0
    # Pages that are computed are stored in the background, which fails now or later.
    assert answers["killed"] | {"page_write": 0} == {"page_checksum": 1, "page_read": 1, "page_write": 0}


@mooncake
def test_the_server_goes_on_without_service_and_master(record):
    answers = record("mooncake")
    assert [answers[name]["cached"] for name in ("later", "last")] == [0, 0]
    assert answers["later_again"]["details"]["device"] == CACHED
    assert same([answers["later_again"]]) == same([answers["later"]])
    assert answers["after"]["details"]["host"] == CACHED
    assert same([answers["after"]]) == same(answers["first"][:1])


@nixl
def test_nixl_writes_whole_pages(record, name, direct_io):
    """With O_DIRECT, NIXL's default, and without: no page is lost, no empty file is left."""
    answers = record(name)
    assert (answers["count"], answers["sizes"]) == (3 * PAGES, [FP4_PAGE_BYTES])
    assert answers["first_failures"] == {}
    assert "zero_copy=True" in answers["first_log"]
    assert ("use_direct_io" in answers["first_arguments"]) == (not direct_io)


@nixl
def test_a_fresh_server_reads_nixls_files(record, name, direct_io):
    answers = record(name)
    assert same(answers["second"]) == same(answers["first"])
    assert from_store(answers["second"][0]) == CACHED
    assert answers["failures"][0] == {}


@nixl
def test_damaged_files_end_the_prefix(record, name, direct_io):
    """One is cut and filled up with zeros, the other is cut short."""
    answers = record(name)
    assert [from_store(answers["second"][place]) for place in (1, 2)] == [BEFORE_BAD, BEFORE_BAD]
    assert answers["failures"][1] == {"page_checksum": 1}
    assert answers["failures"][2] == {"page_checksum": 1, "page_read": 1}
