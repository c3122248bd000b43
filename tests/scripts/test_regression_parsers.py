"""What the benchmarks write on a GPU, as measurements. tests/engine has real files of a CPU."""

import json

import pytest

from scripts.servers.parsers import benchmark


@pytest.fixture
def parsed(tmp_path):
    """`parsed(report)`: measurements by metric."""

    def run(report):
        (tmp_path / "results.json").write_text(json.dumps(report))
        found = benchmark(tmp_path)
        by_metric = {one.metric: one for one in found}
        assert len(by_metric) == len(found)
        return by_metric

    return run


def row(runner="kvpool", layout="fp4", **more):
    return {
        "runner": runner, "layout": layout, "group": "dense", "kind": "dense", "heads": 16, "batch": 64,
        "context_tokens": 32768, "rows_per_list": 32768, "queries_per_list": 1, "arrangement": "layer_major",
        "layers": 1, "status": "measured", "us": 210.5, "graph_us": 205.25, **more,
    }  # fmt: skip


def report(*rows, kind="cuda", targets=()):
    return {"schema": 1, "device_kind": kind, "results": list(rows), "targets": list(targets)}


WHERE = "kind=dense heads=16 batch=64 context_tokens=32768 queries_per_list=1"
OURS = f"runner=kvpool layout=fp4 arrangement=layer_major {WHERE}"


def test_attention_beside_peers(parsed):
    ours = row(times_as_fast_as={"flashmla": 1.52})
    other = row(layout="fp8", arrangement="page_major", graph_us=None, time_to_layer_major=1.04)
    target = {"target": "fp4: best peer", "need": "at least 1.4x", "state": "passed", "note": "n"}
    open_target = {**target, "target": "128 heads", "state": "not measured", "note": "no peer"}
    found = parsed(report(ours, other, row("flashmla", "bf16"), targets=[target, open_target]))
    ratio = found[f"{OURS}: times as fast as flashmla"]
    assert (ratio.value, ratio.kind, ratio.better, ratio.layout) == (1.52, "kernel_ratio", "higher", "fp4")
    time = found[f"{OURS}: us"]
    # The time in a CUDA graph if there is one, as in the benchmark's own ratios.
    assert (time.value, time.unit, time.kind, time.better) == (205.25, "us", "kernel_time", "lower")
    placed = f"runner=kvpool layout=fp8 arrangement=page_major {WHERE}"
    assert found[f"{placed}: us"].value == 210.5
    slower = found[f"{placed}: time_to_layer_major"]
    assert (slower.value, slower.better) == (1.04, "lower")
    # A peer's layout is not one that was requested.
    assert found[f"runner=flashmla layout=bf16 arrangement=layer_major {WHERE}: us"].layout == ""
    assert found["target: fp4: best peer, at least 1.4x"].value == 1
    missing = found["target: 128 heads, at least 1.4x"]
    assert (missing.value, missing.note) == (None, "not measured; no peer")
    assert found["wrong or failed results"].passed is True


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ([row(status="wrong", reason="0.3 away")], 1),
        ([row(), row(layout="fp8", status="failed", reason="illegal address")], 1),
        ([row(), row("flashmla", "bf16", status="failed", reason="no such head count")], 0),
        ([row(), row(batch=128, status="skipped", reason="out of memory")], 0),
    ],
)
def test_wrong_results_of_ours_fail_the_step(parsed, rows, wrong):
    found = parsed(report(*rows))
    count = found["wrong or failed results"]
    assert (count.value, count.passed) == (wrong, wrong == 0)
    (unmeasured,) = [one for one in found.values() if one.value is None]
    bad = next(one for one in rows if one["status"] != "measured")
    assert unmeasured.note == f"{bad['status']}: {bad['reason']}"


@pytest.mark.parametrize("status", ["not run", "skipped"])
def test_a_benchmark_without_results_of_ours_fails_the_step(parsed, status):
    peer = row("flashmla", "bf16")
    found = parsed(report(row(status=status, reason="the 0 minutes were spent"), peer))
    assert found["measured results"].passed is False
    assert parsed(report(row(), peer))["measured results"].passed is True


def test_times_of_a_cpu_are_not_compared(parsed):
    found = parsed(report(row(times_as_fast_as={"kvpool bf16": 0.8}), kind="cpu"))
    assert {one.kind for one in found.values()} == {"fact", "count"}
    codec = {
        "operation": "encode", "layout": "fp4", "tokens": 4096, "gb_per_s": 9.5, "copy_gb_per_s": 13.6,
        "ratio_to_copy": 0.7, "target": 0.5, "gate": True, "passed": True,
    }  # fmt: skip
    found = parsed({"results": [{**codec, "device": "cuda"}, {**codec, "device": "cpu"}]})
    what = "operation=encode device=cuda layout=fp4 tokens=4096"
    kinds = {name: one.kind for name, one in found.items()}
    assert kinds.pop(f"{what}: gb_per_s") == "kernel_time"
    assert kinds.pop(f"{what}: ratio_to_copy") == "kernel_ratio"
    target = found[f"target: {what}: 0.5 of the speed of a copy"]
    assert (target.kind, target.value, target.note) == ("target", 1, "passed")
    assert [kind for name, kind in kinds.items() if "device=cpu" in name] == ["fact"] * 4
    assert len(kinds) == 4 + 1 + 1 + 2


def test_transfer_on_a_gpu(parsed):
    engine = {
        "layout": "bf16", "host_layout": "fp4", "arrangement": "layer_major", "engine": "staged",
        "pages": 256, "scattered": False, "run_bytes": 73728, "moved_bytes": 1, "to_host_submit_us": 90.0,
        "to_host_solo_of_pinned_copy": 0.8, "to_host_of_pinned_copy": 0.97, "to_host_link_gb_per_s": 55.0,
        "to_host_model_step_ratio": 1.1, "both_of_pinned_copies": 0.9, "device_bytes_per_moved": 2.769,
    }  # fmt: skip
    peer = {"peer": "sglang kernel", "pages": 256, "moved_bytes": 1, "to_host_of_pinned_copy": 0.7}
    bad = {"peer": "sglang direct", "failed": "OSError: cannot pin"}
    ended = {"sglang": [peer, bad], "missed_targets": ["one", "two"], "ended": True}
    # A benchmark that was ended early has rows of engines and no targets.
    so_far = parsed({"device": "NVIDIA H100", "engines": [engine], "ended": False})
    found = parsed({"engines": [engine], **ended})
    peers = {"peer=sglang kernel pages=256: to_host_of_pinned_copy", "peer=sglang direct"}
    assert {*found} - {*so_far} == {*peers, "targets of transfers that are missed"}
    failed = found["peer=sglang direct"]
    assert (failed.value, failed.note) == (None, "not measured: OSError: cannot pin")
    assert found["targets of transfers that are missed"].note == "missed; one; two"
    what = "engine=staged layout=bf16 host_layout=fp4 arrangement=layer_major scattered=False pages=256"
    values = {name: (one.value, one.kind, one.better) for name, one in found.items() if what in name}
    assert values == {
        f"{what}: to_host_submit_us": (90.0, "kernel_time", "lower"),
        f"{what}: to_host_solo_of_pinned_copy": (0.8, "kernel_ratio", "higher"),
        f"{what}: to_host_of_pinned_copy": (0.97, "kernel_ratio", "higher"),
        f"{what}: to_host_model_step_ratio": (1.1, "kernel_ratio", "lower"),
        f"{what}: both_of_pinned_copies": (0.9, "kernel_ratio", "higher"),
    }


@pytest.mark.parametrize("broken", ["", "[1]", '{"results": []}', "{}", '{"results": [1], "targets": []}'])
def test_malformed_results_are_refused(broken, tmp_path):
    (tmp_path / "results.json").write_text(broken)
    with pytest.raises((ValueError, KeyError, TypeError)):
        benchmark(tmp_path)
