"""What `sgl-kvpool evaluate` computes, and what it refuses before a server starts."""

import argparse
import dataclasses
import gzip
import json
import re
import shutil
import sys
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest

from sgl_kvpool.cli import main
from sgl_kvpool.commands import evaluate
from sgl_kvpool.commands.evaluate import measure, report
from sgl_kvpool.commands.evaluate.measure import Scores, accepted_drafts, compare_scores, divergence, score
from sgl_kvpool.demo.model import model_path
from sgl_kvpool.layout import MLAKVCacheLayout


def best(log_probabilities, count):
    order = np.argsort(-log_probabilities)[:count]
    return [(int(token), float(log_probabilities[token])) for token in order]


def distribution(rng, width=2.0):
    logits = rng.normal(0, width, 257)
    return logits - np.log(np.exp(logits).sum())


@pytest.mark.parametrize("seed", range(5))
def test_divergence_over_all_tokens_is_exact_and_over_few_a_lower_bound(seed):
    """Tokens that are merged into one can only hide a difference; so does an upper bound of a missing one."""
    rng = np.random.default_rng(seed)
    p, q = distribution(rng), distribution(rng)
    exact = (np.exp(p) * (p - q)).sum()
    assert divergence(best(q, 257), best(p, 257)) == pytest.approx(exact, rel=1e-6)
    found = divergence(best(q, 20), best(p, 20))
    assert 0 < found <= exact
    near = p + rng.normal(0, 0.02, 257)
    near -= np.log(np.exp(near).sum())
    exact = (np.exp(p) * (p - near)).sum()
    assert divergence(best(near, 20), best(p, 20)) == pytest.approx(exact, rel=0.6)
    assert divergence(best(p, 20), best(p, 20)) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_hidden_number(depth):
    text, key = measure.passkey_prompt(16_000, depth, seed=3)
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if key in line)
    assert abs(at - depth * len(lines)) < 3
    assert 0.97 < len(text) / 16_000 < 1.05
    assert text.count(key) == 2
    assert text.endswith("The pass key is")
    assert measure.passkey_prompt(16_000, depth, seed=3) == (text, key)


def test_the_first_number_of_an_answer_counts():
    forms = iter([" {}. Remember it.", " 4. {}", "{}1", "no idea"])

    def generate(text, sampling_params):
        return {"text": next(forms).format(re.search(r"\d+", text).group())}

    found = measure.find_passkeys(SimpleNamespace(generate=generate), 16_000, [0.0, 0.3, 0.6, 1.0])
    assert found == [True, False, False, False]


def test_accepted_drafts():
    """An answer, which SGLang cut before its first step, has no counts; so have all without drafts."""
    asked = []

    def generate(input_ids, sampling_params):
        asked.append((list(map(len, input_ids)), sampling_params["max_new_tokens"]))
        counts = [(4, 6), (0, 0), (8, 0), (5, 15)][: len(input_ids)]
        names = "spec_verify_ct", "spec_num_correct_drafts"
        return [{"meta_info": dict(zip(names, pair, strict=True)) if pair[0] else {}} for pair in counts]

    server = SimpleNamespace(generate=generate)
    assert accepted_drafts(server, [[1] * 200] * 5) == [1.5, 0.0, 3.0, 1.5]
    assert asked == [([150] * 4, 50), ([150], 50)]
    assert accepted_drafts(SimpleNamespace(generate=lambda **_: [{"meta_info": {}}]), [[1] * 2000]) == []


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("cached_tokens", 0, "the server found 0 of 2 stored tokens before those to be scored"),
        ("input_token_logprobs", [None, [-1.0, 9]], "scored other tokens than it was sent"),
        ("input_token_logprobs", [None, [None, 4]], "not finite numbers"),
        # As JSON has minus infinity, which fails only when layouts are compared.
        ("input_top_logprobs", [None, [[-1.0, 4], [None, 5]]], "not finite numbers"),
        ("input_top_logprobs", [None], "scored other tokens than it was sent"),
    ],
)
def test_answers_that_measure_nothing_are_refused(field, value, text):
    info = {"cached_tokens": 2, "input_token_logprobs": [None, [-1.0, 4]]}
    info = {**info, "input_top_logprobs": [None, [[-1.0, 4], [-2.0, 5]]]}
    server = SimpleNamespace(generate=lambda **_: [{"meta_info": info}])
    assert score(server, [[1, 2, 3, 4]], 2).top_tokens == [[4]]
    info[field] = value
    with pytest.raises(ValueError, match=text):
        score(server, [[1, 2, 3, 4]], 2)


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
            "--kv-cache-layout is set by this command, or unfit for it; leave it out of what follows --",
        ),
        (["--", "--port=3"], "--port is set by this command"),
        # SGLang takes prefixes of names, and names in a file.
        (["--", "--po", "3"], "--po is set by this command"),
        (["--", "--admin-api-key", "5ecret"], "--admin-api-key is set by this command, or unfit for it"),
        (["--", "--ssl-keyfile-password=5ecret"], "--ssl-keyfile-password is set by this command, or"),
        (["--", '--x={"token": "5ecret"}'], '--x={"token": "SECRET"}: the logs would keep this secret'),
        (["--", "--config", "BROKEN"], 'broken.yaml", line 2, column 1'),
        (["--", "--ssl-certfile", "x"], "--ssl-certfile is set by this command, or unfit for it"),
        (["--", "--config", "CONFIG"], "--api-key is set by this command, or unfit for it; leave"),
        (["--window-tokens", "4096"], "--window-tokens 4096: a context of 4096 allows one less, at most"),
        (["--", "--context-length", "1024"], "--window-tokens 1024: a context of 1024 allows one less"),
        (["--", "--context-len=1024"], "--window-tokens 1024: a context of 1024 allows one less"),
        (["--windows", "1"], "--windows 1 is not a number from 2 to 2147483647"),
        (["--hidden-tokens", "-1"], "--hidden-tokens -1 is not a number from 0"),
        (["--window-tokens", "9" * 400], "--window-tokens 9"),
        (["--text", "/no/such/file"], "--text '/no/such/file': No such file or directory; name another"),
        (["--text", sys.executable], "python': 'utf-8' codec can't decode byte"),
        (["--model", "x" * 5000], "xxx...: File name too long; name another"),
        (["--out", "/dev/null"], "--out '/dev/null': File exists; name another"),
    ],
)
def test_refusals(tmp_path, capsys, arguments, message):
    out, config = ["--out", str(tmp_path / "out")], tmp_path / "config.yaml"
    config.write_text("page-size: 64\napi_key: 5ecret\n")
    (broken := tmp_path / "broken.yaml").write_text('api_key: "5ecret\n')
    paths = {"CONFIG": str(config), "BROKEN": str(broken)}
    arguments = [paths.get(word, word) for word in arguments]
    assert main(["evaluate", "--model", str(model_path()), *out, *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "5ecret" not in said
    assert not (tmp_path / "out").exists()


def subject_of(model, *words):
    """What `evaluate` serves and asks."""
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    return evaluate._subject(parser.parse_args(["--model", str(model), *words]))


@pytest.fixture
def sparse(tmp_path):
    """A checkpoint with sparse attention, as far as this command looks at it."""
    folder = tmp_path / "sparse"
    shutil.copytree(model_path(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "index_topk": 64}))
    return folder


def test_sparse_attention_needs_the_radix_cache(sparse):
    with pytest.raises(ValueError, match="--disable-radix is set by this command, or unfit for it"):
        subject_of(sparse, "--", "--disable-radix")
    assert subject_of(sparse).prefix_tokens == 512
    assert subject_of(model_path(), "--", "--disable-radix").prefix_tokens == 0


def test_the_server_is_started_where_it_is_asked(tmp_path):
    """A published command has the machine's address; of two, SGLang's parser takes the last."""
    subject = subject_of(model_path(), "--", "--host", "192.0.2.1")
    assert subject.server(MLAKVCacheLayout.FP4, tmp_path / "log").arguments[-2:] == ["--host", "127.0.0.1"]


def rewrite(path):
    """Change a file without changing its size."""
    path.write_bytes(path.read_bytes()[::-1])


@pytest.mark.parametrize(
    ("change", "differ"),
    [
        (lambda folder, yaml, versions: rewrite(folder / "model.safetensors"), {"checkpoint"}),
        (lambda folder, yaml, versions: (folder / "config.json").touch(), {"checkpoint"}),
        (lambda folder, yaml, versions: (folder / "hf_quant_config.json").write_text("{}"), {"checkpoint"}),
        (lambda folder, yaml, versions: (folder / "tokenizer.json").unlink(), {"checkpoint"}),
        (lambda folder, yaml, versions: yaml.write_text("page_size: 32"), {"checkpoint"}),
        (lambda folder, yaml, versions: (folder / "nohup.out").write_text("this run's"), set()),
        (lambda folder, yaml, versions: versions.setattr(metadata, "version", len), {"versions"}),
        (lambda folder, yaml, gpu: gpu.setattr(evaluate, "machine", lambda: {"gpu": "H20"}), {"gpu"}),
    ],
    ids=["weights", "config", "quantization", "tokenizer", "--config", "nothing", "SGLang", "GPU"],
)
def test_what_a_run_has_in_common_with_an_earlier_one(sparse, tmp_path, monkeypatch, change, differ):
    yaml = tmp_path / "server.yaml"
    yaml.write_text("page_size: 64")
    words = sparse, "--", "--config", str(yaml)
    before, facts = subject_of(*words), subject_of(*words).facts
    change(sparse, yaml, monkeypatch)
    assert before.is_unchanged() == ("checkpoint" not in differ)
    after = subject_of(*words).facts
    assert {name for name in after if after[name] != facts[name]} == differ


@pytest.mark.parametrize(
    ("config", "lacks"),
    [
        ({"num_hidden_layers": 2}, "kv_lora_rank and qk_rope_head_dim"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
        ({"text_config": None}, "kv_lora_rank and"),
        ({"text_config": [{"kv_lora_rank": 512}]}, "kv_lora_rank and"),
    ],
)
def test_models_that_cannot_be_evaluated(tmp_path, capsys, config, lacks):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["evaluate", "--model", str(tmp_path)]) == 2
    assert f"is not an MLA model: its config.json has no {lacks}" in capsys.readouterr().err
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


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Folder, arguments and files of a run whose only layout was served: 2 windows of 3 scored tokens."""
    folder = tmp_path_factory.mktemp("served")
    config = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_position_embeddings": None}
    (folder / "config.json").write_text(json.dumps(config))
    words = ["evaluate", "--model", str(folder), "--layouts", "fp4", "--", "--device=cpu"]
    subject = subject_of(*words[2:])
    result = report.Result("fp4", 416, None, 64, "kvpool_mla", 1.0, 2.0, 3.5)
    lengths = {"prefix_tokens": 0, "hidden_characters": 0, "held_out_tokens_scored": 6}
    report.write_json(folder / "evaluate.json", [result], {"evaluated": subject.facts, **lengths})
    scores = Scores([[-1.0] * 3] * 2, [[5] * 3] * 2, [[[(5, -1.0)]] * 3] * 2)
    return words, json.loads((folder / "evaluate.json").read_text()), dataclasses.asdict(scores)


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", "[" * 99999, '{"evaluated": null}', "{", "truncated", "fewer", "no", None],
    ids=lambda text: str(text)[:9],
)
def test_a_damaged_folder_is_refused_before_a_server_starts(served, tmp_path, capsys, text):
    words, earlier, scores = served
    is_json = text is not None and text[0] in "[{"
    (tmp_path / "evaluate.json").write_text(text if is_json else json.dumps(earlier))
    if text == "fewer":
        scores = {**scores, "top_tokens": scores["top_tokens"][1:]}
    stored = gzip.compress(json.dumps(scores).encode())
    damaged = tmp_path / ("evaluate.json" if is_json else "scores-fp4.json.gz")
    if text != "no":
        (tmp_path / "scores-fp4.json.gz").write_bytes(stored[:-9] if text == "truncated" else stored)
    status = main([*words[:1], "--out", str(tmp_path), *words[1:]])
    said = capsys.readouterr()
    if text is None:
        assert status == 0
        assert "fp4: taken from" in said.out
        assert "\nnothing is left to serve\n" in said.out
        return
    assert (status, said.out) == (2, "")
    assert f"{damaged} is damaged (" in said.err
    assert f"; remove {tmp_path / 'evaluate.json'} to begin again, or name another folder with" in said.err
