"""`bench transfer` over emulated streams: its steps and output; its times mean nothing here."""

import time

import pytest
import torch
from emulated import calls, tools

from scripts.bench import transfer, transfer_gpu
from sgl_kvpool import KVArrangement, MLAKVCacheLayout


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


@pytest.mark.parametrize(
    ("layout", "host_layout", "arrangement"),
    [("bf16", "bf16", "layer_major"), ("fp4", "fp4", "token_major"), ("bf16", "fp4", "layer_major")],
)
def test_every_engine_gets_a_row(gpu, monkeypatch, layout, host_layout, arrangement):
    monkeypatch.setattr(transfer_gpu, "ROUNDS", 1)
    monkeypatch.setattr(transfer_gpu, "SHORTEST_RUN_BYTES", 417)  # runs of token-major fp4 have 416

    def caches(arrangement, pages, page_bytes, device):
        return transfer.caches(arrangement, pages, page_bytes, device, layer_count=3, page_size=2)

    rows = transfer_gpu.measure_shape(
        gpu, caches, MLAKVCacheLayout(layout), MLAKVCacheLayout(host_layout), KVArrangement(arrangement),
        layers=3, page_size=2, page_counts=(2, 5),
    )  # fmt: skip
    without = layout != host_layout or arrangement == "token_major"
    engines = ["staged", "kernel"] if without else ["staged", "copy_engine", "kernel"]
    found = [(row["engine"], row["pages"], row["scattered"]) for row in rows]
    assert found == [(e, pages, s) for e in engines for pages in (2, 5) for s in (True, False)]
    row_bytes = {"bf16": 1152, "fp4": 416}
    for row in rows:
        assert row["moved_bytes"] == row["pages"] * 3 * 2 * row_bytes[host_layout]
        assert row["device_bytes_per_moved"] == pytest.approx(
            row_bytes[layout] / row_bytes[host_layout], abs=1e-3
        )
        for name in ("submit_us", "solo_of_pinned_copy", "of_pinned_copy", "model_step_ratio"):
            assert row[f"to_host_{name}"] > 0
            assert row[f"to_device_{name}"] > 0


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


def test_a_backend_that_fails_costs_its_own_rows_only(gpu, monkeypatch):
    def measured(gpu, io_backend, label, layers, page_size, page_counts):
        if io_backend == "kernel":
            raise RuntimeError("nvcc is not there")
        return [{"peer": f"sglang {io_backend}", "pages": count} for count in page_counts]

    monkeypatch.setattr(transfer_gpu, "_measure_backend", measured)
    monkeypatch.setattr(transfer_gpu, "find_spec", lambda name: None)
    assert transfer_gpu.measure_peers(gpu, layers=2, page_size=2) == []
    monkeypatch.setattr(transfer_gpu, "find_spec", lambda name: object())
    assert transfer_gpu.measure_peers(gpu, layers=2, page_size=2, page_counts=(2, 5)) == [
        {"peer": "sglang kernel", "failed": "RuntimeError: nvcc is not there"},
        {"peer": "sglang direct", "pages": 2},
        {"peer": "sglang direct", "pages": 5},
    ]


def test_targets():
    good = {
        "engine": "staged", "layout": "bf16", "host_layout": "bf16", "arrangement": "layer_major",
        "pages": 1024, "scattered": True, "run_bytes": 73728, "moved_bytes": 73728 * 61 * 1024,
        "device_bytes_per_moved": 1.0,
        **{f"{d}_of_pinned_copy": 0.96 for d in ("to_host", "to_device")},
        **{f"{d}_submit_us": 150.0 for d in ("to_host", "to_device")},
    }  # fmt: skip
    peer = {"pages": 1024, "to_host_of_pinned_copy": 0.9, "to_device_of_pinned_copy": 0.9}
    assert transfer_gpu.missed([good], [peer]) == []
    assert len(transfer_gpu.missed([{**good, "to_host_of_pinned_copy": 0.94}], [peer])) == 1
    assert len(transfer_gpu.missed([good], [{**peer, "to_device_of_pinned_copy": 0.97}])) == 1
    assert len(transfer_gpu.missed([{**good, "to_device_submit_us": 201.0}], [peer])) == 1
    [unknown] = transfer_gpu.missed([good], [])
    assert "not measured" in unknown
    failed = {"peer": "sglang direct", "failed": "OSError: cannot pin"}
    [unknown] = transfer_gpu.missed([good], [failed, peer])
    assert unknown == "staged beside sglang direct: not measured, OSError: cannot pin"
    transcoded = {**good, "host_layout": "fp4", "device_bytes_per_moved": 1152 / 416}
    assert transfer_gpu.missed([transcoded], [peer]) == []
    assert len(transfer_gpu.missed([{**transcoded, "to_host_of_pinned_copy": 0.79}], [peer])) == 1
    runs = 61 * 1024
    batch = {
        **good,
        "engine": "copy_engine",
        "to_host_submit_us": 0.69 * runs,
        "to_device_submit_us": 0.69 * runs,
    }
    assert transfer_gpu.missed([batch], [peer]) == []
    assert len(transfer_gpu.missed([{**batch, "to_host_submit_us": 0.71 * runs}], [peer])) == 1
    assert len(transfer_gpu.missed([{**batch, "to_host_of_pinned_copy": 0.5}], [peer])) == 1
    assert transfer_gpu.missed([{**batch, "to_host_of_pinned_copy": 0.5, "run_bytes": 26624}], [peer]) == []
