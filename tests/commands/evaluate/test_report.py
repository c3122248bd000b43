"""What the demo computes from answers, and how it shows it."""

import dataclasses
import json
import math

import numpy as np
import pytest
from one_result import BF16

from sgl_kvpool.commands.evaluate import measure, report
from sgl_kvpool.commands.evaluate.measure import Difference, HostHit, Scores, compare_hits, compare_scores


def scores(rng, shift=0.0):
    """Five windows of unequal lengths."""
    lengths = (3, 61, 17, 1, 40)
    return Scores(
        [(-rng.exponential(1.2, n) - shift).tolist() for n in lengths],
        [rng.integers(0, 3, n).tolist() for n in lengths],
    )


def flat(windows):
    return np.concatenate([np.asarray(window, np.float64) for window in windows])


def test_differences():
    rng = np.random.default_rng(1)
    reference, ours = scores(rng), scores(rng, shift=0.25)
    assert ours.perplexity == pytest.approx(np.exp(-flat(ours.log_probabilities).mean()), rel=1e-12)
    found = compare_scores(ours, reference)
    a, b = flat(ours.log_probabilities), flat(reference.log_probabilities)
    assert found.perplexity_change == pytest.approx(np.exp(b.mean() - a.mean()) - 1)
    assert found.same_top_token == (flat(ours.top_tokens) == flat(reference.top_tokens)).mean()
    means = [
        np.mean(theirs) - np.mean(mine)
        for mine, theirs in zip(ours.log_probabilities, reference.log_probabilities, strict=True)
    ]
    expected = np.exp(b.mean() - a.mean()) * np.std(means, ddof=1) / np.sqrt(5)
    assert found.standard_error == pytest.approx(expected)
    assert compare_scores(ours, ours) == Difference(0.0, 0.0, 1.0)
    one = compare_scores(Scores([[-1.0, -2.0]], [[1, 2]]), Scores([[-1.5, -2.5]], [[1, 3]]))
    assert math.isnan(one.standard_error)
    with pytest.raises(ValueError, match="windows of other lengths"):
        compare_scores(Scores([[-1.0, -1.0]], [[1, 1]]), Scores([[-1.0]], [[1]]))


def hit(device=0, host=0, tokens=(1, 2, 3)):
    return {"prompt_tokens": 1000, "details": {"device": device, "host": host}, "ids": list(tokens)}


def test_hits_that_are_compared():
    assert compare_hits(hit(device=960), hit(host=960)) == HostHit(1000, 960, 3, True)
    for device, host in (
        (hit(device=960), hit(host=960, tokens=(1, 2, 4))),
        (hit(device=960), hit(host=896)),
        (hit(device=960), hit(device=960)),
        (hit(device=960), hit(device=64, host=896)),
        (hit(), hit()),
    ):
        assert not compare_hits(device, host).same_tokens


@pytest.fixture
def results():
    fp4 = dataclasses.replace(BF16, layout="fp4", row_bytes=416, tokens=45371, perplexity=3.012)
    difference = Difference(0.004, 0.0012, 0.98765, 0.0123, 0.00045)
    fp4 = dataclasses.replace(fp4, difference=difference, hidden=[True, False])
    return [dataclasses.replace(BF16, hidden=[True, True]), fp4]


def test_a_wrong_hit_in_the_host_tier_is_said(results):
    hits = [HostHit(1000, 960, 32, same) for same in (True, False)]
    text = report.answers([dataclasses.replace(r, host_hit=h) for r, h in zip(results, hits, strict=True)])
    assert "host tier, bf16: 960 of 1000 tokens of an evicted prompt came back from host memory" in text
    assert "are NOT as after a hit on the device" in text.partition("host tier, fp4: 960")[2]
    assert "host tier, every layout: not shown, SGLang keeps 10 GiB" in report.answers(results)


def test_table(results):
    lines = report.table(results, "byte").splitlines()
    assert lines[2].split() == ["bf16", "1152", "16384", "3.0000", "-", "-", "-", "2", "of", "2"]
    expected = "fp4 416 45371 3.0120 +0.40 % (0.12) 0.01230 (0.00045) 98.77 % 1 of 2"
    assert lines[3].split() == expected.split()
    not_asked = report.table([results[0], dataclasses.replace(results[1], hidden=None)], "byte")
    assert not_asked.splitlines()[3].endswith(" -")
    drafts = [dataclasses.replace(r, accepted_drafts=d) for r, d in zip(results, ([2, 1], []), strict=True)]
    lines = report.table(drafts, "byte").splitlines()
    assert "  accepted drafts  " in lines[0]
    assert "  1.500 (0.500)  " in lines[2]
    assert lines[3].split()[-6:] == ["98.77", "%", "-", "1", "of", "2"]
    assert lines[4] == report.NO_STEPS
    alone = dataclasses.replace(results[1], difference=None)
    assert "bf16 was not among --layouts" in report.table([alone], "byte")


FACTS = {"machine": "x86_64", "cpu": "a processor", "cores": 2, "versions": {"sglang": "0.5.23"}}
FACTS |= {"held_out_tokens_scored": 1024, "token": "byte", "date": "2026-11-24"}


def test_results_are_read_and_drawn_again(tmp_path, results):
    pytest.importorskip("matplotlib")
    report.write_json(tmp_path / "demo.json", results, FACTS)
    fields = json.loads((tmp_path / "demo.json").read_text())
    assert (fields["schema"], fields["cores"]) == (1, 2)
    first = fields["results"][0]
    first["greedy"] = [measure.Greedy(**one) for one in first["greedy"]]
    assert report.Result(**first) == results[0]
    report.write_plot(tmp_path / "again.png", report.read_results(fields), "a model", FACTS)
    report.write_plot(tmp_path / "demo.png", results, "a model", FACTS)
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "demo.png").read_bytes()
