"""Hybrids of MLA and linear attention served on a GPU in every layout: chunks, graphs, hits with states, MTP.

A prefix can be reused up to a token for which the tree has rows and a state: the end of each chunk of a
prefill, and the last multiple of 64 tokens of a prompt. A server start takes a minute or more: each
configuration is started once and asked everything. `tests/sglang_plugin/test_regression_servers.py` resolves
all their arguments on a CPU.
"""

import pytest
import random_hybrid
from test_server_gpu import (
    EAGER,
    GREEDY,
    KVPOOL,
    LAYOUT,
    LAYOUTS,
    MARGIN,
    MTP,
    SERVED,
    TOP,
    accepted,
    answers_of,
    distance,
    generated,
    partings,
    tokens,
)  # fmt: skip

from scripts.servers.limits import LIMITS
from sgl_kvpool.demo.server import Server, free_port

pytestmark = SERVED

STOCK = ("--attention-backend", "triton")
#: The device pool holds about two prompts, so that the third pushes the first one out. A state is backed up
#: with the rows it belongs to, as soon as those are in the tree.
HOST_TIER = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "8", "--hicache-write-policy", "write_through"),
    *("--page-size", "64", "--max-total-tokens", "2048", "--enable-cache-report"),
)
#: Slots for states of linear attention, for which SGLang would take half of the pool's memory; the host gets
#: as many times that as its ratio says. A running request has five.
STATES = 64
#: Tokens of a chunk of a prefill; a state is kept at its end.
CHUNK = 256

#: What is served of both models.
_SERVED = {
    # The peer: SGLang without us, whose triton backend reads BF16 rows.
    "stock": STOCK,
    **{layout: (LAYOUT, layout, *KVPOOL) for layout in LAYOUTS},
    "fp4-eager": (LAYOUT, "fp4", *KVPOOL, *EAGER),
    "fp4-host": (LAYOUT, "fp4", *KVPOOL, *HOST_TIER),
    "bf16-host": (LAYOUT, "bf16", *KVPOOL, *HOST_TIER),
    "bf16-host-fp4": (LAYOUT, "bf16", *KVPOOL, "--kv-host-layout", "fp4", *HOST_TIER),
}
#: name: (model, arguments)
SERVERS = {
    **{f"kimi-{name}": ("kimi_linear", arguments) for name, arguments in _SERVED.items()},
    **{f"lightning-{name}": ("lightning", arguments) for name, arguments in _SERVED.items()},
    # One token per page, requests one step after the other, and states at the ends of chunks only.
    "kimi-fp4-no_buffer": (
        "kimi_linear",
        (LAYOUT, "fp4", *KVPOOL, "--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
    ),
    "lightning-stock-mtp": ("lightning", (*STOCK, *MTP)),
    "lightning-bf16-mtp": ("lightning", (LAYOUT, "bf16", *KVPOOL, *MTP)),
    "lightning-fp4-mtp": ("lightning", (LAYOUT, "fp4", *KVPOOL, *MTP)),
}
MODELS = ("kimi", "lightning")
#: Each server against BF16 rows: largest mean distance of log-probabilities.
NEAR = {layout: one.near for layout, one in LIMITS["kimi"].items()}

SHARED = tokens(1, 600)
#: Unequal lengths; the third begins like the second, up to the end of a chunk (a prefix hit).
PROMPTS = [tokens(0, 5), SHARED, SHARED[: 2 * CHUNK] + tokens(2, 77), tokens(3, 900), tokens(4, 40)]
LONGEST = PROMPTS[3]


def command(name, model, port=30000):
    """Arguments of the server of that name."""
    _, arguments = SERVERS[name]
    return [
        *("--model-path", str(model), "--port", str(port), "--skip-tokenizer-init"),
        *("--context-length", "4096", "--mem-fraction-static", "0.3", "--chunked-prefill-size", str(CHUNK)),
        *("--cuda-graph-max-bs-decode", "8", "--random-seed", "0", "--max-running-requests", "8"),
        *("--max-mamba-cache-size", str(STATES)),
        *(() if "--max-total-tokens" in arguments else ("--max-total-tokens", "16384")),
        *arguments,
    ]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return answers_of(tmp_path_factory, SERVERS, random_hybrid.write, ask)


def ask(name, model, log):
    # The log-probabilities of every prompt then depend on stored rows.
    environment = {} if "stock" in name else {"KVPOOL_PREFILL_READS_ROWS": "1"}
    # Answers with drafts are compared without the log-probabilities of other tokens.
    top = {} if "mtp" in name else {"top_logprobs_num": TOP}
    with Server(command(name, model, free_port()), log, environment, wait_seconds=1200) as server:

        def generate(ids, **more):
            return server.generate(input_ids=ids, sampling_params=GREEDY, return_logprob=True, **top, **more)

        said = {
            "info": server.info(),
            "one": [generate(ids) for ids in PROMPTS],
            "again": [generate(ids) for ids in PROMPTS],
            "batch": generate(PROMPTS),
            "prompts": [generate(ids, logprob_start_len=0) for ids in PROMPTS],
        }
        if "host" in name:
            # After a flush, the device hit reads rows and a state that were computed, not loaded.
            server.get("/flush_cache?timeout=30")
            said["first"], said["device_hit"] = generate(LONGEST), generate(LONGEST)
            for seed in (10, 11, 12):
                generate(tokens(seed, 900))
            said["host_hit"], said["device_hit_again"] = generate(LONGEST), generate(LONGEST)
    said["log"] = log.read_text(errors="replace")
    return said


def cached(answer):
    return answer["meta_info"]["cached_tokens"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probabilities_are_close_to_bf16(model, layout, answers):
    found = distance(answers(f"{model}-{layout}"), answers(f"{model}-stock"))
    assert found < NEAR[layout], found
    if layout == "fp4":
        assert found > NEAR["bf16"], f"{found}: another layout was served, or rows were not read"


@pytest.mark.parametrize("model", MODELS)
def test_the_layout_is_what_the_server_says(model, answers):
    found = answers(f"{model}-fp4")
    assert found["info"]["kv_cache_layout"] == "fp4"
    # Of six layers, those with MLA.
    assert "416 bytes per token and layer, 2 layers" in found["log"]


@pytest.mark.parametrize(
    "name",
    [*(f"{model}-{layout}" for model in MODELS for layout in ("stock", *LAYOUTS)), "kimi-fp4-no_buffer"],
)
def test_prefix_hits_say_what_the_first_pass_said(name, answers):
    """One request, then a batch, reuses rows and states of the tree."""
    found = answers(name)
    assert cached(found["one"][2]) == 2 * CHUNK
    assert [cached(answer) for answer in found["one"][:2]] == [0, 0]
    # At least to the end of the last whole chunk.
    assert all(
        cached(answer) >= len(ids) // CHUNK * CHUNK
        for ids, answer in zip(PROMPTS, found["again"], strict=True)
    )
    again = partings(found["one"], found["again"])
    assert max(again) < MARGIN, again
    batch = partings(found["one"], found["batch"])
    assert max(batch) < MARGIN, batch


@pytest.mark.parametrize("model", MODELS)
def test_graphs_and_eager_say_the_same(model, answers):
    graph, eager = answers(f"{model}-fp4"), answers(f"{model}-fp4-eager")
    assert max(partings(graph["one"], eager["one"])) < MARGIN
    assert distance(graph, eager) < NEAR["bf16"]
    # SGLang says in every line on decoding whether a graph was replayed.
    assert "cuda graph: True" in graph["log"]
    assert "cuda graph: True" not in eager["log"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("served", ["fp4-host", "bf16-host", "bf16-host-fp4"])
def test_host_hits(model, served, answers):
    """Rows and the state come back from the host: the same bytes, or narrower rows.

    A device hit after the host hit would read the loaded state, right or wrong. The device hit before it
    reads neither that state nor narrower rows.
    """
    found = answers(f"{model}-{served}")
    # The last whole page: the last token is always computed.
    names = ("device_hit", "host_hit", "device_hit_again")
    assert [cached(found[name]) for name in names] == [len(LONGEST) // 64 * 64] * 3
    details = {name: found[name]["meta_info"]["cached_tokens_details"] for name in names}
    assert details["device_hit"]["host"] == details["device_hit_again"]["host"] == 0
    assert details["host_hit"]["host"] > 0
    assert generated(found["host_hit"]) == generated(found["device_hit_again"])
    if served.endswith("-fp4"):
        assert max(partings([found["device_hit"]], [found["host_hit"]])) < MARGIN
    else:
        assert generated(found["host_hit"]) == generated(found["device_hit"])
    assert max(partings([found["first"]], [found["device_hit"]])) < MARGIN


@pytest.mark.parametrize("layout", ["bf16", "fp4"])
def test_mtp_says_what_decoding_one_by_one_says(layout, answers):
    """The draft has a layer with MLA, in a pool of its own."""
    drafted, plain = answers(f"lightning-{layout}-mtp"), answers(f"lightning-{layout}")
    assert max(partings(plain["one"], drafted["one"])) < MARGIN
    assert distance(drafted, plain) < NEAR["bf16"]


@pytest.mark.parametrize("layout", ["bf16", "fp4"])
def test_drafts_are_as_good_as_sglangs(layout, answers):
    """Verification corrects a draft's tokens, so wrong rows of a draft only show in how many are accepted."""
    names = (f"lightning-{layout}-mtp", "lightning-stock-mtp")
    ours, stock = (sum(accepted(answers(name))) / len(PROMPTS) for name in names)
    assert abs(ours - stock) < 0.1 * stock, (ours, stock)
