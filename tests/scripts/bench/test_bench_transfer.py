"""`bench transfer` on a CPU and over emulated streams: its steps and targets; its times mean nothing here."""

import itertools
import time
from argparse import Namespace
from functools import partial

import pytest
import torch
from emulated import calls, tools

from scripts.bench import transfer, transfer_gpu
from scripts.bench.sweep import Benchmark, result_of
from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.attention import decode_config


def test_every_pool_on_a_cpu(monkeypatch):
    """Seconds of work instead of minutes."""
    monkeypatch.setattr(transfer, "LAYERS", 3)
    monkeypatch.setattr(transfer, "QUICK", (4 << 20, 1))
    monkeypatch.setattr(transfer, "caches", partial(transfer_gpu.caches, layer_count=3))
    bench = transfer.Transfers(Namespace(quick=True, device="cpu"))
    rows = [{"job": case, **result_of(bench, case)} for case in bench.cases({})]
    assert [row["status"] for row in rows] == ["measured"] * 15
    for row in rows:
        assert min(row[f"{name}_of_copy"] for name in transfer.DIRECTIONS) > 0
    # Rows that move one by one have no target.
    assert len(bench.targets(rows, {})) == 2 * 10


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

    decode_step = staticmethod(lambda: None)


@pytest.mark.parametrize(
    "shape",
    [
        {"layout": "bf16", "arrangement": "layer_major"},
        {"layout": "fp4", "arrangement": "token_major"},
        {"layout": "bf16", "host_layout": "fp4"},
    ],
    ids=str,
)
def test_every_engine_gets_a_row(shape, monkeypatch):
    monkeypatch.setattr(transfer_gpu, "ROUNDS", 1)
    monkeypatch.setattr(transfer_gpu, "PAGES", (2, 5))
    kept = Benchmark(Namespace(quick=False, device="cuda")).kept
    transfers = transfer_gpu.GpuTransfers(Emulated(), kept, quick=False, layers=3, page_size=2)
    cases = [case for case in transfer_gpu.cases([shape], quick=False) if "runner" not in case]
    single = "host_layout" in shape or shape["arrangement"] == "token_major"
    engines = ["staged", "kernel"] if single else ["staged", "copy_engine", "kernel"]
    found = [(case["engine"], case["pages"], case["scattered"]) for case in cases]
    assert found == [(e, pages, s) for e in engines for pages in (2, 5) for s in (True, False)]
    for case in cases:
        row = transfers.measure(case)
        row_bytes = {"bf16": 1152, "fp4": 416}[case["host_layout"]]
        assert row["moved_bytes"] == case["pages"] * 3 * 2 * row_bytes
        ratios = ("solo_of_pinned_copy", "of_pinned_copy", "model_step_ratio", "decode_step_ratio")
        for name, way in itertools.product(("submit_us", *ratios), ("to_host", "to_device")):
            assert row[f"{way}_{name}"] >= 0  # a ratio on a busy machine is rounded to 0


@pytest.mark.parametrize("sm_count", [132, 114])
def test_the_decode_beside_transfers_fills_every_sm(sm_count, monkeypatch):
    """A transfer that takes the place of one program delays the whole decode by a second round."""
    monkeypatch.setattr(decode_config, "decode_kernel_of", lambda fmt: "gluon")
    work = transfer_gpu.decode_workload(sm_count)
    fmt = MLAKVCacheLayout("fp4").row_format(512, 64)
    config = decode_config.decode_config(fmt, work.heads, 1, work.batch, work.rows_per_list, sm_count)
    assert config.tiles * config.splits * work.batch == sm_count * config.tile.programs_per_sm


def test_targets_on_a_gpu():
    case = {"layout": "bf16", "host_layout": "bf16", "arrangement": "layer_major", "engine": "staged"}
    case |= {"pages": 1024, "scattered": True}
    good = {
        "job": case, "status": "measured", "run_bytes": 73728, "moved_bytes": 73728 * 61 * 1024,
        **{f"{d}_of_pinned_copy": 0.96 for d in ("to_host", "to_device")},
    }  # fmt: skip
    peer = {"job": {"runner": "sglang direct", "pages": 1024}, "status": "measured"}
    peer |= {"to_host_of_pinned_copy": 0.9, "to_device_of_pinned_copy": 0.9}

    def missed(row, *peers):
        found = transfer_gpu.targets([row, *peers])
        return [one["need"].split(" ")[0] for one in found if one["state"] == "missed"]

    assert [one["state"] for one in transfer_gpu.targets([good, peer])] == ["passed"] * 4
    assert missed({**good, "to_host_of_pinned_copy": 0.94}, peer) == ["at"]
    assert missed(good, {**peer, "to_device_of_pinned_copy": 0.97}) == ["no"]
    transcoded = {**good, "job": {**case, "host_layout": "fp4"}}
    assert missed({**transcoded, "to_host_of_pinned_copy": 0.79}, peer) == ["at"]
