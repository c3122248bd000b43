"""Where the demo writes its results, and its message when it cannot. No server starts here."""

import contextlib
import dataclasses
import errno
import json
import os
import resource
import sys

import one_result
import pytest

from sgl_kvpool.commands.evaluate.measure import Scores
from sgl_kvpool.commands.processes.server import ServerFailed
from sgl_kvpool.demo import compare
from sgl_kvpool.demo.model import choose
from sgl_kvpool.layout import MLAKVCacheLayout

BYTES = choose("bytes")
FP4, FP8, BF16 = MLAKVCacheLayout.FP4, MLAKVCacheLayout.FP8_NOPE_FP8_ROPE, MLAKVCacheLayout.BF16
LOGS = [f"{name}-{layout}.log" for layout in MLAKVCacheLayout for name in ("server", "answers")]


@pytest.fixture
def served(monkeypatch):
    """Layouts are "served" in turn; `served[layout]` is an exception that `_serve` raises for that layout."""
    failing = {}
    scores = Scores([[-1.0, -2.0], [-1.5, -0.5]], [[1, 2], [3, 4]])

    def score(server, model, layout, start_seconds):
        if layout in failing:
            raise failing[layout]
        return (dataclasses.replace(one_result.BF16, layout=layout.value), scores), "scored"

    monkeypatch.setattr(compare, "Forks", Nothing)
    monkeypatch.setattr(compare, "layout_server", lambda model, layout, port, log, *tokens: NoServer(log))
    monkeypatch.setattr(compare, "_score", score)
    monkeypatch.setattr(compare, "_show", lambda server, model: ({"answer": "an answer"}, "asked"))
    return failing


class Nothing(contextlib.nullcontext):
    """Imports nothing."""

    def __enter__(self):
        return self

    def start(self, command, environment, output):
        return self

    def wait(self):
        return 0


class NoServer(contextlib.nullcontext):
    def __init__(self, log):
        super().__init__()
        self.log = log
        log.write_text("new")


def earlier(folder):
    """Results of an earlier run, and a file that is not ours."""
    for name in ("demo.json", "demo.png", *LOGS, "notes.txt"):
        (folder / name).write_text("old")


def test_a_run_takes_an_earlier_ones_place(tmp_path, served, capsys):
    earlier(tmp_path)
    assert compare.compare(BYTES, [FP4], tmp_path) == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"answers-fp4.log", "demo.json", "demo.png", "notes.txt", "server-fp4.log"}
    assert [r["layout"] for r in json.loads((tmp_path / "demo.json").read_text())["results"]] == ["fp4"]
    assert (tmp_path / "server-fp4.log").read_text() == "new"
    assert (tmp_path / "notes.txt").read_text() == "old"
    assert f"all numbers: {tmp_path / 'demo.json'}\n" in capsys.readouterr().out


@pytest.mark.parametrize("count", [3, 33])
def test_numbers_of_windows_that_are_refused(tmp_path, count):
    with pytest.raises(ValueError, match=f"--windows {count}: model bytes has 4 to 32$"):
        compare.compare(BYTES, [FP4], tmp_path, count)


def test_a_number_of_windows_that_was_asked_for(tmp_path, served):
    assert compare.compare(BYTES, [FP4], tmp_path, 7) == 0
    assert json.loads((tmp_path / "demo.json").read_text())["held_out_windows"] == 7


def test_servers_start_anew_where_none_can_be_forked(tmp_path, served, capsys, monkeypatch):
    class Ended(Nothing):
        def start(self, *_):
            raise RuntimeError("the process that imports sglang.launch_server has ended:\nno threads")

    monkeypatch.setattr(compare, "Forks", Ended)
    assert compare.compare(BYTES, [FP4], tmp_path) == 0
    assert "no threads\nEvery server imports it by itself" in capsys.readouterr().out


def test_a_failure_after_the_table_keeps_it(tmp_path, served, capsys, monkeypatch):
    def show(server, model):
        raise ServerFailed("the server ended with signal 9")

    earlier(tmp_path)
    monkeypatch.setattr(compare, "_show", show)
    assert compare.compare(BYTES, [FP4], tmp_path) == 1
    log = tmp_path / "answers-fp4.log"
    assert f"failed: the server ended with signal 9\nthe server's log: {log}\n" in capsys.readouterr().out
    assert log.exists()
    assert len(json.loads((tmp_path / "demo.json").read_text())["results"]) == 1


def test_a_run_that_does_not_finish_has_the_results_of_earlier_servers(tmp_path, served, capsys):
    earlier(tmp_path)
    served[FP4] = ServerFailed("the server ended with signal 9")
    assert compare.compare(BYTES, [FP8, FP4, BF16], tmp_path) == 1
    logs = {log.name: log.read_text() for log in tmp_path.glob("*.log")}
    assert logs == dict.fromkeys(("server-fp8.log", "server-fp4.log"), "new")
    printed = capsys.readouterr().out
    assert "failed: the server ended with signal 9\n" in printed
    assert f"the server's log: {tmp_path / 'server-fp4.log'}\n" in printed
    assert f"all numbers: {tmp_path / 'demo.json'}\n" in printed
    assert len(json.loads((tmp_path / "demo.json").read_text())["results"]) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ServerFailed("the server ended with signal 9")])
def test_a_run_without_results_leaves_those_of_an_earlier_one(tmp_path, served, error):
    earlier(tmp_path)
    served[FP4] = error
    with contextlib.suppress(KeyboardInterrupt):
        assert compare.compare(BYTES, [FP4], tmp_path) == 1
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    old = dict.fromkeys(("demo.json", "demo.png", *LOGS, "notes.txt"), "old")
    assert found == {**old, "server-fp4.log": "new"}


@pytest.mark.parametrize("size_bytes", [8192, 64])  # the JSON fits and the plot does not; neither does
def test_results_that_cannot_be_written(tmp_path, served, capsys, size_bytes):
    """Longer files give OSError, as on a full disk."""
    earlier(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        assert compare.compare(BYTES, [FP4], tmp_path) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"failed: {os.strerror(errno.EFBIG)}: the results cannot be written to {tmp_path}"


def test_without_matplotlib_the_numbers_are_written(tmp_path, served, capsys, monkeypatch):
    earlier(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert compare.compare(BYTES, [FP4], tmp_path) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("no plot: import of matplotlib.figure halted")
    assert last.endswith("; pip install matplotlib")
    assert (tmp_path / "demo.json").exists()
    assert not (tmp_path / "demo.png").exists()
