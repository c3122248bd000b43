"""Servers on a GPU beyond those of `scripts/h100_regression.py`: eager, MTP, mixed batches, narrower hosts.

Models are SGLang's own classes with small random checkpoints, with MTP checkpoints that copy. A server start
takes a minute or more: each configuration is started once and asked everything.
`tests/sglang_plugin/test_regression_servers.py` resolves their arguments on a CPU. On the emulated device
prompts are shorter, and fewer sizes of graphs are captured.
"""

import importlib.util
import os
import random
import re
from pathlib import Path

import copying_deepseek
import mixed_batches
import pytest
import random_deepseek
import random_hybrid
import torch

from scripts.servers.limits import LIMITS
from sgl_kvpool.commands.processes.forks import Forks
from sgl_kvpool.commands.processes.server import Server, free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # The first servers of a machine compile, and may take 1200 s to start.
    pytest.mark.timeout(1800),
]


def installed(package, files="*"):
    found = importlib.util.find_spec(package)
    return found is not None and any(Path(found.submodule_search_locations[0]).glob(files))


EMULATED = os.environ.get("TEST_EMULATED") == "1"
#: Rows that the emulated device does not run -> the reasons.
LEFT_OUT = {
    ("deepseek_v3", "stock-mtp"): "SGLang's triton kernels take over eleven minutes there",
    ("deepseek_v32", "fp4-dense"): "FlashAttention 3 is not replaced there",
    ("glm5", "stock"): "FlashAttention 3 is not replaced there",
} if EMULATED else {}  # fmt: skip
# A box may have SGLang without its largest wheels.
FA3, DEEP_GEMM = installed("sgl_kernel", "flash_ops*"), installed("deep_gemm")
FP4, TILES = ("--kv-cache-layout", "fp4"), ("--kv-cache-layout", "fp8_block_scale")
FP8 = ("--kv-cache-layout", "fp8", "--attention-backend", "kvpool_mla")
#: SGLang without us, whose triton backend reads BF16 rows; with sparse attention fa3 is its choice on Hopper.
STOCK = ("--attention-backend", "triton")
STOCK_SPARSE = ("--kv-cache-dtype", "bfloat16", *(() if FA3 else ("--dsa-decode-backend", "flashmla_sparse")))
STOCK_656 = ("--kv-cache-dtype", "fp8_e4m3")
SCALED = ("--dsa-prefill-backend", "flashmla_sparse", "--dsa-decode-backend", "flashmla_kv")
EAGER = ("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled")
MIXED = ("--enable-mixed-chunk", "--decode-log-interval", "1")
MTP = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)
#: Tokens of a chunk of a prefill; a state of linear attention is kept at its end.
CHUNK = 128 if EMULATED else 256
#: The device pool holds about two prompts, so that the third pushes the first one out.
HOST_TIER = (
    *("--kv-cache-layout", "bf16", "--attention-backend", "kvpool_mla", "--kv-host-layout", "fp4"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "8", "--hicache-write-policy", "write_through"),
    *("--page-size", "64", "--max-total-tokens", str(8 * CHUNK), "--enable-cache-report"),
)
FIX = {"KVPOOL_FIX_TOPK": "1"}
#: Up to this many tokens, and where no graph runs, Hopper attends densely without asking the indexer.
DENSE_UP_TO = "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD"

#: (shape, name): (arguments, environment)
SERVERS = {
    (shape, name): (arguments, more[0] if more else {})
    for shape, servers in {
        "deepseek_v3": {
            "fp4": (FP4,),
            "fp4-eager": ((*FP4, *EAGER),),
            "fp8_block_scale": (TILES,),
            "fp8-k_scales": (FP8,),
            "stock-mtp": ((*STOCK, *MTP),),
            "fp4-mtp": ((*FP4, *MTP),),
            "fp8_block_scale-mtp": ((*TILES, *MTP, "--page-size", "64"),),
            "bf16-on-fp4": (HOST_TIER,),
        },
        "kimi_k2": {"stock": (STOCK,), "fp4": (FP4,)},
        "deepseek_v32": {
            "fp4-mixed": ((*FP4, *MIXED),),
            "fp4-eager": ((*FP4, *EAGER),),
            "fp4-dense": ((*FP4, *EAGER), {DENSE_UP_TO: ""}),
            "fp8_block_scale-mixed": ((*TILES, *SCALED, *MIXED),),
            "stock-mtp": ((*STOCK_656, *MTP),),
            "fp4-mtp": ((*FP4, *MTP),),
            "fp8_block_scale-mtp": ((*TILES, *MTP),),
            "stock-656-mixed": ((*STOCK_656, *SCALED, *MIXED),),
            "fixed-656-mixed": ((*STOCK_656, *SCALED, *MIXED), FIX),
        },
        "glm5": {"stock": (STOCK_SPARSE,), "fp4": (FP4,)},
        "kimi_linear": {
            "fp4": (FP4,),
            "fp4-eager": ((*FP4, *EAGER),),
            # One token per page, requests one step after the other, and states at the ends of chunks only.
            "fp4-no_buffer": (
                (*FP4, "--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
            ),
            "bf16-on-fp4": (HOST_TIER,),
        },
        "lightning": {
            "stock": (STOCK,),
            "fp4": (FP4,),
            "stock-mtp": ((*STOCK, *MTP),),
            "fp4-mtp": ((*FP4, *MTP),),
        },
    }.items()
    for name, (arguments, *more) in servers.items()
}
#: Of servers with these names prompts and hits are compared, and no answers to prompts.
PROMPTS_ONLY = ("stock", "bf16-on-fp4", "fp8_block_scale")
#: Servers that are asked for answers one by one and at once.
AT_ONCE = [
    *(("deepseek_v3", name) for name in ("fp4", "fp8-k_scales")),
    *(("deepseek_v32", "fp4-mixed"), ("kimi_linear", "fp4-no_buffer")),
    *((shape, "fp4") for shape in ("kimi_k2", "glm5", "kimi_linear", "lightning")),
]
#: Key of a shape's limits.
LIKE = dict.fromkeys(random_deepseek.DENSE, "v3") | dict.fromkeys(random_deepseek.SPARSE, "v32")
LIKE |= dict.fromkeys(("kimi_linear", "lightning"), "kimi")
#: Largest difference in log-probability at the first position where two servers' tokens differ (`parting`):
#: FP4 rows of DeepSeek-V3.2's shape change log-probabilities by at most 0.63 at 99 of 100 positions. One in
#: fifty random tokens is within this margin of the most likely one. Tokens may differ where two are about as
#: likely: batches round sums otherwise, and the order of top-k lists is not determined.
MARGIN = 1.0
TOP = 40
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
ONE = {**GREEDY, "max_new_tokens": 1}


def tokens(seed, count):
    return random.Random(seed).choices(range(3, random_deepseek.VOCAB), k=count)


#: Unequal lengths; the third begins like the second, up to the end of a chunk (a prefix hit). A batch of five
#: replays the graph of a larger one, padded.
SHARED = tokens(1, 600)
PROMPTS = [tokens(0, 5), SHARED, SHARED[: 2 * CHUNK] + tokens(2, 77), tokens(3, 900), tokens(4, 40)]
LONG = tokens(1, 2608)
#: All but the first are longer than what an indexer selects (`random_deepseek.INDEX_TOPK`). Last chunks are
#: as long as a captured graph, so that eager prefills have the same shapes.
SPARSE_PROMPTS = [tokens(0, 48), LONG, LONG[:2304] + tokens(2, 304), tokens(3, 4000), tokens(4, 2112)]
#: What decodes while those arrive.
RUNNING, MANY = [tokens(seed, 2112) for seed in (5, 6, 7)], {**GREEDY, "max_new_tokens": 600}
if EMULATED:
    # Last chunks fit into the smaller graph of prefills.
    PROMPTS[1:4] = SHARED[:312], SHARED[: 2 * CHUNK] + tokens(2, 48), tokens(3, 452)
    # Two prompts are still longer than what an indexer selects.
    SPARSE_PROMPTS = [tokens(0, 48), LONG[:2304], LONG[:2112] + tokens(2, 48), tokens(3, 300), tokens(4, 112)]
    RUNNING, MANY = [tokens(seed, 112) for seed in (5, 6, 7)], {**GREEDY, "max_new_tokens": 40}
    GREEDY["max_new_tokens"] = 8
#: Last tokens of a prompt whose log-probabilities are asked for; those before come from the radix tree.
SCORED = 64 if EMULATED else 8192
#: Of the layers of the checkpoint that `fp8-k_scales` serves.
K_SCALES = (0.0127, 0.0413, 0.0231)


def prompts_of(shape):
    return SPARSE_PROMPTS if shape in random_deepseek.SPARSE else PROMPTS


@pytest.fixture(scope="module")
def importing():
    """On the emulated device a process that has imported SGLang, from which servers are forked."""
    if not EMULATED:
        yield None
        return
    from emulated_cuda.conftest import environment

    with Forks(environment=environment("cuda")) as process:
        yield process


@pytest.fixture(scope="module")
def answers(tmp_path_factory, importing):
    """`answers(shape, name)`: what that server said; it is started on first use."""
    pytest.importorskip("sglang")
    models, found, root = {}, {}, tmp_path_factory.mktemp("servers")

    def get(shape, name):
        if name == "fp4-dense" and not FA3:
            pytest.skip("needs kernels of SGLang's that are not installed")
        if shape in random_deepseek.SPARSE and "mtp" in name and not DEEP_GEMM:
            pytest.skip("deep_gemm is not installed: SGLang's torch indexer refuses MTP (dsa/utils.py:402)")
        if reason := LEFT_OUT.get((shape, name)):
            pytest.skip(f"{shape} {name} is not run on the emulated device: {reason}")
        writer = random_deepseek if shape in random_deepseek.SHAPES else random_hybrid
        if "mtp" in name and writer is random_deepseek:
            writer = copying_deepseek
        written = {"k_scales": K_SCALES} if name == "fp8-k_scales" else {}
        key = (shape, writer, *written)
        if key not in models:
            models[key] = writer.write(root / f"model-{len(models)}", shape, **written)
        if (shape, name) not in found:
            found[shape, name] = ask(shape, name, models[key], root / f"{shape}-{name}.log", importing)
        return found[shape, name]

    return get


def ask(shape, name, model, log, importing=None):
    (arguments, environment), is_sparse = SERVERS[shape, name], shape in random_deepseek.SPARSE
    # The demo's classes would replace SGLang's of the same name.
    environment = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "", **environment}
    command = [
        *("--model-path", str(model), "--port", str(free_port()), "--skip-tokenizer-init"),
        *("--context-length", "8192" if is_sparse else "4096", "--chunked-prefill-size", str(CHUNK)),
        *("--mem-fraction-static", "0.3", "--cuda-graph-max-bs-decode", "8", "--random-seed", "0"),
        *(() if "--max-total-tokens" in arguments else ("--max-total-tokens", "32768")),
        *arguments,
    ]
    if EMULATED:
        from emulated_cuda.conftest import OPTIONS

        environment = {**OPTIONS, **environment}
        # Of many sizes of graphs, seconds each. From 8 requests on, KDA's kernel is not replaced there.
        command += ["--cuda-graph-bs-prefill", "64", str(CHUNK), "--skip-server-warmup"]
        command += ["--cuda-graph-bs-decode", "1", "8" if "mixed" in name else "6"]
    if shape in random_hybrid.CONFIGS:
        # SGLang would take half of the pool's memory for states; a running request has five.
        command += ["--max-running-requests", "8", "--max-mamba-cache-size", "64"]
    if is_sparse:
        torch_indexer = {} if DEEP_GEMM else {"SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1"}
        environment = {DENSE_UP_TO: "0", "KVPOOL_FIX_TOPK": "0", **torch_indexer, **environment}
        environment = {key: value for key, value in environment.items() if value or key != DENSE_UP_TO}
    elif "stock" not in name:  # the log-probabilities of every prompt then depend on stored rows
        environment = {"KVPOOL_PREFILL_READS_ROWS": "1", **environment}
    # Drafts are not compared by what else was likely, those of models that copy by their tokens alone.
    top = {} if "mtp" in name else {"top_logprobs_num": TOP}
    prompts = prompts_of(shape)
    copies = "mtp" in name and shape in random_deepseek.SHAPES
    scored = [] if copies or name == "stock-mtp" else prompts
    starting = Server(command, log, environment, wait_seconds=1200)
    starting.forks = importing
    with starting as server:

        def generate(ids, parameters=GREEDY, **more):
            return server.generate(input_ids=ids, sampling_params=parameters, return_logprob=True, **more)

        said = {} if name in PROMPTS_ONLY else {"one": [generate(ids, **top) for ids in prompts]}
        if copies or (shape, name) in AT_ONCE:
            said["batch"] = generate(prompts)
        said["prompts"] = [generate(ids, ONE, logprob_start_len=max(0, len(ids) - SCORED)) for ids in scored]
        if "mixed" in name:
            said["running"] = [generate(ids, MANY, **top) for ids in RUNNING]
            said["mixed"], said["mixed_log"] = mixed_batches.serve(
                server, log, RUNNING, MANY, SPARSE_PROMPTS, GREEDY
            )
        if "on-fp4" in name:
            # After a flush, the device hit reads rows and a state that were computed, not loaded.
            server.get("/flush_cache?timeout=30")
            generate(PROMPTS[3])
            said["device_hit"] = generate(PROMPTS[3], **top)
            for seed in (10, 11, 12):
                generate(tokens(seed, len(PROMPTS[3])))
            said["host_hit"], said["device_hit_again"] = generate(PROMPTS[3]), generate(PROMPTS[3])
    said["log"] = log.read_text(errors="replace")
    return said


def logprobs(answer):
    return torch.tensor([p for p, *_ in answer["meta_info"]["input_token_logprobs"][1:]])


def distance(a, b):
    """Mean distance of the prompts' log-probabilities of two servers."""
    pairs = zip(a["prompts"], b["prompts"], strict=True)
    return torch.cat([(logprobs(x) - logprobs(y)).abs() for x, y in pairs]).mean().item()


def parting(first, second):
    """At the first difference: how much less likely the first finds the second's token than its own."""
    told, other = first["output_ids"], second["output_ids"]
    assert len(told) == len(other)
    for position, (token, instead) in enumerate(zip(told, other, strict=True)):
        if token != instead:
            likely = {t: p for p, t, *_ in first["meta_info"]["output_top_logprobs"][position]}
            return max(likely.values()) - likely.get(instead, -torch.inf)
    return 0.0


def say_the_same(first, second):
    parted = [parting(a, b) for a, b in zip(first, second, strict=True)]
    assert max(parted) < MARGIN, parted


def are_the_same(shape, found, wanted):
    """Two servers with the same rows: their tokens, and the prompts' log-probabilities."""
    say_the_same(wanted["one"], found["one"])
    assert distance(found, wanted) < LIMITS[LIKE[shape]]["bf16"].near


@pytest.mark.parametrize(
    ("shape", "name", "exact"),
    [
        *(("deepseek_v3", name, "bf16-on-fp4") for name in ("fp4", "fp8_block_scale", "fp8-k_scales")),
        *((shape, "fp4", "stock") for shape in ("kimi_k2", "glm5", "lightning")),
    ],
)
def test_rows_are_close_to_rows_of_bf16(shape, name, exact, answers):
    """If nearer than the lower limit, another layout was served, or rows were not read."""
    limits = LIMITS[LIKE[shape]][name.partition("-")[0]]
    assert limits.far < distance(answers(shape, name), answers(shape, exact)) < limits.near


@pytest.mark.parametrize(("shape", "name"), AT_ONCE)
def test_a_batch_with_prefix_hits_says_what_single_requests_said(shape, name, answers):
    """Hybrids reuse rows and states of the tree."""
    found = answers(shape, name)
    assert found["one"][2]["meta_info"]["cached_tokens"] >= 2 * CHUNK
    say_the_same(found["one"], found["batch"])


@pytest.mark.parametrize(
    ("shape", "graph"), [("deepseek_v3", "fp4"), ("deepseek_v32", "fp4-mixed"), ("kimi_linear", "fp4")]
)
def test_graphs_and_eager_say_the_same(shape, graph, answers):
    graph, eager = answers(shape, graph), answers(shape, "fp4-eager")
    are_the_same(shape, eager, graph)
    if shape == "deepseek_v3":  # whose order of sums is determined
        assert [a["output_ids"] for a in graph["one"]] == [a["output_ids"] for a in eager["one"]]
    # SGLang says in every line on decoding whether a graph was replayed.
    assert "cuda graph: True" in graph["log"]
    assert "cuda graph: True" not in eager["log"]


def test_short_prompts_attended_densely_say_the_same(answers):
    """Until a prompt is longer than what is selected, all of it is selected."""
    dense = answers("deepseek_v32", "fp4-dense")
    assert "Set dense attention kv len threshold to model index_topk" in dense["log"]
    are_the_same("deepseek_v32", dense, answers("deepseek_v32", "fp4-eager"))


def accept_length(said):
    """Tokens per step of answers to prompts that are continued by copying, or of all."""
    lengths = [answer["meta_info"]["spec_accept_length"] for answer in said["one"]]
    return sum(lengths) / len(lengths)


@pytest.mark.parametrize("layout", ["fp4", "fp8_block_scale"])
@pytest.mark.parametrize("shape", ["deepseek_v3", "deepseek_v32"])
def test_mtp(shape, layout, answers):
    """What the checkpoint copies, and drafts as good as SGLang's, which are accepted at rates of .5 to .9."""
    servers = [answers(shape, n) for n in (f"{layout}-mtp", "stock-mtp") if (shape, n) not in LEFT_OUT]
    for said in servers:
        for ids, one, batched in zip(prompts_of(shape), said["one"], said["batch"], strict=True):
            if len(ids) > copying_deepseek.PERIOD:
                wanted = copying_deepseek.continued(ids, GREEDY["max_new_tokens"])
                assert one["output_ids"] == batched["output_ids"] == wanted
        long = [a for i, a in zip(prompts_of(shape), said["one"], strict=True) if len(i) > 2 * CHUNK]
        assert 1 + 0.5 + 0.5**2 + 0.5**3 < accept_length({"one": long}) < 1 + 0.9 + 0.9**2 + 0.9**3
    lengths = [accept_length(said) for said in servers]
    assert max(lengths) - min(lengths) < 0.1 * lengths[-1]


@pytest.mark.parametrize("shape", ["lightning"])
def test_mtp_of_hybrids(shape, answers):
    """Verification corrects a draft's tokens, so wrong rows of a draft only show in how many are accepted."""
    drafted, stock = answers(shape, "fp4-mtp"), answers(shape, "stock-mtp")
    are_the_same(shape, drafted, answers(shape, "fp4"))
    assert abs(accept_length(drafted) - accept_length(stock)) < 0.1 * accept_length(stock)


@pytest.mark.parametrize("shape", ["deepseek_v3", "kimi_linear"])
def test_hits_on_a_narrower_host(shape, answers):
    """Rows, and a state, come back from the host.

    A device hit after the host hit would read what was loaded, right or wrong. The device hit before it reads
    neither that nor narrower rows.
    """
    found = answers(shape, "bf16-on-fp4")
    hits = {name: found[name]["meta_info"] for name in ("device_hit", "host_hit", "device_hit_again")}
    assert all(hit["cached_tokens"] >= len(PROMPTS[3]) - 68 for hit in hits.values())
    details = [hit["cached_tokens_details"]["host"] for hit in hits.values()]
    assert details[0] == details[2] == 0 < details[1]
    assert found["host_hit"]["output_ids"] == found["device_hit_again"]["output_ids"]
    say_the_same([found["device_hit"]], [found["host_hit"]])


@pytest.mark.parametrize("name", ["fp4-mixed", "fp8_block_scale-mixed", "fixed-656-mixed"])
def test_mixed_batches_say_what_requests_served_alone_say(name, answers):
    found = answers("deepseek_v32", name)
    assert found["mixed"] is not None, found["mixed_log"][-3000:]
    assert mixed_batches.decoded_with_prompts(found) > 30
    # Graphs of prefills are where stock SGLang goes wrong, see below.
    assert re.search(r"Prefill batch.*#running-req: [1-9].*cuda graph: True", found["mixed_log"])
    say_the_same([*found["running"], *found["one"]], found["mixed"])


def test_stock_sglang_gets_mixed_batches_of_656_byte_rows_wrong(answers):
    """What `KVPOOL_FIX_TOPK=1` mends: in 0.5.23 the server ends with the first mixed batch.

    From reading the source: the graph of a prefill plans its metadata from the batch as it is, MIXED, so for
    PAGED lists (prefill_cuda_graph_runner.py:2123, dsa_backend.py:4101), and is replayed as EXTEND (:1953),
    for which the indexer makes RAGGED lists and finds no offsets (dsa_topk_backend.py:215). Eager prefills
    are right: they turn MIXED into EXTEND before anything else (eager_runner.py:215). If the server does not
    end, its tokens have to be wrong: otherwise the fix is not needed. The fix changes nothing else.
    """
    stock = answers("deepseek_v32", "stock-656-mixed")
    # Requests one by one are served, with the same rows as ours.
    for name in ("fp8_block_scale-mixed", "fixed-656-mixed"):
        are_the_same("deepseek_v32", answers("deepseek_v32", name), stock)
    if stock["mixed"] is None:
        assert "RAGGED topk_transform requires topk_indices_offset" in stock["log"]
        return
    assert mixed_batches.decoded_with_prompts(stock) > 30, "no batch was mixed"
    with pytest.raises(AssertionError):
        say_the_same([*stock["running"], *stock["one"]], stock["mixed"])
