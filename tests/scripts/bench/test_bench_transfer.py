"""`bench transfer` on a CPU and `bench codec`: what they print."""

import json
import time
from pathlib import Path

import pytest
import torch

from scripts.bench import codec, transfer, transfer_report
from scripts.bench.__main__ import main
from sgl_kvpool import KVArrangement, MLAKVCacheLayout

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "benchmarks" / "transfer_cpu.json"


@pytest.fixture
def measured():
    return json.loads(RESULTS.read_text())


# Marks of missed targets


def test_slow_pools_are_marked(measured):
    words = [transfer_report.engine_line(row).split() for row in measured["cpu_engine"]]
    verdicts = {(layout, arrangement): {"ok", "MISSED"} & set(rest) for layout, arrangement, *rest in words}
    missed = {("fp8_block_scale", "layer_major"), ("fp4", "page_major")}
    for name, verdict in verdicts.items():
        assert verdict == (set() if name[1] == "token_major" else {"MISSED" if name in missed else "ok"})
    assert transfer_report.missed(measured) == [
        "fp8_block_scale layer_major to host 0.58 (target 0.70)",
        "fp4 page_major to host 0.68 (target 0.70)",
        "fp4 page_major to device 0.68 (target 0.70)",
    ]


# A run


@pytest.fixture
def small(monkeypatch):
    """Seconds of work instead of minutes; on one thread, since two wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(transfer, "LAYERS", 3)
    monkeypatch.setattr(transfer, "CONVERTED_PAGES", 1)
    monkeypatch.setattr(transfer, "PROBE_BYTES", 4 << 20)
    monkeypatch.setattr(transfer, "QUICK", (4 << 20, 1))
    yield
    torch.set_num_threads(threads)


def test_a_run(small, tmp_path, capsys):
    report = tmp_path / "transfer.json"
    assert main(["transfer", "--quick", "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    first, *lines = printed.splitlines()
    assert first.startswith("15 pools and 8 pairs of layouts: about ")
    assert first.endswith(" here, up to 0.0 GB of memory")
    # The explanation of the columns stands above the table.
    head = next(number for number, line in enumerate(lines) if line.startswith("layout "))
    for name in ("run bytes:", "of a copy:", "target:", "of torch:"):
        assert any(line.startswith(name) for line in lines[:head])
    found = json.loads(report.read_text())
    assert found["date"] == time.strftime("%Y-%m-%d")
    assert found["machine"]["cores"] >= 1
    assert found["quick"] is True
    missed = ", ".join(transfer_report.missed(found)) or "nothing"
    assert lines[-1] == f"missed: {missed}"


@pytest.mark.parametrize("of_copy", [1.0, 0.5])
def test_check_sets_the_exit_status(small, monkeypatch, capsys, of_copy):
    real = transfer.measure_engine

    def fast(*arguments):
        return {**real(*arguments), "to_host_of_copy": of_copy, "to_device_of_copy": 1.0}

    monkeypatch.setattr(transfer, "measure_engine", fast)
    monkeypatch.setattr(transfer, "shapes", lambda: [(MLAKVCacheLayout.FP4, KVArrangement.PAGE_MAJOR)])
    monkeypatch.setattr(transfer, "conversions", lambda: [(MLAKVCacheLayout.BF16, MLAKVCacheLayout.FP4)])
    assert main(["transfer", "--quick"]) == 0
    assert main(["transfer", "--quick", "--check"]) == int(of_copy < 0.7)
    assert capsys.readouterr().out.count("missed: nothing") == (0 if of_copy < 0.7 else 2)


def test_an_estimate_grows_with_the_work(small):
    """Each estimate has its own probe; 25 rounds of 256 times the pool are far above their noise."""
    assert transfer.estimated_seconds(1 << 30, 24) > 20 * transfer.estimated_seconds(4 << 20, 1)


# The codec


def test_columns_of_the_codec_are_explained(monkeypatch, capsys):
    real = codec.measure
    monkeypatch.setattr(codec, "measure", lambda device, layout, tokens, rounds: real(device, layout, 64, 1))
    assert main(["codec", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("device "))
    assert lines[head].split() == ["device", "layout", "operation", "GB/s", "copy", "ratio", "target"]
    above = "\n".join(lines[:head])
    for name in ("GB/s: ", "copy: ", "ratio: ", "target: ", *codec.OPERATIONS):
        assert name in above
    assert "about 10 seconds" in above


@pytest.mark.parametrize(
    ("name", "columns"), [("codec", codec.COLUMNS), ("transfer", transfer_report.COLUMNS)]
)
def test_help_explains_the_columns(name, columns, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert columns in capsys.readouterr().out
