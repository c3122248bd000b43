"""Models with sparse attention (DSA) served on a GPU in every layout: chunks, graphs, MTP, mixed batches.

Prompts, except the first, are longer than what an indexer selects (`random_deepseek.INDEX_TOPK`). A server
start takes a minute or more: each configuration is started once and asked everything.
"""

import importlib.util
import re
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path

import pytest
import random_deepseek
from codec_oracle import LAYOUTS, OURS_ALONE
from test_server_gpu import (
    EAGER,
    GREEDY,
    LAYOUT,
    MARGIN,
    MTP,
    SERVED,
    TOP,
    accepted,
    answers_of,
    distance,
    partings,
    tokens,
)  # fmt: skip

from scripts.servers.limits import LIMITS
from sgl_kvpool.demo.server import Server, free_port

pytestmark = SERVED


def installed(package, files="*"):
    found = importlib.util.find_spec(package)
    return found is not None and any(Path(found.submodule_search_locations[0]).glob(files))


# A box may have SGLang without its largest wheels.
FA3, TILELANG = installed("sgl_kernel", "flash_ops*"), installed("tilelang")
DEEP_GEMM = installed("deep_gemm")
#: What decodes BF16 rows: fa3 is SGLang's choice on Hopper.
BF16 = () if FA3 else ("--dsa-decode-backend", "flashmla_sparse")
SCALED = ("--dsa-prefill-backend", "flashmla_sparse", "--dsa-decode-backend", "flashmla_kv")
RAW = ("--dsa-prefill-backend", "tilelang", "--dsa-decode-backend", "tilelang")
MIXED = ("--enable-mixed-chunk", "--decode-log-interval", "1")
STOCK_656 = ("--kv-cache-dtype", "fp8_e4m3")
FIX = "KVPOOL_FIX_TOPK"
#: Up to this many tokens, and where no graph runs, Hopper attends a prompt densely without asking the
#: indexer.
DENSE_UP_TO = "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD"

#: name: (model, arguments, environment)
SERVERS = {
    # The peer: SGLang's own BF16 rows, without this package.
    "stock": ("deepseek_v32", ("--kv-cache-dtype", "bfloat16", *BF16), {}),
    "bf16": ("deepseek_v32", (LAYOUT, "bf16", *BF16), {}),
    "fp8": ("deepseek_v32", (LAYOUT, "fp8", *RAW), {}),
    "fp8_block_scale": ("deepseek_v32", (LAYOUT, "fp8_block_scale"), {}),
    "fp8_block_scale-mixed": ("deepseek_v32", (LAYOUT, "fp8_block_scale", *SCALED, *MIXED), {}),
    "fp4-mixed": ("deepseek_v32", (LAYOUT, "fp4", *MIXED), {}),
    **{layout: ("deepseek_v32", (LAYOUT, layout), {}) for layout in OURS_ALONE if layout != "fp4"},
    "fp4-eager": ("deepseek_v32", (LAYOUT, "fp4", *EAGER), {}),
    "fp4-dense": ("deepseek_v32", (LAYOUT, "fp4", *EAGER), {DENSE_UP_TO: None}),
    "stock-656-mtp": ("deepseek_v32", (*STOCK_656, *MTP), {}),
    "fp8_block_scale-mtp": ("deepseek_v32", (LAYOUT, "fp8_block_scale", *MTP), {}),
    "fp4-mtp": ("deepseek_v32", (LAYOUT, "fp4", *MTP), {}),
    "stock-656-mixed": ("deepseek_v32", (*STOCK_656, *SCALED, *MIXED), {}),
    "fixed-656-mixed": ("deepseek_v32", (*STOCK_656, *SCALED, *MIXED), {FIX: "1"}),
    "glm5-stock": ("glm5", ("--kv-cache-dtype", "bfloat16", *BF16), {}),
    "glm5-fp4": ("glm5", (LAYOUT, "fp4"), {}),
}
#: Every layout without drafts.
SINGLE = [*(layout for layout in LAYOUTS if layout != "fp4"), "fp8_block_scale-mixed", "fp4-mixed"]
#: Each server against BF16 rows: largest mean distance of log-probabilities.
NEAR = {layout: one.near for layout, one in LIMITS["v32"].items()}
#: And the smallest: below it another layout was served, or rows were not read.
FAR = {layout: one.far for layout, one in LIMITS["v32"].items()}

SHARED = tokens(1, 2608)
#: The third begins like the second (a prefix hit); the first is shorter than what is selected. Last chunks
#: are as long as a captured graph, so that eager prefills have the same shapes.
PROMPTS = [tokens(0, 48), SHARED, SHARED[:2304] + tokens(2, 304), tokens(3, 4000), tokens(4, 2112)]
#: What decodes while those arrive.
LONG, MANY = [tokens(seed, 2112) for seed in (5, 6, 7)], {**GREEDY, "max_new_tokens": 600}


def skip_without_kernels(name):
    if (RAW[1] in SERVERS[name][1] and not TILELANG) or (name == "fp4-dense" and not FA3):
        pytest.skip("needs kernels of SGLang's that are not installed")
    if "mtp" in name and not DEEP_GEMM:
        pytest.skip("deep_gemm is not installed: SGLang's torch indexer refuses MTP (dsa/utils.py:402)")


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return answers_of(tmp_path_factory, SERVERS, random_deepseek.write, ask, skip_without_kernels)


def ask(name, model, log):
    _, arguments, environment = SERVERS[name]
    command = [
        *("--model-path", str(model), "--port", str(free_port()), "--skip-tokenizer-init"),
        *("--context-length", "8192", "--mem-fraction-static", "0.3", "--chunked-prefill-size", "256"),
        *("--cuda-graph-max-bs-decode", "8", "--random-seed", "0", "--max-total-tokens", "32768"),
        *arguments,
    ]
    torch_indexer = {} if DEEP_GEMM else {"SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1"}
    environment = {DENSE_UP_TO: "0", FIX: "0", **torch_indexer, **environment}
    environment = {key: value for key, value in environment.items() if value is not None}
    # Drafts are not compared by what else was likely.
    top = {} if "mtp" in name else {"top_logprobs_num": TOP}
    with Server(command, log, environment, wait_seconds=1200) as server:

        def generate(ids, parameters=GREEDY, **more):
            return server.generate(input_ids=ids, sampling_params=parameters, return_logprob=True, **more)

        said = {
            "info": server.info(),
            "one": [generate(ids, **top) for ids in PROMPTS],
            "batch": generate(PROMPTS),
            "prompts": [generate(ids, logprob_start_len=0) for ids in PROMPTS],
        }
        if "mixed" in name:
            said["long"] = [generate(ids, MANY, **top) for ids in LONG]
            said["mixed"], said["mixed_log"] = serve_mixed(server, log)
    said["log"] = log.read_text(errors="replace")
    return said


def serve_mixed(server, log):
    """Answers to prompts that arrive while others decode (None if the server ended), and the log meanwhile.

    Without log-probabilities: SGLang does not mix a batch with a request for them (scheduler.py:4379).
    """
    server.get("/flush_cache?timeout=30")
    before = len(log.read_text(errors="replace"))

    def said():
        return log.read_text(errors="replace")[before:]

    try:
        with ThreadPoolExecutor(len(LONG) + len(PROMPTS)) as threads:
            asked = [threads.submit(server.generate, input_ids=i, sampling_params=MANY) for i in LONG]
            while "Decode batch" not in said() and not any(one.done() for one in asked):
                time.sleep(0.02)
            for ids in PROMPTS:
                asked.append(threads.submit(server.generate, input_ids=ids, sampling_params=GREEDY))
                time.sleep(0.1)
        return [one.result() for one in asked], said()
    except (OSError, HTTPException):
        time.sleep(2)  # the reason is logged after the connection is gone
        return None, said()


def decoded_with_prompts(log, said):
    """Tokens that came out of mixed batches: all but each answer's first token and those of decode batches.

    The log has a line for each batch that only decodes, with its number of requests.
    """
    alone = sum(int(count) for count in re.findall(r"Decode batch[^\n]*?#running-req: (\d+)", log))
    return sum(len(answer["output_ids"]) - 1 for answer in said) - alone


@pytest.mark.parametrize("name", SINGLE)
def test_log_probabilities_are_close_to_bf16(name, answers):
    layout = name.split("-")[0]
    found = distance(answers(name), answers("stock"))
    assert FAR[layout] <= found < NEAR[layout], found


def test_the_layout_is_what_the_server_says(answers):
    assert answers("fp4-mixed")["info"]["kv_cache_layout"] == "fp4"
    assert "416 bytes per token and layer" in answers("fp4-mixed")["log"]


@pytest.mark.parametrize("name", SINGLE)
def test_a_batch_with_prefix_hits_says_what_single_requests_said(name, answers):
    found = partings(answers(name)["one"], answers(name)["batch"])
    assert max(found) < MARGIN, found


def test_graphs_and_eager_say_the_same(answers):
    """Not token by token: the top-k kernels' order is not determined, and so the order of sums."""
    graph, eager = answers("fp4-mixed"), answers("fp4-eager")
    assert max(partings(graph["one"], eager["one"])) < MARGIN
    assert distance(graph, eager) < NEAR["bf16"]
    for batch in ("Prefill", "Decode"):
        assert re.search(rf"{batch} batch.*cuda graph: True", graph["log"])
    assert "cuda graph: True" not in eager["log"]


def test_short_prompts_attended_densely_say_the_same(answers):
    """Until a prompt is longer than what is selected, all of it is selected."""
    dense, sparse = answers("fp4-dense"), answers("fp4-eager")
    assert "Set dense attention kv len threshold to model index_topk" in dense["log"]
    assert max(partings(sparse["one"], dense["one"])) < MARGIN
    assert distance(dense, sparse) < NEAR["bf16"]


@pytest.mark.parametrize(
    ("name", "plain"), [("fp4-mtp", "fp4-mixed"), ("fp8_block_scale-mtp", "fp8_block_scale")]
)
def test_mtp_says_what_decoding_one_by_one_says(name, plain, answers):
    drafted, plain = answers(name), answers(plain)
    assert max(partings(plain["one"], drafted["one"])) < MARGIN
    assert distance(drafted, plain) < NEAR["bf16"]


@pytest.mark.parametrize("name", ["fp4-mtp", "fp8_block_scale-mtp"])
def test_drafts_are_as_good_as_sglangs(name, answers):
    """Verification corrects a draft's tokens, so wrong rows of a draft only show in how many are accepted."""
    ours, stock = (sum(accepted(answers(one))) / len(PROMPTS) for one in (name, "stock-656-mtp"))
    assert abs(ours - stock) < 0.1 * stock, (ours, stock)


@pytest.mark.parametrize("name", ["fp4-mixed", "fp8_block_scale-mixed", "fixed-656-mixed"])
def test_mixed_batches_say_what_requests_served_alone_say(name, answers):
    found = answers(name)
    assert found["mixed"] is not None, found["mixed_log"][-3000:]
    assert decoded_with_prompts(found["mixed_log"], found["mixed"]) > 30
    # Graphs of prefills are where stock SGLang goes wrong, see below.
    assert re.search(r"Prefill batch.*#running-req: [1-9].*cuda graph: True", found["mixed_log"])
    parted = partings([*found["long"], *found["one"]], found["mixed"])
    assert max(parted) < MARGIN, parted


def test_stock_sglang_gets_mixed_batches_of_656_byte_rows_wrong(answers):
    """What `KVPOOL_FIX_TOPK=1` mends: in 0.5.23 the server ends with the first mixed batch.

    From reading the source: the graph of a prefill plans its metadata from the batch as it is, MIXED, so for
    PAGED lists (prefill_cuda_graph_runner.py:2123, dsa_backend.py:4101), and is replayed as EXTEND (:1953),
    for which the indexer makes RAGGED lists and finds no offsets (dsa_topk_backend.py:215). Eager prefills
    are right: they turn MIXED into EXTEND before anything else (eager_runner.py:215). If the server does not
    end, its tokens have to be wrong: otherwise the fix is not needed.
    """
    stock = answers("stock-656-mixed")
    # Requests one by one are served, with the same rows as ours.
    assert distance(stock, answers("fp8_block_scale-mixed")) < NEAR["bf16"]
    if stock["mixed"] is None:
        assert "RAGGED topk_transform requires topk_indices_offset" in stock["log"]
        return
    assert decoded_with_prompts(stock["mixed_log"], stock["mixed"]) > 30, "no batch was mixed"
    assert max(partings([*stock["long"], *stock["one"]], stock["mixed"])) > MARGIN


def test_the_fix_changes_nothing_else(answers):
    """With SGLang's own pool, without `--kv-cache-layout`. The order of top-k lists is not determined, so
    answers to single requests may differ where two tokens are about as likely.
    """
    fixed, stock = answers("fixed-656-mixed"), answers("stock-656-mixed")
    assert fixed["info"].get("kv_cache_layout") is None
    parted = partings(stock["one"], fixed["one"])
    assert max(parted) < MARGIN, parted
    assert distance(fixed, stock) < NEAR["bf16"]


def test_glm5_shapes(answers):
    found = distance(answers("glm5-fp4"), answers("glm5-stock"))
    assert FAR["fp4"] < found < NEAR["fp4"], found
