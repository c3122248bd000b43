"""The forms of docs/accuracy.md are the formats they are named after."""

import numpy as np
import pytest
import torch

from scripts.accuracy import forms


def test_latents_are_the_same_every_time_and_what_they_are_called():
    kurtosis = {}
    for name in forms.DISTRIBUTIONS:
        values = forms.latents(name, 256)
        assert torch.equal(values, forms.latents(name, 256))
        assert (values.dtype, values.shape) == (torch.bfloat16, (256, 512))
        wide = values.double()
        kurtosis[name] = (wide.pow(4).mean() / wide.square().mean().square()).item()
        if name.startswith("N("):
            assert wide.std().item() == pytest.approx(float(name[5:-1]), rel=0.02)
            assert kurtosis[name] == pytest.approx(3, rel=0.1)
    assert min(value for name, value in kurtosis.items() if not name.startswith("N(")) > 10
    channels = forms.latents("8 channels x30", 256).double().std(0)
    assert int((channels > 15).sum()) == 8


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
