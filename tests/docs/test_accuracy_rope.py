"""scripts/accuracy/rope.py attends the rows it stores, and its 4-bit rope is the codec's and SGLang's."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")

from scripts.accuracy import rope as accuracy_rope
from sgl_kvpool.demo.checkpoint import read_model
from sgl_kvpool.demo.model import held_out_windows, model_path

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def net():
    return read_model(model_path())


@pytest.fixture(scope="module")
def windows():
    return [window.token_ids[:192] for window in held_out_windows()[::11]]


def exactly(values):
    return values.float()


def test_rows_that_are_kept_give_the_models_own_numbers(net, windows):
    found = accuracy_rope.scores(net, accuracy_rope.StoredRows(net, exactly, exactly), windows)
    assert [len(window) for window in found.top_tokens] == [191] * len(windows)
    ids = torch.tensor(windows)
    with torch.inference_mode():
        predicted = net(ids, absorbed=True)[:, :-1].log_softmax(-1)
    wanted = predicted.gather(-1, ids[:, 1:, None]).squeeze(-1)
    # The script rounds rows to bf16, as a server does; the model itself does not.
    distance = (torch.tensor(found.log_probabilities) - wanted).abs()
    assert distance.mean() < 0.01
    assert (torch.tensor(found.top_tokens) == predicted.argmax(-1)).float().mean() > 0.98


def test_each_part_of_a_row_is_stored_in_its_own_form(net, windows):
    def nothing(values):
        return torch.zeros(values.shape)

    kept = accuracy_rope.scores(net, accuracy_rope.StoredRows(net, exactly, exactly), windows[:1])
    for forms in ((nothing, exactly), (exactly, nothing)):
        lost = accuracy_rope.scores(net, accuracy_rope.StoredRows(net, *forms), windows[:1])
        assert lost.perplexity > 1.1 * kept.perplexity


def test_narrow_rows_are_stored_as_in_wide_ones():
    """64 rotary values beside the same 64 at the head of a latent, by the oracle of the codec's tests."""
    from codec_oracle import decode, encode

    values = torch.randn(6, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    wide = torch.cat([values, values], -1)
    expected = decode(encode(wide, None, "fp4", 128, 0, 80), "fp4", 128, 0)[:, :64]
    assert (accuracy_rope.FORMS[accuracy_rope.OURS](values).numpy() == expected).all()


def test_the_committed_results_are_of_these_cases():
    fields = json.loads((ROOT / "docs" / "benchmarks" / "rope_cpu.json").read_text())
    assert [tuple(r["job"].values()) for r in fields["results"]] == list(accuracy_rope.CASES)
    assert fields["scored_tokens"] == sum(len(window.token_ids) - 1 for window in held_out_windows())
    # The second is `fp4`, which the server measured too, with bf16 weights.
    served = json.loads((ROOT / "docs" / "benchmarks" / "demo_cpu.json").read_text())["results"]
    fp4 = next(result for result in served if result["layout"] == "fp4")["difference"]
    ours = fields["results"][1]["difference"]
    error = max(fp4["standard_error"], ours["standard_error"])
    assert ours["perplexity_change"] == pytest.approx(fp4["perplexity_change"], abs=3 * error)
