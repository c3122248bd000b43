"""`sgl-kvpool demo --model bytes`: real servers, one table, and limits of its numbers.

`goldens.json` holds the greedy tokens per layout. They are the same for all layouts, by wide margins;
`test_stored_rows_were_read` tells the layouts apart. After a change that is meant to change the tokens
(model, prompts, codec): ``python tests/engine/write_goldens.py demo-results/demo.json``.
"""

import json
import re
from pathlib import Path

import pytest
from codec_oracle import LAYOUTS, ROW_BYTES, STORED, by_latent

from sgl_kvpool.demo.model import model_path

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def goldens():
    return json.loads((HERE / "goldens.json").read_text())


@pytest.fixture
def results(record):
    return {result["layout"]: result for result in record("demo")["results"]}


@pytest.mark.engine("demo")
def test_what_the_command_leaves(record):
    found = record("demo")
    logs = [f"{of}-{name}.log" for name in LAYOUTS for of in ("server", "answers")]
    assert found["files"] == sorted(["demo.json", "demo.png", *logs])
    assert found["schema"] == 1
    assert found["held_out_tokens_scored"] == 32 * 1023
    lines = found["printed"].splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("layout "))
    rows = [line.split() for line in lines[head + 2 : head + 2 + len(LAYOUTS)]]
    assert [row[0] for row in rows] == LAYOUTS
    assert [row[1] for row in rows] == [str(ROW_BYTES[name]) for name in LAYOUTS]
    assert any(line.startswith("[4/5] fp4: ready after ") for line in lines)


@pytest.mark.engine("demo")
def test_tokens_in_the_same_memory(results):
    for name in LAYOUTS:
        assert results[name]["tokens"] == 8192 * 1152 // ROW_BYTES[name] // 64 * 64, name


@pytest.mark.engine("demo")
def test_perplexity_through_the_server(results):
    """The limits set for the shipped model; offline perplexities differ by bfloat16 arithmetic only."""
    offline = json.loads((model_path() / "training.json").read_text())["held_out_perplexity"]
    assert results["bf16"]["perplexity"] <= 4.0
    for name in LAYOUTS:
        assert results[name]["perplexity"] == pytest.approx(offline[name], rel=3e-3), name
    change = {name: abs(results[name]["difference"]["perplexity_change"]) for name in LAYOUTS[1:]}
    # Wider for `fp8`: its rows have no scale of their own.
    limits = by_latent({"bf16": 0.0, "e4m3 / k_scale": 0.05, "e4m3 in tiles": 0.002, "e2m1": 0.01})
    assert all(one <= limits[name] for name, one in change.items()), change


@pytest.mark.engine("demo")
def test_a_prompt_comes_back_from_host_memory(record, results):
    """Layer-major pools of every layout; only on a machine with 15 GiB of free memory."""
    if any(results[name]["host_hit"] is None for name in LAYOUTS):
        pytest.skip("the demo has a host tier only with 15 GiB of free memory; SGLang keeps 10 of them")
    hit = {"prompt_tokens": 1000, "host_tokens": 960, "generated_tokens": 32, "same_tokens": True}
    for name in LAYOUTS:
        assert results[name]["host_hit"] == hit
    assert "host tier, every layout: 960 of 1000 tokens" in record("demo")["printed"]


@pytest.mark.engine("demo")
def test_stored_rows_were_read(results):
    """Some most probable tokens differ from BF16's, more of them with FP4 than with FP8 with scales."""
    same = {name: results[name]["difference"]["same_top_token"] for name in LAYOUTS[1:]}
    for name in (name for name in LAYOUTS if STORED[name][0] == "e2m1"):
        assert 0.9 < same[name] < same["fp8_block_scale"] < 1, name
    assert 0.9 < same["fp8"] < 1


@pytest.mark.engine("demo")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_tokens(record, results, goldens, layout):
    assert goldens["prompts"] == record("demo")["prompts"]
    # Where a margin is within bfloat16's rounding of the logits, another CPU may give another token.
    golden = goldens["greedy"][layout]
    wide = [number for number, one in enumerate(golden) if one["smallest_margin"] > 0.1]
    expected = [golden[number]["token_ids"] for number in wide]
    found = [results[layout]["greedy"][number]["token_ids"] for number in wide]
    assert len(wide) >= 4
    texts = [[bytes(ids).decode() for ids in answers] for answers in (found, expected)]
    assert texts[0] == texts[1]


@pytest.mark.engine("killed")
def test_a_killed_server_is_reported_in_one_line(record):
    found = record("killed")
    assert found["status"] == 1
    lines = found["printed"].splitlines()
    end = " failed: the server's process scheduler_0 ended with signal 9 (Killed; out of memory?)"
    assert any(line.startswith("[1/1] fp4: ready after ") for line in lines)
    assert lines[-2] == f"[1/1] fp4:{end}"
    assert lines[-1].startswith("the server's log: ")


@pytest.mark.engine("evaluated")
def test_evaluation_of_a_checkpoint(record):
    found = record("evaluated")
    first, second = found["printed"]
    names = ["bf16", "fp4", "fp4_fp8_rope"]
    logs = [f"server-{name}.log" for name in names] + [f"scores-{name}.json.gz" for name in names]
    assert found["files"] == sorted(["evaluate.json", "evaluate.png", *logs])
    assert re.search(r"^\[1/2\] bf16: ready after ", first, re.MULTILINE)
    assert second.startswith("bf16: taken from ")
    results = {result["layout"]: result for result in found["results"]}
    assert list(results) == names
    assert results["bf16"]["difference"] is None
    good, damaged = (results[name]["difference"] for name in names[1:])
    assert 0 < good["divergence"] < 0.01
    assert abs(good["perplexity_change"]) < 0.01
    assert good["same_top_token"] > 0.95
    # A layout that is made worse on purpose is noticed by every measure.
    assert damaged["divergence"] > 10 * good["divergence"]
    assert damaged["perplexity_change"] > 0.1
    assert damaged["same_top_token"] < 0.9
    assert all(len(result["hidden"]) == 5 for result in found["results"])
    assert "hidden numbers" in second
    assert "accepted drafts" not in second
    assert {result["accepted_drafts"] for result in found["results"]} == {None}


@pytest.mark.engine("evaluated")
def test_an_evaluation_that_was_killed(record):
    """Linux kills it, and its servers' processes with it; scores are there, and not computed again."""
    found = record("evaluated")["killed"]
    assert (found["left"], found["family"] >= 4) == ([], True)
    (before,) = found["results"]
    after = record("evaluated")["results"][0]
    assert before["hidden"] is None
    assert {**after, "hidden": None} == before


@pytest.mark.engine("evaluated")
def test_windows_behind_stored_rows(record):
    """In a pool of 12 pages, whose server would listen elsewhere and find no prefixes; and in one of 6."""
    (status, _, results), small = record("evaluated")["pools"]
    assert (status, results["prefix_tokens"], results["held_out_tokens_scored"]) == (0, 256, 5 * 255)
    assert len(results["results"][0]["hidden"]) == 5
    assert re.search(r"failed: ValueError: the server found \d+ of 256 stored tokens before", small[1])
    assert (small[0], "goes on" in small[1], small[2]) == (1, False, False)
