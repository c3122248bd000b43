"""What a run makes of a benchmark's rows. tests/engine has real files of a CPU."""

import json

import pytest

from scripts.bench.measurements import measurements


@pytest.fixture
def parsed(tmp_path):
    """`parsed(rows, ...)`: measurements by metric."""

    def run(*rows, device="cuda", **more):
        (tmp_path / "results.json").write_text(json.dumps({"device": device, "results": rows, **more}))
        found = measurements(tmp_path)
        by_metric = {one.metric: one for one in found}
        assert len(by_metric) == len(found)
        return by_metric

    return run


def row(runner="kvpool", layout="fp4", status="measured", reason="", **more):
    times = {"us": 210.5, "graph_us": 205.25, **more} if status == "measured" else {"reason": reason}
    return {"job": {"runner": runner, "layout": layout, "heads": 16}, "status": status, **times}


OURS = "runner=kvpool layout=fp4 heads=16"


def test_attention_beside_peers(parsed):
    moved = {"to_host_submit_us": 90.0, "to_host_of_pinned_copy": 0.97, "link_to_host_gb_per_s": 55.0}
    ours = row(times_as_fast_as={"flashmla": 1.52}, **moved)
    other = row(layout="fp8", graph_us=None, time_to_layer_major=1.04)
    target = {"target": "fp4: best peer", "need": "at least 1.4x", "state": "passed", "note": "n"}
    open_target = {**target, "target": "128 heads", "state": "not measured", "note": "no peer"}
    found = parsed(ours, other, row("flashmla", "bf16"), targets=[target, open_target], wrong=[])
    ratio = found[f"{OURS}: times as fast as flashmla"]
    assert (ratio.value, ratio.kind, ratio.better, ratio.layout) == (1.52, "kernel_ratio", "higher", "fp4")
    time = found[f"{OURS}: us"]
    # The time in a CUDA graph if there is one, as in the benchmark's own ratios.
    assert (time.value, time.unit, time.kind, time.better) == (205.25, "us", "kernel_time", "lower")
    assert found[f"{OURS}: to_host_submit_us"].kind == "kernel_time"
    assert found[f"{OURS}: to_host_of_pinned_copy"].better == "higher"
    assert f"{OURS}: link_to_host_gb_per_s" not in found
    assert found["runner=kvpool layout=fp8 heads=16: us"].value == 210.5
    slower = found["runner=kvpool layout=fp8 heads=16: time_to_layer_major"]
    assert (slower.value, slower.better) == (1.04, "lower")
    # A peer's layout is not one that was requested.
    assert found["runner=flashmla layout=bf16 heads=16: us"].layout == ""
    assert found["target: fp4: best peer, at least 1.4x"].value == 1
    missing = found["target: 128 heads, at least 1.4x"]
    assert (missing.value, missing.note) == (None, "not measured; no peer")
    assert found["wrong or failed results"].passed is True


@pytest.mark.parametrize("status", ["not run", "skipped"])
def test_a_benchmark_without_results_of_ours_fails_the_step(parsed, status):
    peer = row("flashmla", "bf16")
    found = parsed(row(status=status, reason="the 0 minutes were spent"), peer)
    assert found["measured results"].passed is False
    assert found[OURS].note == f"{status}: the 0 minutes were spent"
    assert found["measured results"].kind == ("fact" if status == "not run" else "count")
    assert parsed(row(), peer)["measured results"].passed is True


def test_times_of_a_cpu_are_not_compared(parsed):
    found = parsed(row(times_as_fast_as={"kvpool bf16": 0.8}), device="cpu")
    assert {one.kind for one in found.values()} == {"fact", "count"}
