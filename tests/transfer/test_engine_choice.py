"""Choice of the engine from measured rates. The rates themselves need a GPU."""

import logging

import pytest
import torch

from sgl_kvpool.transfer import channel
from sgl_kvpool.transfer.engine_choice import LinkRates, choose

ALL = {"run_bytes": 73728, "converts": False, "io_backend": "direct", "is_pinned": True}


def rates(link=55.0, **gb_per_s):
    return LinkRates(link, {int(n.removeprefix("_")): rate for n, rate in gb_per_s.items()})


#: The copy engine reaches 95 % of the link, 52.25 GB/s, from 65536 bytes on.
SOME = rates(_8192=7.0, _16384=20.0, _32768=45.0, _65536=52.3, _131072=53.0)


@pytest.mark.parametrize(
    ("found", "crossover"),
    [
        (SOME, 65536),
        (rates(_8192=54.0, _16384=54.0), 8192),
        (rates(_8192=54.0, _16384=40.0, _32768=54.0), 32768),  # what lies below a gap does not count
        (rates(_8192=1.0, _1048576=52.0), None),
        (rates(), None),
    ],
)
def test_crossover(found, crossover):
    assert found.crossover_bytes == crossover


@pytest.mark.parametrize(
    ("changes", "engine", "reason"),
    [
        ({}, "copy_engine", "runs of 73728 bytes; the link is saturated from 65536 on"),
        ({"run_bytes": 26624}, "staged", "runs of 26624 bytes; the link needs at least 65536"),
        ({"rates": None}, "staged", "no measured run size reaches 95 %"),
        ({"io_backend": "kernel"}, "staged", "page indices stay on the GPU with io backend kernel"),
        ({"converts": True}, "staged", "rows change their layout"),
        ({"is_pinned": False}, "torch", "not pinned"),
        ({"is_pinned": False, "requested": "kernel"}, "torch", "not pinned"),
        *(
            ({"requested": name, "io_backend": io}, name, "requested")
            for name in ("staged", "copy_engine", "kernel")
            for io in ("kernel", "direct")
        ),
    ],
)
def test_choice(changes, engine, reason):
    found = choose(**{"requested": "auto", "rates": SOME, **ALL, **changes})
    assert found[0] == engine
    assert reason in found[1]


@pytest.fixture
def plan():
    from test_plan import side

    from sgl_kvpool.transfer.plan import TransferPlan

    return TransferPlan(side("layer_major", 0)[0], side("page_major", 0)[0], "kv")


def gpu_engines(plan, requested, gpu_calls, chunks=True):
    from sgl_kvpool.transfer.gpu_engine import RegisteredChunks

    pages = plan.target.tensors[0].view(torch.uint8)
    given = RegisteredChunks() if chunks else None
    request = channel.EngineRequest(requested, "kernel", given, gpu_calls)
    return channel._gpu_engines([plan], pages, pages.shape[1], torch.device("cpu"), request)


def test_engines_that_cannot_be_built(failures, plan):
    """Torch's copies take their place, with a log line; for an engine requested by name it is an error."""

    def fails():
        raise RuntimeError("ninja exited with status 1")

    made = gpu_engines(plan, "auto", fails)
    assert [engine(plan).name for engine in made] == ["torch", "torch"]
    assert failures() == {"engine_build": 1}
    with pytest.raises(RuntimeError, match="ninja"):
        gpu_engines(plan, "kernel", fails)


@pytest.mark.parametrize("requested", ["auto", "staged", "copy_engine", "kernel"])
def test_one_line_says_which_and_why(caplog, plan, requested):
    from emulated import calls

    with caplog.at_level(logging.INFO, logger="sgl_kvpool"):
        made = gpu_engines(plan, requested, calls)
    name = "staged" if requested == "auto" else requested
    assert [engine(plan).name for engine in made] == [name, name]
    why = "page indices stay on the GPU with io backend kernel" if requested == "auto" else "requested"
    lines = [text for text in caplog.messages if text.startswith("sgl-kvpool: engine ")]
    assert lines == [f"sgl-kvpool: engine {name} {to}: {why}" for to in ("to host", "to device")]


@pytest.mark.parametrize("requested", ["auto", "kernel"])
def test_pageable_memory_is_copied_by_torch(plan, requested):
    """The GPU engines, whose compilation takes 10 s, are not compiled for it."""
    made = gpu_engines(plan, requested, lambda: pytest.fail("compiled"), chunks=False)
    assert [engine(plan).name for engine in made] == ["torch", "torch"]
