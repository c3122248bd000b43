"""A decode server with three prefill servers behind sglang-router, over TCP and loopback.

The rows of a prompt are computed by one process and attended by another. One prefill server has another
layout; another one is killed in the middle of traffic.
"""

import pytest
from cluster_questions import PAGE_SIZE, PAGES, PROMPTS, TOKENS, same

pytestmark = pytest.mark.engine("peers", "mooncake", "stock-peers")

#: Of `fp4` on the device: 3 layers of rows of 416 bytes, without the host page's padding and checksum.
FP4_PAGE_BYTES = 3 * PAGE_SIZE * 416
#: The router tries five times.
ROUTER_TRIES, ANSWERED_SECONDS = 5, 10


def of_one_server(record):
    """What one `fp4` server answers to the same prompts, computed."""
    one = record("mooncake")
    return same([*one["first"], one["later"], one["last"]])


def test_answers_are_those_of_one_server(record):
    assert same(record("peers")["first"]) == of_one_server(record)


def test_sglang_moves_whole_pages_of_the_layout(record):
    """The last page, which the prompt fills in part, is moved whole too."""
    assert TOKENS > PAGES * PAGE_SIZE
    moved_bytes = record("peers")["transferred_mb"] * (1 << 20)
    assert moved_bytes == len(PROMPTS) * (PAGES + 1) * FP4_PAGE_BYTES


def test_a_prefill_server_of_another_layout_is_refused_within_seconds(record):
    """SGLang's decode server would end, and the client would wait for the prefill server for 300 s."""
    for refused in record("peers")["refused"]:
        assert refused["status"] == 500
        assert "KV cache layout mismatch: the prefill server at 127.0.0.1:" in refused["body"]
        assert "rows of layout fp8 (" in refused["body"]
        assert "Start both with the same --kv-cache-layout" in refused["body"]
        assert refused["seconds"] < ANSWERED_SECONDS


def test_bf16_works_with_servers_without_a_layout(record):
    """With SGLang's default arguments on both sides: such a server reports `auto` for bfloat16 rows."""
    answers = record("stock-peers")
    for pair in ("bf16", "stock"):
        assert [found["status"] for found in answers[pair]] == [200, 200], answers[pair]
    ids = [[found["answer"]["ids"] for found in answers[pair]] for pair in ("bf16", "stock")]
    assert ids[0] == ids[1]


def test_packed_rows_are_refused_to_servers_without_a_layout(record):
    refused = record("stock-peers")["refused"]
    assert refused["status"] == 500
    said = "stores SGLang's own rows (auto), and this decode server stores rows of layout fp4"
    assert said in refused["body"]
    assert refused["seconds"] < ANSWERED_SECONDS


def test_refused_requests_are_counted(record):
    answers = record("peers")
    assert answers["failures"] == {"peer_mismatch": len(answers["refused"]) * ROUTER_TRIES}


def test_the_decode_server_goes_on_with_prefill_servers_that_fit(record):
    assert same([record("peers")["after_refusal"]]) == of_one_server(record)[:1]


def test_a_killed_prefill_server_costs_no_wrong_answer(record):
    """The router tries again with the other one; a request may fail, and none may be answered wrongly."""
    answers, expected = record("peers"), of_one_server(record)
    assert answers["killed_after"] < len(answers["traffic"])
    for number, found in enumerate(answers["traffic"]):
        if found["status"] == 200:
            assert same([found["answer"]]) == [expected[number % len(PROMPTS)]]
        else:
            assert found["status"] >= 500, found
    assert sum(found["status"] == 200 for found in answers["traffic"]) > answers["killed_after"]


def test_all_is_well_after_the_prefill_server_is_gone(record):
    answers = record("peers")
    assert [found["status"] for found in answers["after_kill"]] == [200] * len(PROMPTS)
    assert same([found["answer"] for found in answers["after_kill"]]) == of_one_server(record)
    # Nothing but the refusals before was counted as a failure.
    assert answers["decode_failures"] == answers["failures"]
