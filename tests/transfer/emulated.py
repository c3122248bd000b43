"""The GPU engines on this machine: the product's code over emulated streams; csrc/emulated_engines.cpp."""

import functools
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "sgl_kvpool" / "transfer" / "csrc"
#: The stream that SGLang would call engines on.
CALLER = 7


@functools.cache
def calls():
    from sgl_kvpool.compiler import Module

    flags = ("-std=c++20", "-O1", "-Wall", "-Wextra", "-ffp-contract=off", f"-I{CSRC}")
    source = HERE / "csrc" / "emulated_engines.cpp"
    return Module("sgl_kvpool_emulated_engines", source, flags).load()


class Event:
    """Stand-in for torch's event in the metrics: one that was never recorded is complete and has no time."""

    recorded = False

    def record(self):
        self.recorded = True

    def query(self):
        return True

    def elapsed_time(self, later):
        if not (self.recorded and later.recorded):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return 1.5


def tools(page_bytes, chunks=None, **changes):
    """`EngineTools` of one direction whose device is this machine's memory."""
    from sgl_kvpool.transfer.engines import EngineTools
    from sgl_kvpool.transfer.gpu_engine import PageBuffer, RegisteredChunks

    device = torch.device("cpu")
    given = {
        "calls": calls(), "device": device, "buffer": PageBuffer(page_bytes, device, calls()),
        "chunks": chunks or RegisteredChunks(), "current_stream": lambda: CALLER, "make_event": Event,
    }  # fmt: skip
    return EngineTools(**{**given, **changes})


def small_slots(monkeypatch, page_bytes, pages):
    """Give page buffers slots of `pages` pages, so that a transfer takes many slots."""
    from sgl_kvpool.transfer import gpu_engine

    monkeypatch.setattr(gpu_engine, "_SLOT_BYTES", page_bytes * pages)
    monkeypatch.setattr(gpu_engine, "_SLOT_PAGES", pages)
