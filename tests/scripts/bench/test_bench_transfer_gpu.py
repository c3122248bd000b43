"""`bench transfer` over emulated streams: its steps and output; its times mean nothing here."""

import time
from argparse import Namespace

import pytest
import torch
from emulated import calls, tools

from scripts.bench import transfer_gpu
from scripts.bench.sweep import Benchmark, Skipped


@pytest.fixture
def gpu():
    class Emulated(transfer_gpu.Gpu):
        def __init__(self):
            self.device = torch.device("cpu")

        def tools(self, page_bytes):
            return tools(page_bytes)

        def pinned(self, *shape):
            return torch.zeros(shape, dtype=torch.uint8)

        def timed(self, *calls_):
            began = time.perf_counter()
            for call in calls_:
                call()
            submit = time.perf_counter() - began
            calls().play(1)
            until_done = time.perf_counter() - began
            return transfer_gpu.Timed(submit, until_done, [until_done] * len(calls_))

        def model_step(self):
            return lambda: None

    return Emulated()


@pytest.fixture
def transfers(gpu, monkeypatch):
    monkeypatch.setattr(transfer_gpu, "ROUNDS", 1)
    monkeypatch.setattr(transfer_gpu, "PAGES", (2, 5))
    bench = Benchmark(Namespace(quick=False, device="cuda"))
    return transfer_gpu.GpuTransfers(gpu, bench.kept, quick=False, layers=3, page_size=2)


@pytest.mark.parametrize(
    "shape",
    [
        {"layout": "bf16", "arrangement": "layer_major"},
        {"layout": "fp4", "arrangement": "token_major"},
        {"layout": "bf16", "host_layout": "fp4"},
    ],
    ids=str,
)
def test_every_engine_gets_a_row(transfers, shape):
    cases = [case for case in transfer_gpu.cases([shape], quick=False) if "runner" not in case]
    single = "host_layout" in shape or shape["arrangement"] == "token_major"
    engines = ["staged", "kernel"] if single else ["staged", "copy_engine", "kernel"]
    found = [(case["engine"], case["pages"], case["scattered"]) for case in cases]
    assert found == [(e, pages, s) for e in engines for pages in (2, 5) for s in (True, False)]
    for case in cases:
        row = transfers.measure(case)
        row_bytes = {"bf16": 1152, "fp4": 416}[case["host_layout"]]
        assert row["moved_bytes"] == case["pages"] * 3 * 2 * row_bytes
        for name in ("submit_us", "solo_of_pinned_copy", "of_pinned_copy", "model_step_ratio"):
            assert row[f"to_host_{name}"] >= 0  # a ratio on a busy machine is rounded to 0
            assert row[f"to_device_{name}"] >= 0


def test_a_step_that_lasts_three_times_as_long_beside_transfers():
    """However long the transfers last: 40 steps here."""

    def step():
        pass

    class Slowing:
        def model_step(self):
            return step

        def timed(self, *calls_):
            own = [(3.0 if len(calls_) > 1 else 1.0) if call is step else 40.0 for call in calls_]
            return transfer_gpu.Timed(0.0, max(own), own)

    found = transfer_gpu._against(Slowing(), "to_host", lambda: None, lambda: None, 1 << 20)
    assert found["to_host_model_step_ratio"] == 3.0
    assert found["to_host_of_pinned_copy"] == found["to_host_solo_of_pinned_copy"] == 1.0


def test_sglangs_backends_come_last(transfers, monkeypatch):
    peers = [case for case in transfer_gpu.cases([{"layout": "fp4"}], quick=False) if "runner" in case]
    assert peers == [
        {"runner": f"sglang {backend}", "pages": pages}
        for backend in ("kernel", "direct")
        for pages in (2, 5)
    ]
    monkeypatch.setattr(transfer_gpu, "find_spec", lambda name: None)
    with pytest.raises(Skipped, match="SGLang is not installed"):
        transfers.measure(peers[0])


def states(*rows):
    return [(one["need"].split(" ")[0], one["state"]) for one in transfer_gpu.targets(rows)]


def test_targets():
    case = {"layout": "bf16", "host_layout": "bf16", "arrangement": "layer_major", "engine": "staged"}
    case |= {"pages": 1024, "scattered": True}
    good = {
        "job": case, "status": "measured", "run_bytes": 73728, "moved_bytes": 73728 * 61 * 1024,
        **{f"{d}_of_pinned_copy": 0.96 for d in ("to_host", "to_device")},
        **{f"{d}_submit_us": 150.0 for d in ("to_host", "to_device")},
    }  # fmt: skip
    peer = {"job": {"runner": "sglang direct", "pages": 1024}, "status": "measured"}
    peer |= {"to_host_of_pinned_copy": 0.9, "to_device_of_pinned_copy": 0.9}

    def missed(row, *peers):
        return [need for need, state in states(row, *peers) if state == "missed"]

    def of(**job):
        return {**good, "job": {**case, **job}}

    assert states(good, peer) == [(need, "passed") for need in ("at", "no", "at") * 2]
    assert missed({**good, "to_host_of_pinned_copy": 0.94}, peer) == ["at"]
    assert missed(good, {**peer, "to_device_of_pinned_copy": 0.97}) == ["no"]
    assert missed({**good, "to_device_submit_us": 201.0}, peer) == ["at"]
    failed = {"job": peer["job"], "status": "failed", "reason": "OSError: cannot pin"}
    for peers in ((), (failed,)):
        assert states(good, *peers).count(("no", "not measured")) == 2
    transcoded = of(host_layout="fp4")
    assert missed(transcoded, peer) == []
    assert missed({**transcoded, "to_host_of_pinned_copy": 0.79}, peer) == ["at"]
    runs = 61 * 1024
    batch = {**of(engine="copy_engine"), "to_host_submit_us": 0.69 * runs, "to_device_submit_us": 0.69 * runs}
    assert missed(batch, peer) == []
    assert missed({**batch, "to_host_submit_us": 0.71 * runs}, peer) == ["at"]
    assert missed({**batch, "to_host_of_pinned_copy": 0.5}, peer) == ["at"]
    short = {**batch, "run_bytes": 26624}
    assert missed({**short, "to_host_of_pinned_copy": 0.5}, peer) == []
