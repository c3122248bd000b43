"""`sgl-kvpool bench transfer` on a CPU and `bench codec`: what they print, and the picture of results."""

import json
import time
from pathlib import Path

import pytest
import torch

from sgl_kvpool import KVArrangement, MLAKVCacheLayout
from sgl_kvpool.cli import main
from sgl_kvpool.commands.bench import codec, transfer, transfer_report

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


# The picture


def test_the_picture_says_what_it_shows(measured):
    from matplotlib.colors import to_hex

    figure = transfer_report.figure_of(measured)
    figure.canvas.draw()
    (axes,) = figure.axes
    (legend,) = figure.legends
    # Neither bars nor anything else of the plot is under the legend.
    assert not legend.get_window_extent().overlaps(axes.get_tightbbox())
    assert "engine cpu" in figure.get_suptitle()
    for text in ("AMD EPYC, 2 cores", "2 threads", "torch 2.14.1", "2026-11-22"):
        assert text in axes.get_title()
    marked = [bar for bar in axes.patches if bar.get_hatch()]
    assert sorted(round(bar.get_height(), 2) for bar in marked) == [0.58, 0.68, 0.68]
    assert {to_hex(bar.get_edgecolor()) for bar in marked} == {"#ff0000"}
    entries = [text.get_text() for text in legend.get_texts()]
    assert "target missed" in entries
    assert "target (token_major: none)" in entries
    for row in measured["cpu_engine"]:
        row["to_host_of_copy"] = row["to_device_of_copy"] = 0.9
    entries = [text.get_text() for text in transfer_report.figure_of(measured).legends[0].get_texts()]
    assert "target missed" not in entries


def test_results_are_drawn_without_a_measurement(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(transfer, "measure_cpu", None)
    picture = tmp_path / "new" / "transfer.png"
    assert main(["bench", "transfer", "--draw", str(RESULTS), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("results", "argv", "message"),
    [
        ("{}", ["--plot", "{tmp}/a.png"], "has no results of a CPU in schema 4; measure again"),
        ('{"schema": 3, "cpu_engine": []}', ["--plot", "{tmp}/a.png"], "in schema 4"),
        ("[]", ["--plot", "{tmp}/a.png"], "has no results of a CPU in schema 4; measure again"),
        ("[", ["--plot", "{tmp}/a.png"], "cannot be read: Expecting value"),
        ("{}", [], "--draw needs --plot, the name of the image"),
    ],
)
def test_what_cannot_be_drawn(results, argv, message, tmp_path, capsys):
    (tmp_path / "results.json").write_text(results)
    argv = [word.replace("{tmp}", str(tmp_path)) for word in argv]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "transfer", "--draw", str(tmp_path / "results.json"), *argv])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()


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
    report, picture = tmp_path / "transfer.json", tmp_path / "transfer.png"
    assert main(["bench", "transfer", "--quick", "--json", str(report), "--plot", str(picture)]) == 0
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
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("of_copy", [1.0, 0.5])
def test_check_sets_the_exit_status(small, monkeypatch, capsys, of_copy):
    real = transfer.measure_engine

    def fast(*arguments):
        return {**real(*arguments), "to_host_of_copy": of_copy, "to_device_of_copy": 1.0}

    monkeypatch.setattr(transfer, "measure_engine", fast)
    monkeypatch.setattr(transfer, "shapes", lambda: [(MLAKVCacheLayout.FP4, KVArrangement.PAGE_MAJOR)])
    monkeypatch.setattr(transfer, "conversions", lambda: [(MLAKVCacheLayout.BF16, MLAKVCacheLayout.FP4)])
    assert main(["bench", "transfer", "--quick"]) == 0
    assert main(["bench", "transfer", "--quick", "--check"]) == int(of_copy < 0.7)
    assert capsys.readouterr().out.count("missed: nothing") == (0 if of_copy < 0.7 else 2)


def test_an_estimate_grows_with_the_work(small):
    """One probe serves both estimates, so 25 rounds of 250 times the pool are far above the noise."""
    assert transfer.estimated_seconds(1 << 30, 24) > 20 * transfer.estimated_seconds(4 << 20, 1)


# The codec


def test_columns_of_the_codec_are_explained(monkeypatch, capsys):
    real = codec.measure
    monkeypatch.setattr(codec, "measure", lambda device, layout, tokens, rounds: real(device, layout, 64, 1))
    assert main(["bench", "codec", "--quick"]) == 0
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
        main(["bench", name, "--help"])
    assert columns in capsys.readouterr().out
