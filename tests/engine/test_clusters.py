"""Shared stores, prefill and decode servers, and routers, in combinations that docs/transfer.md lists.

`make test-cluster` runs them; `make test` has test_shared_stores.py and test_prefill_decode.py.
"""

import signal

import pytest
from cluster_questions import CACHED, LAYERS, PAGE_SIZE, PAGES, PROMPTS, same
from store_servers import FP4_PAGE_BYTES

from sgl_kvpool.layout import MLAKVCacheLayout

pytestmark = pytest.mark.cluster

shared = pytest.mark.engine("cluster-shared")
hybrid = pytest.mark.engine("cluster-hybrid")
routed = pytest.mark.engine("cluster-routed")
demo = pytest.mark.engine("cluster-demo")


def found(answer):
    """Tokens of the prompt that were found in a cache, by place."""
    details = answer["details"] or {}
    return {place: details[place] for place in ("device", "host", "storage") if details.get(place)}


# -------------------------------------------------------------------- one store


@shared
def test_another_layout_misses_and_stores_its_own_pages(record):
    answers = record("cluster-shared")
    assert [answer["cached"] for answer in answers["other"]] == [0, 0]
    assert len(answers["other_keys"]) == 2 * PAGES
    assert all("-fp8_block_scale-" in key for key in answers["other_keys"])
    assert all("-fp4-" in key for key in answers["first_keys"])
    assert [found(answer) for answer in answers["other_again"]] == [{"device": CACHED}] * 2
    assert same(answers["other_again"]) == same(answers["other"])
    assert answers["other_failures"] == {}


@shared
def test_two_ranks_read_what_one_rank_stored(record):
    answers = record("cluster-shared")
    assert [found(answer) for answer in answers["ranks"]] == [{"storage": CACHED}] * 2
    assert [answer["cached"] for answer in answers["ranks_computed"]] == [0, 0]
    for read, computed in zip(answers["ranks"], answers["ranks_computed"], strict=True):
        assert read["ids"] == computed["ids"]
        # A prefill of 45 tokens rounds differently from one of 749: 0.004 at one of sixteen tokens.
        assert read["logprobs"] == pytest.approx(computed["logprobs"], abs=0.02)
    assert answers["ranks_failures"] == {}


@shared
def test_a_narrower_host_layout_is_stored_and_found(record):
    answers = record("cluster-shared")
    assert len(answers["narrow_keys"]) == 4 * PAGES
    assert all("-bf16-" in key and "-host_fp4-" in key for key in answers["narrow_keys"])
    assert found(answers["narrow_host"]) == {"host": CACHED}
    assert found(answers["narrow_store"]) == {"storage": CACHED}
    assert same([answers["narrow_store"]]) == same([answers["narrow_host"]])
    assert answers["narrow_failures"] == {}


# -------------------------------------------------------------------- prefill and decode


@pytest.mark.engine("cluster-nixl", "cluster-demo")
def test_nixl_and_ucx_move_the_same_pages(record):
    answers, (one,) = record("cluster-nixl"), of_layout(record, "fp4")
    assert same(answers["peers"])[:4] == same(one["answers"])[:4]
    assert answers["transferred_mb"] * (1 << 20) == len(PROMPTS) * (PAGES + 1) * LAYERS * PAGE_SIZE * 416
    assert answers["failures"] == [{}, {}]


@hybrid
def test_states_go_with_the_rows(record):
    answers = record("cluster-hybrid")
    assert same(answers["peers"]) == same(answers["one"])
    # The last prompt is a repeated one: rows and state of its beginning are the prefill server's.
    peers, one = ([answer["cached"] for answer in answers[name]] for name in ("peers", "one"))
    assert peers == one
    assert peers[-1] > 0
    assert answers["failures"] == [{}, {}]


# -------------------------------------------------------------------- the router


@routed
def test_the_router_sends_a_prompt_where_its_prefix_is(record):
    answers = record("cluster-routed")
    assert [found(answer) for answer in answers["same"][1:]] == [{"device": CACHED}] * 3
    assert same(answers["same"]) == same(answers["same"][:1]) * 4


@routed
def test_each_server_finds_in_the_store_what_the_other_one_stored(record):
    answers = record("cluster-routed")
    first, second, third = answers["right"]
    everyone = [*answers["from_left"], first]
    assert same(everyone) == same(answers["left"]) * 3
    assert all(answer["cached"] == CACHED for answer in everyone)
    # At least one of the three is the first request with this prompt on the right server.
    assert {"storage": CACHED} in map(found, everyone)
    # The router had sent the second prompt to one of the two servers.
    assert found(second) in ({"device": CACHED}, {"storage": CACHED})
    assert same([second]) == same(answers["same"][:1])
    assert found(third) == {}
    assert found(answers["left_again"]) == {"storage": CACHED}
    assert same([answers["left_again"]]) == same([third])
    assert answers["failures"] == [{}, {}]


# -------------------------------------------------------------------- sgl-kvpool demo --cluster


def of_layout(record, layout):
    return [result for result in record("cluster-demo")["results"] if result["layout"] == layout]


@demo
@pytest.mark.parametrize("layout", MLAKVCacheLayout)
def test_the_demo_shows_every_place_and_the_same_answers(record, layout):
    """Prefill and decode servers over TCP, with a host tier and Mooncake's store on the prefill server."""
    (result,) = of_layout(record, layout)
    assert result["found"] == {"device": CACHED, "host": CACHED, "storage": CACHED}
    assert result["same_answers"]
    rows_bytes = LAYERS * PAGE_SIZE * layout.row_format(512, 64).row_bytes
    assert result["transferred_page_bytes"] == rows_bytes
    assert 16 <= result["stored_page_bytes"] - rows_bytes <= 4096
    if layout == "fp4":
        assert result["stored_page_bytes"] == FP4_PAGE_BYTES


@demo
def test_the_demo_prints_a_line_per_layout(record):
    lines = record("cluster-demo")["printed"].splitlines()
    for layout in MLAKVCacheLayout:
        (line,) = [line for line in lines if line.startswith(f"{layout} ")]
        assert line.endswith("the same")


@pytest.mark.engine("cluster-interrupted")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupted_demo_leaves_nothing_behind(record, name):
    left = record("cluster-interrupted")[name]
    assert left["children"] >= 5  # a store's two, a router, servers with their schedulers
    assert left["left"] == []
    assert left["status"] == 128 + getattr(signal, name)
    assert "Traceback" not in left["printed"]
