"""The hybrid model in every layout, with a host tier: rows from our pools beside SGLang's states."""

import hybrid_servers
import pytest
from cluster_questions import failures_in
from codec_oracle import NARROW, ROW_BYTES, by_latent
from hybrid_answers import cached, distance, identical, logprobs, of_prompt, same
from hybrid_servers import DEVICE_TOKENS, LAYOUTS

#: Largest mean distance of a prompt's log-probabilities from those of `bf16` rows, twice the measured one;
#: and the least distance of a layout that rounds.
NEAR = by_latent({"bf16": 0.0, "e4m3 / k_scale": 0.1, "e4m3 in tiles": 0.1, "e2m1": 0.25})
ROUNDED = 0.005

everywhere = pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.engine(n)) for n in LAYOUTS])


def layout_of(name):
    return LAYOUTS[name][1]


@everywhere
def test_the_pool_is_ours_and_has_the_rows_of_its_layout(record, name):
    found, layout = record(name), layout_of(name)
    row = ROW_BYTES[layout]
    line = f"KV cache layout {layout}: {row} bytes per token and layer, 2 layers, {DEVICE_TOKENS} tokens"
    assert line in found["log"]
    assert found["info"]["kv_cache_layout"] == layout
    assert "Mamba Cache is allocated. max_mamba_cache_size: 64" in found["log"]
    assert "extend=TorchKDAKernel" in found["log"]


@pytest.mark.engine("hybrid", "hybrid-bf16")
def test_bf16_rows_give_the_answers_of_sglangs_pool(record):
    """Another attention over the same rows: equal but for the order of sums."""
    stock, ours = record("hybrid"), record("hybrid-bf16")
    assert distance(of_prompt(stock["prompt"]), of_prompt(ours["prompt"])) < 0.02
    for one, other in zip(stock["first"], ours["first"], strict=True):
        assert cached(one) == cached(other)
        assert one["output_ids"][:4] == other["output_ids"][:4]


@pytest.mark.parametrize("layout", NARROW)
@pytest.mark.engine("hybrid-bf16", *(f"hybrid-{layout}" for layout in NARROW))
def test_other_rows_are_close_to_bf16_and_not_the_same(record, layout):
    far = distance(*(of_prompt(record(f"hybrid-{name}")["prompt"]) for name in ("bf16", layout)))
    assert ROUNDED < far < NEAR[layout]


@pytest.mark.engine("hybrid-bf16", "hybrid-fp8", "hybrid-fp4")
def test_fewer_bits_are_further_away(record):
    bf16 = of_prompt(record("hybrid-bf16")["prompt"])
    fp8, fp4 = (distance(bf16, of_prompt(record(f"hybrid-{layout}")["prompt"])) for layout in ("fp8", "fp4"))
    assert fp8 < fp4


@everywhere
def test_a_prefix_is_found_with_its_state(record, name):
    found = record(name)
    assert [cached(answer) for answer in found["first"]] == [0, 0, 0, 64]
    assert [cached(answer) for answer in found["again"]] == [64, 0, 0, 320]
    assert cached(found["continued"]) == 192
    for one, other in zip(found["first"], found["again"], strict=True):
        identical(one, other)


@everywhere
def test_requests_at_once_keep_their_own_rows_and_states(record, name):
    found = record(name)
    for one, other in zip(found["alone"], found["together"], strict=True):
        same(one, other)


@everywhere
def test_a_host_hit_restores_rows_and_states(record, name):
    """A prompt that was pushed out comes back to the boundary its state was kept at."""
    found = record(name)
    device, host = found["device_hit"], found["host_hit"]
    assert device["meta_info"]["cached_tokens_details"] == {"device": 320, "host": 0}
    assert host["meta_info"]["cached_tokens_details"] == {"device": 0, "host": 320}
    if "--kv-host-layout" in LAYOUTS[name]:
        # Rows are rounded once more on their way; the state is exact, and a lost state would give another
        # text.
        assert distance(logprobs(host), logprobs(device)) < NEAR["fp4"]
        assert host["output_ids"][:2] == device["output_ids"][:2]
    else:
        identical(device, host)
    identical(found["filled"], device)


@everywhere
def test_nothing_failed_on_the_way(record, name):
    found = record(name)
    assert failures_in(found["metrics"]) == {}
    assert [cached(answer) for answer in found["fillers"]] == [0] * len(hybrid_servers.FILLERS)
