"""Servers of two processes on a CPU: SGLang's schedulers, trees, controllers and broadcasts, each twice.

A test package (ranked_models) splits the model's heads over tensor-parallel ranks. Everything between the
processes goes over gloo, SGLang's way on a machine without NCCL.
"""

import os
import re

import pytest
from host_tier_servers import FIRST, PAGE_SIZE
from ranked_servers import ALL_RANKS, UNREADABLE_PAGE
from test_host_tier import LAYERS, LONG, ROW_BYTES, cached, log_probabilities, metric
from tiny_model import KNOWN

from sgl_kvpool.metrics import FAILURES

#: Ranks that share one host tier, as they do unless told otherwise, and ranks with one each, because the
#: system does not let them.
TWO_RANKS, APART = "two-ranks", "two-ranks-apart"
STAGES, REPLICAS = "two-stages", "two-replicas"
#: Pages that the self-check at start moves there and back.
SELF_CHECK_PAGES = {TWO_RANKS: 3, APART: 2}
#: Pages of a rank's own tier, and of one that two ranks share; the last is SGLang's padding.
PAGES_OF_ONE, PAGES_OF_TWO = 513, 1025
#: The server of one process that the answers are compared with.
ALONE = FIRST["fp4"]
#: Tokens of whole pages of a filler that can be found; its last token is always computed.
WHOLE = (400 - 1) // PAGE_SIZE * PAGE_SIZE
MISS = {"device": 0, "host": 0, "storage": 0}


def servers_of(*names, on_request=(), beside=()):
    """A test of each of these servers; those `on_request` are not started unless asked for."""
    skip = pytest.mark.skip(reason=f"one more server of two processes; {ALL_RANKS}=1 starts it")
    marks = {name: pytest.mark.engine(name, *beside) for name in (*names, *on_request)}
    if not os.environ.get(ALL_RANKS):
        marks |= dict.fromkeys(on_request, skip)
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


servers = servers_of(TWO_RANKS, APART, on_request=[STAGES], beside=[ALONE])
both = servers_of(TWO_RANKS, APART)
replicas = servers_of(on_request=[REPLICAS], beside=[ALONE])
updated = servers_of(APART, on_request=[STAGES, REPLICAS])


def ids(answers):
    return [answer["output_ids"] for answer in answers]


@servers
def test_answers_are_those_of_one_process(record, name):
    answers, alone = record(name), record(ALONE)
    assert ids(answers["first"]) == ids(alone["first"])
    assert [answer["text"] for answer in answers["first"]] == KNOWN


@servers
def test_hits_on_device_host_and_store(record, name):
    answers = record(name)
    found, first = answers["host_tier"], answers["first"][3]["output_ids"]
    hits = [found["device_hit"], found["host_hit"], answers["store_hit"]]
    assert [cached(hit) for hit in hits] == [{**MISS, tier: LONG} for tier in MISS]
    assert ids(hits) == [first] * 3
    assert log_probabilities(hits[1]) == log_probabilities(hits[0])
    assert log_probabilities(hits[2]) == log_probabilities(hits[0])


@both
def test_pages_are_stored_once_or_by_each_rank(record, name):
    """Ranks that share a tier have twice the tokens in the same memory, and back up each page once."""
    answers, shared = record(name), name == TWO_RANKS
    assert answers["info"]["tp_size"] == 2
    assert answers["info"]["kv_host_sharing"] == ("node" if shared else "rank")
    assert answers["log"].count("each rank gets a host tier of its own: ") == (not shared)
    for rank in (0, 1):
        lines = [line for line in answers["log"].splitlines() if f" TP{rank}]" in line]
        pages = PAGES_OF_TWO if shared else PAGES_OF_ONE
        assert sum(f"sgl-kvpool: host tier of {pages} pages" in line for line in lines) == 1
        held = f"one copy for the 2 ranks of this machine: {PAGES_OF_TWO * PAGE_SIZE} tokens, 2 times as many"
        assert sum(held in line for line in lines) == shared
        assert sum("KV cache layout fp4: 416 bytes per token" in line for line in lines) == 1
    page_bytes = PAGE_SIZE * LAYERS * ROW_BYTES["fp4"]
    backed_up = metric(answers, "sgl_kvpool_transfer_bytes_total", direction="to_host", engine="cpu")
    copies, checked = 1 if shared else 2, SELF_CHECK_PAGES[name]
    assert backed_up == copies * (answers["stored"] + checked) * page_bytes
    assert metric(answers, "sgl_kvpool_transfer_bytes_total", direction="to_device", engine="cpu") == (
        2 * (LONG // PAGE_SIZE + checked) * page_bytes
    )


@pytest.mark.engine(APART)
def test_a_page_that_one_rank_cannot_read_ends_the_prefix_on_both(record):
    answers = record(APART)
    assert cached(answers["unreadable"]) == {**MISS, "storage": UNREADABLE_PAGE * PAGE_SIZE}
    assert answers["unreadable"]["output_ids"] == answers["host_tier"]["fillers"][0]["output_ids"]


@pytest.mark.engine(TWO_RANKS)
def test_the_first_rank_reads_the_store_for_both(record):
    """The second one, which could not read one of the pages, does not try to."""
    unreadable = record(TWO_RANKS)["unreadable"]
    assert cached(unreadable) == {**MISS, "storage": WHOLE}
    assert unreadable["output_ids"] == record(TWO_RANKS)["host_tier"]["fillers"][0]["output_ids"]


@both
def test_a_backup_that_one_rank_lost_is_a_miss_on_both(record, name):
    """Without an agreement, the ranks compute batches of other lengths, and the server ends or hangs."""
    answers = record(name)
    _, device_hit, pushed_out = answers["lost"]
    assert cached(device_hit)["device"] == LONG
    assert cached(pushed_out) == MISS
    assert len({tuple(one) for one in ids(answers["lost"])}) == 1
    # What both have is loaded by both, before and after.
    assert [sum(cached(answer).values()) for answer in answers["between"]] == [WHOLE] * 4
    assert ids(answers["between"]) == ids(answers["host_tier"]["fillers"])
    assert ids(answers["after"]) == ids(answers["first"])
    after = {"host_tier": {"metrics": answers["metrics_after"]}}
    counts = {kind: metric(after, "sgl_kvpool_failures_total", kind=kind) for kind in
              ("backup_lost", "load_pages", "load_elsewhere", "page_read")}  # fmt: skip
    assert counts.pop("backup_lost") > 0
    if name == TWO_RANKS:  # each sees what the other one has lost
        assert counts == {"load_pages": 2, "load_elsewhere": 0, "page_read": 0}
        costs = ("was lost in its backup", "was lost in its backup")
    else:
        assert counts == {"load_pages": 1, "load_elsewhere": 1, "page_read": 1}
        costs = ("is a miss on another rank", "was lost in its backup")
    for rank, cost in enumerate(costs):
        assert any(f" TP{rank}]" in line and cost in line for line in answers["log"].splitlines())


@pytest.mark.engine(TWO_RANKS)
def test_a_rank_that_is_slow_in_storing_costs_nothing_but_time(record):
    """The tree keeps a prefix until every rank has stored its pages."""
    answers = record(TWO_RANKS)
    assert [sum(cached(answer).values()) for answer in answers["slow"]] == [WHOLE] * 8
    assert ids(answers["slow"]) == ids(answers["host_tier"]["fillers"]) * 2


@pytest.mark.engine(TWO_RANKS)
def test_ranks_that_give_out_different_pages_end_their_tier_and_no_answer_is_wrong(record):
    answers = record(TWO_RANKS)
    assert answers["moved"][0]["output_ids"] == answers["lost"][0]["output_ids"]
    assert ids(answers["moved"][1:]) == ids(answers["host_tier"]["fillers"]) * 2
    # Four prompts of 400 tokens do not fit into the pool of 1024 together; nothing else has them any more.
    assert {cached(answer)["host"] for answer in answers["moved"]} == {0}
    assert ids(answers["at_last"]) == ids(answers["first"])
    before, after = ({"host_tier": {"metrics": answers[name]}} for name in ("metrics_after", "last_metrics"))
    assert metric(after, "sgl_kvpool_failures_total", kind="tier_disagreement") == 2
    # Its line is left out within a minute of that on the lost backup.
    bad = [metric(one, "sgl_kvpool_failures_total", kind="load_pages") for one in (before, after)]
    assert bad[0] < bad[1]
    lines = [line for line in answers["log"].splitlines() if FAILURES["tier_disagreement"].message in line]
    assert len(lines) == 2
    assert all("rank 0: alloc of" in line and "rank 1: alloc of 16 slots" in line for line in lines)


@pytest.mark.engine(TWO_RANKS)
def test_both_ranks_map_one_piece_of_memory(record):
    """It holds the pages of the shared tier and, behind them, for each page a flag of each rank."""
    answers = record(TWO_RANKS)
    (first, inode, mapped_bytes), (second, other_inode, other_bytes) = answers["mappings"]
    assert first != second
    assert (inode, mapped_bytes) == (other_inode, other_bytes)
    (stride,) = {int(n) for n in re.findall(r"(\d+) bytes from page to page, one copy", answers["log"])}
    assert 0 <= mapped_bytes - PAGES_OF_TWO * (stride + 2) < 2 * 4096


@pytest.mark.engine(TWO_RANKS)
def test_no_process_is_left_after_a_rank_is_killed(record):
    """The kernel frees the memory with its last mapping (test_shared_segment.py)."""
    assert record(TWO_RANKS)["left"] == []


@both
def test_sglang_saw_no_rank_do_something_else(record, name):
    """Its checker compares matches, inserts, evictions and loads; it would have ended the server."""
    log = record(name)["log"]
    assert "Rank consensus checker is enabled" in log
    assert "Found rank divergence" not in log


@replicas
def test_replicas_answer_and_find_pages_in_the_store(record, name):
    """Two schedulers with a pool and a host tier of their own; both prefill."""
    answers, alone = record(name), record(ALONE)
    assert answers["info"]["kv_host_sharing"] == "rank"
    assert ids(answers["first"]) == ids(alone["first"])
    assert cached(answers["store_hit"]) == {**MISS, "storage": LONG}
    assert answers["store_hit"]["output_ids"] == answers["first"][3]["output_ids"]
    for replica in (0, 1):
        lines = [line for line in answers["log"].splitlines() if f" DP{replica}" in line]
        assert sum("sgl-kvpool: host tier of 513 pages" in line for line in lines) == 1
        assert any("Prefill batch" in line for line in lines)


@both
def test_ranks_check_themselves_before_they_serve(record, name):
    """Each rank of a shared tier stores only some of its pages, so these ranks check the tier together."""
    lines = [line for line in record(name)["log"].splitlines() if "self-check" in line]
    assert len(lines) == 2
    assert all("self-check passed in " in line for line in lines)
    ending = f", {SELF_CHECK_PAGES[name]} pages to the host tier and back"
    assert all(line.endswith(ending) for line in lines)


@updated
def test_ranks_name_updated_weights_alike(record, name):
    """The store gives what was stored after the update, for which all ranks have to know the page's key."""
    answers = record(name)
    assert answers["update"]["success"]
    computed, fetched = answers["updated"]
    assert cached(computed) == MISS
    assert cached(fetched) == {**MISS, "storage": LONG}
    assert ids([fetched]) == ids([computed]) == ids(answers["first"][3:4])
