"""What `sgl-kvpool evaluate` computes, and what it refuses before a server starts."""

import json

import numpy as np
import pytest

from sgl_kvpool.cli import main
from sgl_kvpool.demo.measure import Scores, compare_scores, divergence, found_passkey, passkey_prompt
from sgl_kvpool.demo.model import model_path


def best(log_probabilities, count):
    order = np.argsort(-log_probabilities)[:count]
    return [(int(token), float(log_probabilities[token])) for token in order]


def distribution(rng, width=2.0):
    logits = rng.normal(0, width, 257)
    return logits - np.log(np.exp(logits).sum())


@pytest.mark.parametrize("seed", range(5))
def test_divergence_over_all_tokens_is_exact(seed):
    rng = np.random.default_rng(seed)
    p, q = distribution(rng), distribution(rng)
    exact = (np.exp(p) * (p - q)).sum()
    assert divergence(best(q, 257), best(p, 257)) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_divergence_over_few_tokens_is_a_lower_bound(seed):
    """Tokens that are merged into one can only hide a difference; so does an upper bound of a missing one."""
    rng = np.random.default_rng(seed)
    p, q = distribution(rng), distribution(rng)
    exact = (np.exp(p) * (p - q)).sum()
    found = divergence(best(q, 20), best(p, 20))
    assert 0 < found <= exact
    near = p + rng.normal(0, 0.02, 257)
    near -= np.log(np.exp(near).sum())
    exact = (np.exp(p) * (p - near)).sum()
    assert divergence(best(near, 20), best(p, 20)) == pytest.approx(exact, rel=0.6)
    assert divergence(best(p, 20), best(p, 20)) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_hidden_number(depth):
    text, key = passkey_prompt(16_000, depth, seed=3)
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if key in line)
    assert abs(at - depth * len(lines)) < 3
    assert 0.97 < len(text) / 16_000 < 1.05
    assert text.count(key) == 2
    assert text.endswith("The pass key is")
    assert passkey_prompt(16_000, depth, seed=3) == (text, key)
    assert found_passkey(f" {key}. Remember it.", key)
    assert not found_passkey(" 4. " + key, key)
    assert not found_passkey(key + "1", key)
    assert not found_passkey("no idea", key)


def test_divergences_of_windows():
    rng = np.random.default_rng(1)
    rows = [[best(distribution(rng), 20) for _ in range(7)] for _ in range(6)]
    ours, reference = (Scores([[-1.0] * 7] * 3, [[1] * 7] * 3, part) for part in (rows[:3], rows[3:]))
    found = compare_scores(ours, reference)
    means = [
        np.mean([divergence(a, b) for a, b in zip(x, y, strict=True)])
        for x, y in zip(rows[:3], rows[3:], strict=True)
    ]
    assert found.divergence == pytest.approx(np.mean(means))
    assert found.divergence_error == pytest.approx(np.std(means, ddof=1) / np.sqrt(3))
    assert compare_scores(ours, Scores(reference.log_probabilities, reference.top_tokens)).divergence is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--", "--kv-cache-layout", "fp4"],
            "--kv-cache-layout is set by this command; leave it out after --",
        ),
        (["--", "--port=3"], "--port is set by this command"),
        (["--windows", "1"], "--windows is 2 at least, --window-tokens 128, and --hidden-tokens 0"),
        (["--hidden-tokens", "-1"], "--hidden-tokens 0"),
        (["--text", "/no/such/file"], "No such file"),
    ],
)
def test_refusals(tmp_path, capsys, arguments, message):
    out = ["--out", str(tmp_path / "out")]
    assert main(["evaluate", "--model", str(model_path()), *out, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_models_that_cannot_be_evaluated(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    assert main(["evaluate", "--model", str(tmp_path)]) == 2
    assert "is not an MLA model: its config.json has no kv_lora_rank" in capsys.readouterr().err
    assert main(["evaluate", "--model", str(tmp_path / "config.json")]) == 2
    assert "is a file; a server needs the checkpoint's folder" in capsys.readouterr().err


def test_a_folder_of_another_run(tmp_path, capsys):
    """Results are neither mixed nor replaced."""
    earlier = {"evaluated": {"windows": 3}, "hidden_characters": 0, "results": []}
    (tmp_path / "evaluate.json").write_text(json.dumps(earlier))
    assert main(["evaluate", "--model", str(model_path()), "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "has results of another model, " in said
    assert "; name another folder with --out" in said
    assert json.loads((tmp_path / "evaluate.json").read_text()) == earlier
