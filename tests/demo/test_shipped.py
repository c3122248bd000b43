"""The shipped model and its held-out text, without a server."""

import json
import math
import platform
import sysconfig
from pathlib import Path

import pytest
import torch
from byte_model import read_config, read_model

from sgl_kvpool.demo.model import held_out_windows, model_path
from sgl_kvpool.layout import MLAKVCacheLayout


@pytest.fixture(scope="module")
def facts():
    return json.loads((model_path() / "training.json").read_text())


def test_size_and_shape():
    assert (model_path() / "model.safetensors").stat().st_size <= 16e6
    config = read_config(model_path())
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.layers) == (512, 64, 3)


def test_held_out_text():
    windows = held_out_windows()
    assert len(windows) == len({(w.module, w.offset) for w in windows}) == 32
    assert len({w.module for w in windows}) == 16
    for window in windows:
        assert len(window.text) == len(window.token_ids) == 1024
        assert bytes(window.token_ids).decode("ascii") == window.text


@pytest.mark.slow
def test_perplexity_in_float64(facts):
    """Independent of the training script: float64, softmax by hand, the form that training does not use."""
    net = read_model(model_path(), torch.float64)
    total, count = 0.0, 0
    for window in held_out_windows():
        ids = torch.tensor([window.token_ids])
        with torch.no_grad():
            logits = net(ids, absorbed=True)[0, :-1].numpy()
        for row, following in zip(logits, window.token_ids[1:], strict=True):
            peak = row.max()
            total += peak + math.log(sum(math.exp(x - peak) for x in row)) - row[following]
        count += len(logits)
    perplexity = math.exp(total / count)
    assert perplexity <= 4.0
    assert perplexity == pytest.approx(facts["held_out_perplexity"]["bf16"], rel=1e-3)


def test_card_states_the_facts(facts):
    card = (model_path() / "README.md").read_text()
    assert f"{facts['held_out_perplexity']['bf16']:.3f}" in card
    assert f"{facts['steps']} steps" in card
    assert (model_path() / "LICENSE-held-out.txt").read_text().startswith("A. HISTORY OF THE SOFTWARE")


def test_the_model_opens_with_transformers():
    from transformers import AutoConfig, AutoTokenizer

    assert AutoConfig.from_pretrained(model_path()).kv_lora_rank == 512
    assert AutoTokenizer.from_pretrained(model_path()).encode("a\n") == [97, 10]


def test_held_out_windows_are_what_they_claim(facts):
    """Each window is at its stated place in the Python that the model was trained on."""
    if platform.python_version() != facts["python"]:
        pytest.skip(f"this is not Python {facts['python']}, whose text was held out")
    root = Path(sysconfig.get_path("stdlib"))
    for window in held_out_windows():
        text = (root / window.module).read_bytes()
        assert text[window.offset : window.offset + 1024] == window.text.encode(), window.module


def test_goldens_are_decided_by_more_than_rounding():
    """tests/engine/test_demo.py leaves out answers with smaller margins."""
    goldens = json.loads((Path(__file__).parents[1] / "engine" / "goldens.json").read_text())
    assert list(goldens["greedy"]) == [layout.value for layout in MLAKVCacheLayout]
    for layout, answers in goldens["greedy"].items():
        assert len(answers) == len(goldens["prompts"]) == 5
        assert min(answer["smallest_margin"] for answer in answers) > 0.1, layout
        for answer in answers:
            assert len(answer["token_ids"]) == 48
            assert len(set(answer["token_ids"])) >= 12, layout
