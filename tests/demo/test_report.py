"""What the demo computes from answers, and how it shows it."""

import dataclasses
import json
import math
import sys

import numpy as np
import pytest

from sgl_kvpool.demo import report
from sgl_kvpool.demo.measure import (
    Difference,
    Greedy,
    HostHit,
    Scores,
    TieredHit,
    compare_hits,
    compare_scores,
)


def scores(rng, shift=0.0):
    """Five windows of unequal lengths."""
    lengths = (3, 61, 17, 1, 40)
    return Scores(
        [(-rng.exponential(1.2, n) - shift).tolist() for n in lengths],
        [rng.integers(0, 3, n).tolist() for n in lengths],
    )


def flat(windows):
    return np.concatenate([np.asarray(window, np.float64) for window in windows])


def test_perplexity():
    ours = scores(np.random.default_rng(0))
    assert ours.perplexity == pytest.approx(np.exp(-flat(ours.log_probabilities).mean()), rel=1e-12)
    # Every byte equally likely.
    assert Scores([[-math.log(256)] * 7], [[0] * 7]).perplexity == pytest.approx(256)


def test_differences():
    rng = np.random.default_rng(1)
    reference, ours = scores(rng), scores(rng, shift=0.25)
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


def test_no_difference_to_itself():
    ours = scores(np.random.default_rng(2))
    assert compare_scores(ours, ours) == Difference(0.0, 0.0, 1.0)


def test_one_window_has_no_standard_error():
    one, other = Scores([[-1.0, -2.0]], [[1, 2]]), Scores([[-1.5, -2.5]], [[1, 3]])
    found = compare_scores(one, other)
    assert math.isnan(found.standard_error)
    assert found.same_top_token == 0.5


def hit(device=0, host=0, tokens=(1, 2, 3)):
    return TieredHit(prompt_tokens=1000, device_tokens=device, host_tokens=host, token_ids=list(tokens))


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


def test_lines_of_the_host_tier(results):
    good, bad = HostHit(1000, 960, 32, True), HostHit(1000, 960, 32, False)
    same = [dataclasses.replace(result, host_hit=good) for result in results]
    line = (
        "960 of 1000 tokens of an evicted prompt came back from host memory; the next 32 are as after a hit"
    )
    assert f"host tier, every layout: {line}" in report.answers(same)
    mixed = [dataclasses.replace(results[0], host_hit=good), dataclasses.replace(results[1], host_hit=bad)]
    text = report.answers(mixed)
    assert f"host tier, bf16: {line}" in text
    assert "host tier, fp4: 960" in text
    assert "are NOT as after a hit on the device" in text
    assert "host tier, every layout: not shown, SGLang keeps 10 GiB" in report.answers(results)
    assert f"host tier: {line}" in report.answers(same[1:])  # a single layout is not "every"


def test_a_host_tier_where_there_is_room(monkeypatch):
    """A server has a host tier where doctor finds memory for it; pages have 64 tokens in any case."""
    from sgl_kvpool.commands.doctor.probes import Finding
    from sgl_kvpool.demo import compare
    from sgl_kvpool.demo.model import choose
    from sgl_kvpool.layout import MLAKVCacheLayout

    for host_tier_bytes, wanted in ((None, False), (0, False), (3 << 30, False), (5 << 30, True)):
        monkeypatch.setattr(compare, "host", lambda n=host_tier_bytes: Finding({"host_tier_bytes": n}))
        server = compare.layout_server(choose("bytes", print), MLAKVCacheLayout.FP4, 1, "log")
        assert ("--enable-hierarchical-cache" in server.arguments) == wanted
        assert ("--page-size", "64") in zip(server.arguments, server.arguments[1:], strict=False)


def test_unequal_texts_are_not_compared():
    with pytest.raises(ValueError):
        compare_scores(Scores([[-1.0]], [[1]]), Scores([[-1.0], [-1.0]], [[1], [1]]))
    with pytest.raises(ValueError, match="windows of other lengths"):
        compare_scores(Scores([[-1.0, -1.0]], [[1, 1]]), Scores([[-1.0]], [[1]]))


@pytest.fixture
def results(bf16):
    fp4 = dataclasses.replace(
        bf16,
        layout="fp4",
        row_bytes=416,
        tokens=45371,
        perplexity=3.012,
        difference=Difference(0.004, 0.0012, 0.98765, 0.0123, 0.00045),
    )
    return [bf16, fp4]


def test_table(results):
    lines = report.table(results, "byte").splitlines()
    assert lines[2].split() == ["bf16", "1152", "16384", "3.0000", "-", "-", "-"]
    expected = "fp4 416 45371 3.0120 +0.40 % (0.12) 0.01230 (0.00045) 98.77 %"
    assert lines[3].split() == expected.split()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1


def test_table_with_hidden_numbers(results):
    found = [dataclasses.replace(one, pool_bytes=None, hidden=[True, n > 0]) for n, one in enumerate(results)]
    lines = report.table(found, "token").splitlines()
    assert [line.rpartition("  ")[2].strip() for line in lines] == [
        "hidden numbers",
        "found",
        "1 of 2",
        "2 of 2",
    ]
    assert "the pool" in lines[1]


def test_a_change_of_zero_is_printed_without_a_minus_sign(results):
    same = dataclasses.replace(results[1], difference=Difference(-1e-7, 1e-7, 1.0))
    assert "+0.00 % (0.00)" in report.table([results[0], same], "byte")


def test_table_without_bf16_says_why_there_are_no_differences(results):
    alone = dataclasses.replace(results[1], difference=None)
    text = report.table([alone], "byte")
    assert "bf16 was not among --layouts" in text
    assert "bf16 was not among" not in report.table(results, "byte")


def test_json_round_trip(tmp_path, results):
    report.write_json(tmp_path / "demo.json", results, {"cores": 2})
    fields = json.loads((tmp_path / "demo.json").read_text())
    assert fields["schema"] == 1
    assert fields["cores"] == 2
    first, second = fields["results"]
    first["greedy"] = [Greedy(**one) for one in first["greedy"]]
    assert report.Result(**first) == results[0]
    assert Difference(**second.pop("difference")) == results[1].difference
    assert second["perplexity"] == 3.012


FACTS = {
    "machine": "x86_64",
    "cpu": "a processor",
    "cores": 2,
    "versions": {"sglang": "0.5.23"},
    "held_out_tokens_scored": 1024,
    "token": "byte",
    "date": "2026-11-24",
}


@pytest.fixture
def texts(monkeypatch):
    """`texts(results)`: every text of the plot; the pixels go to the folder of the test."""
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, path, dpi: drawn.append((self, self.canvas.print_png(path)))
    )

    def draw(path, results):
        from matplotlib.text import Text

        report.write_plot(path, results, "a model", FACTS)
        return drawn[-1][0], [text.get_text() for text in drawn[-1][0].findobj(Text)]

    return draw


def test_plot_names_what_was_measured_where_and_when(tmp_path, results, texts):
    image = pytest.importorskip("matplotlib.image")
    _figure, shown = texts(tmp_path / "demo.png", results)
    title = (
        "a model, served once per layout\na processor, 2 cores, SGLang 0.5.23, 1024 bytes scored, 2026-11-24"
    )
    assert title in shown
    for result in results:
        assert f"{result.layout}\n{result.row_bytes}-byte rows" in shown
        assert f"{result.tokens}" in shown
    assert {"reference", "+0.40 % (0.12)"} <= set(shown)
    pixels = image.imread(tmp_path / "demo.png")
    # Something is drawn, on a background.
    assert 0.5 < (pixels[..., :3].min(axis=-1) > 0.99).mean() < 0.99


def test_plot_has_a_visible_standard_error(tmp_path, results, texts):
    figure, _ = texts(tmp_path / "demo.png", results)
    _, right = figure.axes
    (lines,) = (one for one in right.containers if hasattr(one, "has_xerr"))
    (bars,) = lines.lines[2]
    error = 100 * results[1].difference.standard_error
    (begin, _), (end, _) = bars.get_segments()[1]
    assert end - begin == pytest.approx(2 * error)


def test_plot_without_bf16_shows_perplexities(tmp_path, results, texts):
    _, shown = texts(tmp_path / "demo.png", [dataclasses.replace(results[1], difference=None)])
    assert "perplexity per byte, lower is better" in shown
    assert "reference" not in shown


def test_a_committed_json_is_drawn_again(tmp_path, results, monkeypatch):
    pytest.importorskip("matplotlib")
    report.write_json(tmp_path / "demo.json", results, FACTS)
    files = [str(tmp_path / name) for name in ("demo.json", "again.png")]
    monkeypatch.setattr(sys, "argv", ["report", *files, "a model"])
    assert report.main() == 0
    report.write_plot(tmp_path / "demo.png", results, "a model", FACTS)
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "demo.png").read_bytes()
