"""Few threads, fixed random numbers."""

import os

import pytest
import torch

from sgl_kvpool.codec import compiled


@pytest.fixture(autouse=True, scope="session")
def _few_threads():
    torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(autouse=True)
def _fresh_random_numbers():
    torch.manual_seed(1234)


@pytest.fixture(scope="module", params=["compiled", "torch"])
def each_encoder(request):
    """The CPU's compiled encoder, then the encoder that replaces it where nothing can be compiled."""
    if request.param == "compiled":
        assert compiled.module(required=True) is not None
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "module", lambda **_: None)
        yield
