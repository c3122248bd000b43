"""SGLang's own DeepSeek classes served on a GPU in every layout: graphs, chunks, prefix hits, MTP, host hits.

A server start takes a minute or more: each configuration is started once and asked everything.
"""

import random

import pytest
import random_deepseek
import torch
from codec_oracle import LAYOUTS

from scripts.servers.limits import LIMITS
from sgl_kvpool.demo.server import Server, free_port

#: Marks of tests of servers.
pytestmark = SERVED = [
    pytest.mark.gpu,
    pytest.mark.server,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # The first servers of a machine compile, and may take 1200 s to start.
    pytest.mark.timeout(1800),
]

GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
LAYOUT = "--kv-cache-layout"
KVPOOL = ("--attention-backend", "kvpool_mla")
MTP = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)
#: The device pool holds about two prompts, so that the third pushes the first one out.
HOST_TIER = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "8", "--page-size", "64"),
    *("--max-total-tokens", "2048", "--enable-cache-report"),
)
EAGER = ("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled")

#: name: (model, arguments)
SERVERS = {
    # The peer: SGLang without us, whose triton backend reads BF16 rows.
    "stock": ("deepseek_v3", ("--attention-backend", "triton")),
    **{layout: ("deepseek_v3", (LAYOUT, layout, *KVPOOL)) for layout in LAYOUTS},
    "fp4-eager": ("deepseek_v3", (LAYOUT, "fp4", *EAGER)),
    "fp8_block_scale-eager": ("deepseek_v3", (LAYOUT, "fp8_block_scale", *EAGER)),
    "fp4-page64": ("deepseek_v3", (LAYOUT, "fp4", "--page-size", "64")),
    "fp4-token_major": ("deepseek_v3", (LAYOUT, "fp4", "--kv-cache-arrangement", "token_major")),
    "fp4-page_major": (
        "deepseek_v3",
        (LAYOUT, "fp4", "--kv-cache-arrangement", "page_major", "--page-size", "64"),
    ),
    "stock-mtp": ("deepseek_v3", ("--attention-backend", "triton", *MTP)),
    "bf16-mtp": ("deepseek_v3", (LAYOUT, "bf16", *KVPOOL, *MTP)),
    "fp4-mtp": ("deepseek_v3", (LAYOUT, "fp4", *MTP)),
    "fp8_block_scale-mtp": ("deepseek_v3", (LAYOUT, "fp8_block_scale", *MTP, "--page-size", "64")),
    "fp4-mtp-eager": ("deepseek_v3", (LAYOUT, "fp4", *MTP, *EAGER)),
    "fp4-host": ("deepseek_v3", (LAYOUT, "fp4", *HOST_TIER)),
    "bf16-on-fp4": ("deepseek_v3", (LAYOUT, "bf16", *KVPOOL, "--kv-host-layout", "fp4", *HOST_TIER)),
    "kimi-stock": ("kimi_k2", ("--attention-backend", "triton")),
    "kimi-fp4": ("kimi_k2", (LAYOUT, "fp4")),
}
#: Each server against BF16 rows: largest mean distance of log-probabilities.
NEAR = {layout: one.near for layout, one in LIMITS["v3"].items()}
#: Largest difference in log-probability at the first position where two servers' tokens differ (`parting`):
#: FP4 rows of DeepSeek-V3.2's shape change log-probabilities by at most 0.63 at 99 of 100 positions. One in
#: fifty random tokens is within this margin of the most likely one.
MARGIN = 1.0
TOP = 40


def tokens(seed, count):
    return random.Random(seed).choices(range(3, random_deepseek.VOCAB), k=count)


#: Unequal lengths; the third begins like the second (a prefix hit); the fourth fills more than three chunks.
SHARED = tokens(1, 300)
#: Five: a batch of them replays the graph of a larger one, padded.
PROMPTS = [tokens(0, 5), SHARED, SHARED[:200] + tokens(2, 77), tokens(3, 900), tokens(4, 40)]


def answers_of(tmp_path_factory, servers, write, ask, check=lambda name: None):
    """`answers(name)`: what the server of that name said; it is started on first use.

    `write` makes the checkpoint of a shape in a folder; `check` may skip a test before its server starts.
    """
    pytest.importorskip("sglang")
    models, found, root = {}, {}, tmp_path_factory.mktemp("servers")

    def get(name):
        check(name)
        shape = servers[name][0]
        if shape not in models:
            models[shape] = write(root / shape, shape)
        if name not in found:
            found[name] = ask(name, models[shape], root / f"{name}.log")
        return found[name]

    return get


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return answers_of(tmp_path_factory, SERVERS, random_deepseek.write, ask)


def ask(name, model, log):
    _, arguments = SERVERS[name]
    command = [
        *("--model-path", str(model), "--port", str(free_port()), "--skip-tokenizer-init"),
        *("--context-length", "4096", "--mem-fraction-static", "0.3", "--chunked-prefill-size", "256"),
        *("--cuda-graph-max-bs-decode", "8", "--random-seed", "0"),
        *(() if "--max-total-tokens" in arguments else ("--max-total-tokens", "16384")),
        *arguments,
    ]
    # The log-probabilities of every prompt then depend on stored rows.
    environment = {} if "stock" in name else {"KVPOOL_PREFILL_READS_ROWS": "1"}
    with Server(command, log, environment, wait_seconds=1200) as server:

        def generate(ids, **more):
            return server.generate(input_ids=ids, sampling_params=GREEDY, return_logprob=True, **more)

        said = {
            "info": server.info(),
            "one": [generate(ids) for ids in PROMPTS],
            "batch": generate(PROMPTS),
            "prompts": [generate(ids, logprob_start_len=0) for ids in PROMPTS],
        }
        if "host" in name or "on-" in name:
            # After a flush, the device hit reads rows that were computed, not loaded.
            server.get("/flush_cache?timeout=30")
            generate(PROMPTS[3])
            said["device_hit"] = generate(PROMPTS[3], top_logprobs_num=TOP)
            for seed in (10, 11, 12):
                generate(tokens(seed, 900))
            said["host_hit"], said["device_hit_again"] = generate(PROMPTS[3]), generate(PROMPTS[3])
    said["log"] = log.read_text(errors="replace")
    return said


def generated(answer):
    return [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]


def logprobs(answer):
    return torch.tensor([p for p, *_ in answer["meta_info"]["input_token_logprobs"][1:]])


def distance(a, b):
    """Mean distance of the prompts' log-probabilities of two servers."""
    pairs = zip(a["prompts"], b["prompts"], strict=True)
    return torch.cat([(logprobs(x) - logprobs(y)).abs() for x, y in pairs]).mean().item()


def parting(first, second):
    """At the first difference: how much less likely the first server finds the second's token than its
    own.
    """
    told, other = first["output_ids"], second["output_ids"]
    assert len(told) == len(other)
    for position, (token, instead) in enumerate(zip(told, other, strict=True)):
        if token != instead:
            likely = {t: p for p, t, *_ in first["meta_info"]["output_top_logprobs"][position]}
            return max(likely.values()) - likely.get(instead, -torch.inf)
    return 0.0


def partings(first, second):
    return [parting(a, b) for a, b in zip(first, second, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probabilities_are_close_to_bf16(layout, answers):
    found = distance(answers(layout), answers("stock"))
    assert found < NEAR[layout], found
    if layout != "bf16":
        assert found > NEAR["bf16"], f"{found}: another layout was served, or rows were not read"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_with_prefix_hits_says_what_single_requests_said(layout, answers):
    """Rows of the radix cache, other batches and splits: answers may differ where two tokens are as
    likely.
    """
    found = answers(layout)
    same = [
        a == b
        for x, y in zip(found["one"], found["batch"], strict=True)
        for a, b in zip(generated(x), generated(y), strict=True)
    ]
    assert sum(same) >= 0.8 * len(same), f"{sum(same)} of {len(same)}"


@pytest.mark.parametrize("layout", ["fp4", "fp8_block_scale"])
def test_graphs_and_eager_give_the_same_tokens(layout, answers):
    graph, eager = answers(layout), answers(f"{layout}-eager")
    assert [generated(a) for a in graph["one"]] == [generated(a) for a in eager["one"]]
    # SGLang says in every line on decoding whether a graph was replayed.
    assert "cuda graph: True" in graph["log"]
    assert "cuda graph: True" not in eager["log"]


@pytest.mark.parametrize(("arrangement", "plain"), [("token_major", "fp4"), ("page_major", "fp4-page64")])
def test_arrangements_give_the_same_tokens(arrangement, plain, answers):
    """With pages of one size: another size changes a prefill's chunks, and so how their sums are rounded."""
    packed, other = answers(plain), answers(f"fp4-{arrangement}")
    assert [generated(a) for a in packed["one"]] == [generated(a) for a in other["one"]]


def accepted(answer):
    return [a["meta_info"]["spec_accept_length"] for a in answer["one"]]


@pytest.mark.parametrize("name", ["fp4-mtp", "fp8_block_scale-mtp", "fp4-mtp-eager"])
def test_mtp_says_what_decoding_one_by_one_says(name, answers):
    """Verified with four queries per request, not one: answers may differ where two tokens are as likely."""
    drafted, plain = answers(name), answers(name.split("-")[0])
    same = [
        a == b
        for x, y in zip(drafted["one"], plain["one"], strict=True)
        for a, b in zip(generated(x), generated(y), strict=True)
    ]
    assert sum(same) >= 0.8 * len(same), f"{sum(same)} of {len(same)}"
    assert distance(drafted, plain) < NEAR["bf16"]


def test_drafts_are_as_good_as_sglangs(answers):
    """Verification corrects a draft's tokens, so wrong rows of a draft only show in how many are accepted.

    The draft's layer is random, so few are accepted; the number must agree where the computation is the same.
    """
    assert accepted(answers("fp4-mtp")) == accepted(answers("fp4-mtp-eager"))
    ours, stock = (sum(accepted(answers(name))) / len(PROMPTS) for name in ("bf16-mtp", "stock-mtp"))
    assert abs(ours - stock) < 0.1 * stock


@pytest.mark.parametrize("name", ["fp4-host", "bf16-on-fp4"])
def test_host_hits(name, answers):
    """Rows come back from the host: the same bytes, or narrower rows.

    A device hit after the host hit would read the loaded rows, right or wrong. The device hit before it reads
    neither those nor narrower rows.
    """
    found = answers(name)
    hits = ("device_hit", "host_hit", "device_hit_again")
    assert all(found[hit]["meta_info"]["cached_tokens"] >= 832 for hit in hits)
    details = {hit: found[hit]["meta_info"]["cached_tokens_details"] for hit in hits}
    assert details["device_hit"]["host"] == details["device_hit_again"]["host"] == 0
    assert details["host_hit"]["host"] > 0
    assert generated(found["host_hit"]) == generated(found["device_hit_again"])
    if "on-" in name:
        assert max(partings([found["device_hit"]], [found["host_hit"]])) < MARGIN
    else:
        assert generated(found["host_hit"]) == generated(found["device_hit"])


def test_kimi_shapes(answers):
    found = distance(answers("kimi-fp4"), answers("kimi-stock"))
    assert NEAR["bf16"] < found < NEAR["fp4"], found


def test_the_layout_is_what_the_server_says(answers):
    assert answers("fp4")["info"]["kv_cache_layout"] == "fp4"
    assert "416 bytes per token and layer" in answers("fp4")["log"]
