"""Which engine a host tier of a GPU pool gets."""

import pytest
import torch
from emulated import calls

from sgl_kvpool.transfer.channel import EngineRequest, _gpu_engines
from sgl_kvpool.transfer.gpu_engine import RegisteredChunks


def fails():
    raise RuntimeError("ninja exited with status 1")


@pytest.mark.parametrize(
    ("requested", "chunks", "gpu_calls", "name"),
    [
        ("auto", RegisteredChunks(), calls, "staged"),
        *((name, RegisteredChunks(), calls, name) for name in ("staged", "copy_engine", "kernel")),
        ("auto", RegisteredChunks(), fails, "torch"),
        # The GPU engines, whose compilation takes 10 s, are not compiled for pageable memory.
        ("auto", None, fails, "torch"),
        ("kernel", None, fails, "torch"),
    ],
)
def test_engines(failures, requested, chunks, gpu_calls, name):
    made = _gpu_engines(4096, torch.device("cpu"), EngineRequest(requested, chunks, gpu_calls))
    assert [getattr(one, "func", one).name for one in made] == [name, name]
    assert failures() == ({"engine_build": 1} if chunks and name == "torch" else {})


def test_an_engine_that_is_named_and_cannot_be_built():
    with pytest.raises(RuntimeError, match="ninja"):
        _gpu_engines(4096, torch.device("cpu"), EngineRequest("kernel", RegisteredChunks(), fails))
