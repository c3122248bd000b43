"""Layouts through real SGLang servers on the CPU.

A4 is an item of the vLLM checklist of tests/connectors.
"""

import itertools
import math

import pytest
from codec_oracle import ROW_BYTES, STORED
from forks import without_folders
from host_tier_servers import AGAIN, AGAIN_ARRANGEMENT, DEVICE_TOKENS, FIRST, LAYOUTS, PAGE_SIZE
from hybrid_answers import distance as mean_distance
from hybrid_answers import of_prompt as logprobs

LAYERS, TOKENS = 3, 16384


def tokens(answers):
    return [answer["output_ids"] for answer in answers]


def cached(answers):
    return [answer["meta_info"]["cached_tokens"] for answer in answers]


# ------------------------------------------------------------------ SGLang as it is


@pytest.mark.engine("disabled", "stock", "foreign")
@pytest.mark.parametrize("name", ["stock", "foreign"])
def test_the_plugin_without_a_layout_changes_nothing(record, name):
    plain, found = record("disabled"), record(name)
    assert tokens(found["first"]) == tokens(plain["first"])
    assert logprobs(found["prompt"]) == logprobs(plain["prompt"])
    # Everything the server says of itself but ports, seeds, times, launch options, internal states and NCCL.
    volatile = {
        key
        for key in plain["info"]
        if any(word in key for word in ("port", "seed", "launch", "internal_states", "time", "nccl"))
    }
    for key in plain["info"].keys() - volatile:
        assert found["info"][key] == plain["info"][key], key
    assert found["info"].keys() == plain["info"].keys()
    assert found["info"]["max_total_num_tokens"] == TOKENS
    assert "sgl-kvpool: KV cache layout" not in found["log"]
    # SGLang's own pool, of the same size.
    for line in (
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 16384, KV size: 0.05 GB",
        "served from sglang.srt.mem_cache.memory_pool.MLATokenToKVPool",
    ):
        assert line in plain["log"]
        assert line in found["log"]


@pytest.mark.engine("stock", "foreign")
def test_another_sglang_version_warns_and_serves(record):
    log = record("foreign")["log"]
    assert log.count("sgl-kvpool does nothing") == log.count("SGLang 0.6.1 is not a version") == 1
    # SGLang names the plugins it loads, and warnings name files, which may lie in a folder of our name.
    stock = without_folders(record("stock")["log"].replace("sgl-kvpool, dist=", ""))
    assert "sgl-kvpool" not in stock


# ------------------------------------------------------------------ every layout serves


#: A layout, a server of it, that server's tokens and page size.
SERVERS = [
    ("bf16", "bf16", TOKENS, 1),
    *((layout, FIRST[layout], DEVICE_TOKENS, PAGE_SIZE) for layout in LAYOUTS),
]


@pytest.mark.engine("bf16", *FIRST.values())
@pytest.mark.parametrize(("layout", "name", "size", "page_size"), SERVERS)
def test_server_says_what_it_serves(record, layout, name, size, page_size):
    answers = record(name)
    info = answers["info"]
    assert info["kv_cache_layout"] == layout
    assert info["attention_backend"] == "kvpool_mla"
    assert info["max_total_num_tokens"] == size
    gigabytes = (size + page_size) * LAYERS * ROW_BYTES[layout] / 2**30
    line = (
        f"sgl-kvpool: KV cache layout {layout}: {ROW_BYTES[layout]} bytes per token and layer, "
        f"{LAYERS} layers, {size} tokens, {gigabytes:.2f} GB"
    )
    assert answers["log"].count(line) == 1


@pytest.mark.engine("bf16", *FIRST.values())
@pytest.mark.parametrize(("layout", "name", "size", "page_size"), SERVERS)
def test_prefix_cache_hits(record, layout, name, size, page_size):
    answers = record(name)
    first, again = cached(answers["first"]), cached(answers["batch"])
    assert first[0] == 0
    assert first[1] >= 40 // page_size * page_size  # the first two prompts share 60 bytes
    for hit, answer in zip(again, answers["batch"], strict=True):
        assert hit >= (answer["meta_info"]["prompt_tokens"] - 1) // page_size * page_size


@pytest.mark.engine(*FIRST.values())
@pytest.mark.parametrize("name", FIRST.values())
def test_stored_rows_give_the_same_tokens_with_and_without_a_hit(record, name):
    """Prefill reads stored rows for its own chunk too, so a hit and a cold prefill read the same bytes."""
    answers = record(name)
    assert tokens(answers["first"]) == tokens(answers["batch"])


# ------------------------------------------------------------------ what the layouts store is attended


@pytest.mark.engine("disabled")
def test_the_model_knows_its_text(record):
    """So the tokens compared below are decided by wide margins, not by rounding."""
    from tiny_model import KNOWN

    found = [bytes(ids).decode() for ids in tokens(record("disabled")["first"])]
    assert sum(a == b for a, b in zip(found, KNOWN, strict=True)) >= 3


@pytest.mark.engine("disabled", "bf16", FIRST["bf16"], "bf16-token_major-native")
@pytest.mark.parametrize("name", ["bf16", FIRST["bf16"], "bf16-token_major-native"])
def test_bf16_gives_the_tokens_of_stock_sglang(record, name):
    stock, found = record("disabled"), record(name)
    assert tokens(found["first"]) == tokens(stock["first"])
    assert tokens(found["batch"]) == tokens(stock["batch"])
    # Same rows, another order of summation.
    assert mean_distance(logprobs(found["prompt"]), logprobs(stock["prompt"])) < 0.02


@pytest.mark.engine(FIRST["fp8"], "fp8-native")
def test_stock_backend_reads_our_fp8_rows(record):
    ours, stock = record(FIRST["fp8"]), record("fp8-native")
    assert stock["info"]["kv_cache_layout"] == "fp8"
    assert stock["info"]["attention_backend"] == "torch_native"
    assert mean_distance(logprobs(ours["prompt"]), logprobs(stock["prompt"])) < 0.02


@pytest.mark.engine(*FIRST.values(), "damaged")
def test_log_probabilities_show_the_layout(record):
    """Each layout moves them, a little; a damaged codec moves them much more."""
    exact = logprobs(record(FIRST["bf16"])["prompt"])
    distance = {
        name: mean_distance(logprobs(record(FIRST.get(name, name))["prompt"]), exact)
        for name in (*LAYOUTS[1:], "damaged")
    }
    assert all(math.isfinite(value) for value in distance.values())
    assert 0 < distance["fp8_block_scale"] < distance["fp4"] < 0.3
    assert 0 < distance["fp8"] < 0.3
    # Layouts that store the same latents have distances of similar size.
    for one, other in itertools.combinations(LAYOUTS[1:], 2):
        if STORED[one][0] == STORED[other][0]:
            assert 0.5 * distance[one] < distance[other] < 0.3
            assert distance[one] != distance[other]
    assert distance["damaged"] > 4 * distance["fp4"]


@pytest.mark.engine("fp4", FIRST["fp4"])
def test_a_host_tier_changes_no_answer(record):
    plain, found = record("fp4"), record(FIRST["fp4"])
    assert tokens(found["first"]) == tokens(plain["first"])
    assert tokens(found["batch"]) == tokens(plain["batch"])
    assert mean_distance(logprobs(found["prompt"]), logprobs(plain["prompt"])) < 0.02


@pytest.mark.engine("bf16", FIRST["bf16"])
def test_prefill_reads_rows_only_if_asked(record):
    line = "prefill attends stored rows (KVPOOL_PREFILL_READS_ROWS=1)"
    assert line in record(FIRST["bf16"])["log"]
    assert line not in record("bf16")["log"]


# ------------------------------------------------------------------ deterministic servers


def output_logprobs(answers):
    return [[entry[0] for entry in answer["meta_info"]["output_token_logprobs"]] for answer in answers]


@pytest.mark.engine("fp4", "plain-chunks", "deterministic", "deterministic-chunks")
def test_a_deterministic_server_gives_the_same_bits(record):
    """Alone and in a batch, without and with a prefix hit, in one chunk and in several."""
    whole, chunks = record("deterministic"), record("deterministic-chunks")
    alone = output_logprobs(whole["first"])
    assert [len(row) for row in alone] == [24] * 4
    assert cached(whole["batch"]) != cached(whole["first"])
    assert output_logprobs(whole["batch"]) == alone
    assert output_logprobs(chunks["first"]) == output_logprobs(chunks["batch"]) == alone
    # On some CPUs MKL's sums of the model's own products depend on the number of rows.
    assert logprobs(chunks["prompt"]) == pytest.approx(logprobs(whole["prompt"]), abs=0.02)
    assert tokens(whole["first"]) == tokens(chunks["batch"])
    # A server that is not deterministic shows which tokens were in a chunk, and which in its prefix.
    plain = record("plain-chunks")
    assert output_logprobs(plain["batch"]) != output_logprobs(plain["first"])
    assert tokens(record("fp4")["first"]) == tokens(whole["first"])


# ------------------------------------------------------------------ arrangements


@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=pytest.mark.engine(FIRST[one], AGAIN[one])) for one in LAYOUTS]
)
def test_a4_an_arrangement_gives_the_tokens_of_layer_major(record, layout):
    """The same rows elsewhere: one request after the other, then all at once over pages in no order."""
    plain, found = record(FIRST[layout]), record(AGAIN[layout])
    assert found["info"]["kv_cache_arrangement"] == AGAIN_ARRANGEMENT[layout]
    assert found["info"]["kv_cache_layout"] == layout
    assert found["info"]["page_size"] == PAGE_SIZE
    assert tokens(found["first"]) == tokens(plain["first"])
    assert tokens(found["batch"]) == tokens(plain["batch"])
    assert mean_distance(logprobs(found["prompt"]), logprobs(plain["prompt"])) < 0.02
    hits = cached(found["batch"])
    lengths = [answer["meta_info"]["prompt_tokens"] for answer in found["batch"]]
    assert hits == [(length - 1) // PAGE_SIZE * PAGE_SIZE for length in lengths]


@pytest.mark.engine("bf16", *FIRST.values(), *AGAIN.values())
def test_the_log_says_where_the_layers_lie(record):
    for layout, name in AGAIN.items():
        assert f"arrangement {AGAIN_ARRANGEMENT[layout]}" in record(name)["log"]
    for name in ("bf16", *FIRST.values()):
        assert "arrangement layer_major (auto" in record(name)["log"]
        assert record(name)["info"]["kv_cache_arrangement"] == "layer_major"


@pytest.mark.engine("disabled", "bf16-token_major-native")
def test_a_stock_backend_that_takes_strides_reads_token_major_rows(record):
    stock, found = record("disabled"), record("bf16-token_major-native")
    assert found["info"]["attention_backend"] == "torch_native"
    assert found["info"]["kv_cache_arrangement"] == "token_major"
    assert tokens(found["first"]) == tokens(stock["first"])
    assert tokens(found["batch"]) == tokens(stock["batch"])
    assert logprobs(found["prompt"]) == logprobs(stock["prompt"])


# ------------------------------------------------------------------ Engine and other launchers


@pytest.mark.engine("grpc", "fp4")
def test_a_launcher_of_its_own_serves_the_layout(record):
    """SMG's gRPC servicer gives its schedulers the layout, and answers as an HTTP server with it."""
    found = record("grpc")
    assert found["log"].count(f"sgl-kvpool: KV cache layout fp4: {ROW_BYTES['fp4']} bytes per token") == 1
    assert found["output_ids"] == tokens(record("fp4")["first"])


@pytest.mark.engine("engines")
def test_an_engine_raises_what_its_scheduler_refuses(record):
    """Instead of ending the program by a signal; the Engines of the other tests come after it."""
    refused = record("engines")[0]["refused"]
    assert refused["type"] == "Refusal"
    assert refused["text"].startswith("the host tier needs 1000000.00 GB for ")
    assert refused["text"].endswith("or leave out --enable-hierarchical-cache")


@pytest.mark.engine("refused")
def test_a_server_says_what_its_scheduler_refuses_in_one_line(record):
    refused = record("refused")
    assert refused["status"] == 1
    *before, last = refused["log"].splitlines()
    assert last.startswith("sgl-kvpool: the host tier needs 1000000.00 GB for ")
    assert last.endswith("or leave out --enable-hierarchical-cache")
    assert "Traceback" not in refused["log"]
    assert "Received sigquit" not in refused["log"]
    # The line is the last one. SGLang's log comes before it: the model had been loaded.
    assert any("sgl-kvpool: KV cache layout fp4" in text for text in before)


@pytest.mark.engine("engines")
def test_engine_keyword_and_a_second_engine_without_it(record):
    _, first, second = record("engines")
    assert first["layout"] == "fp4"
    assert first["arrangement"] == "page_major"
    assert second["arrangement"] is None
    assert first["attention_backend"] == "kvpool_mla"
    assert second["layout"] is None
    assert second["attention_backend"] == "torch_native"
    assert first["environment"] == second["environment"] == []
    assert len(first["output_ids"]) == len(second["output_ids"]) == 24


@pytest.mark.engine("engines", "disabled")
def test_the_second_engine_is_stock(record):
    *_, second = record("engines")
    assert second["output_ids"] == record("disabled")["first"][1]["output_ids"]
