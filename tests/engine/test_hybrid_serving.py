"""Linear-attention layers beside MLA layers, served by SGLang as it is, on the CPU."""

import hybrid_model
import hybrid_servers
import pytest
import torch
from hybrid_answers import LARGEST, MEAN, cached, distance, logprobs, same, tokens
from hybrid_net import Remembered
from tiny_model import PROMPTS


@pytest.fixture(scope="module")
def net(record):
    """The served model in fp32, in this process."""
    return hybrid_model.read(record("hybrid")["model_path"], torch.float32)


def expected(net, prompt, ids, **kwargs):
    """Log-probabilities of `ids` after `prompt`, of the plain net."""
    before = list(prompt.encode())
    table = Remembered(net, **kwargs).logits(torch.tensor(before + ids)).log_softmax(-1)
    return table[range(len(before) - 1, len(before) + len(ids) - 1), ids].tolist()


@pytest.mark.engine("hybrid")
def test_sglang_sees_a_hybrid_model(record):
    log = record("hybrid")["log"]
    for line in (
        "Mamba Cache is allocated. max_mamba_cache_size: 64",
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 16384, KV size: 0.04 GB",
        "extend=TorchKDAKernel",
        "Components: (<ComponentType.FULL: 0>, <ComponentType.MAMBA: 2>)",
        "type=KimiLinearForCausalLM",
    ):
        assert line in log


@pytest.mark.engine("hybrid")
@pytest.mark.parametrize("pass_", ["first", "again", "alone", "together"])
def test_answers_are_those_of_the_plain_net(record, net, pass_):
    found = record("hybrid")[pass_]
    prompts = PROMPTS if len(found) == len(PROMPTS) else hybrid_servers.APART
    for prompt, answer in zip(prompts, found, strict=True):
        wanted = expected(net, prompt, tokens(answer))
        assert distance(logprobs(answer), wanted) < MEAN
        assert logprobs(answer) == pytest.approx(wanted, abs=LARGEST)


@pytest.mark.engine("hybrid")
def test_output_depends_on_the_states_and_on_the_rows(record, net):
    entries = record("hybrid")["prompt"]["meta_info"]["input_token_logprobs"]
    ids, served = [entry[1] for entry in entries], [entry[0] for entry in entries[1:]]
    half = len(ids) // 2

    def tail(**kwargs):
        table = Remembered(net, **kwargs).logits(torch.tensor(ids)).log_softmax(-1)
        return table[range(half, len(ids) - 1), ids[half + 1 :]].tolist()

    assert distance(served[half:], tail()) < MEAN
    # Either kind of memory lost half-way, all else kept.
    assert distance(served[half:], tail(forget_at=half)) > 5 * MEAN
    assert distance(served[half:], tail(hide_before=half)) > 5 * MEAN


@pytest.mark.engine("hybrid")
def test_a_prefix_is_found_as_far_as_its_state_was_kept(record):
    found = record("hybrid")
    # Of 110, 60, 38 and 340 tokens; the last begins as the first does, whose state was kept at 64.
    assert [cached(answer) for answer in found["first"]] == [0, 0, 0, 64]
    assert [cached(answer) for answer in found["again"]] == [64, 0, 0, 320]
    for one, other in zip(found["first"], found["again"], strict=True):
        same(one, other)


@pytest.mark.engine("hybrid")
def test_a_state_that_was_kept_while_decoding_is_found(record, net):
    found = record("hybrid")
    # The last of 230 tokens is not stored; 192 is the last multiple of 64 before.
    assert cached(found["continued"]) == 192
    prompt = PROMPTS[0] + found["long"]["text"]
    wanted = expected(net, prompt, tokens(found["continued"]))
    assert logprobs(found["continued"]) == pytest.approx(wanted, abs=LARGEST)
    assert distance(logprobs(found["continued"]), wanted) < MEAN


@pytest.mark.engine("hybrid")
def test_requests_at_once_keep_their_own_states(record, net):
    found = record("hybrid")
    assert [cached(answer) for answer in found["alone"] + found["together"]] == [0] * 12
    for one, other in zip(found["alone"], found["together"], strict=True):
        same(one, other)
    # Each is the plain net's answer to its own prompt, as tested above, and must not be its answer to
    # another.
    for row, answer in enumerate(found["together"]):
        stranger = expected(net, hybrid_servers.APART[row - 1], tokens(answer))
        assert distance(logprobs(answer), stranger) > 5 * MEAN
