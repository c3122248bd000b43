"""`python -m scripts.bench`: its arguments, its files, and the commit that its results name."""

import json
import os

import pytest

from scripts.bench.__main__ import main
from scripts.bench.measurements import measurements
from sgl_kvpool.folders import replace_file

#: A second of work.
TINY = ["--device", "cpu", "--only", "runner=kvpool", "--only", "layout=fp4", "--only", "kind=sparse"]


def status(argv):
    """Exit status, which argparse raises."""
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    return stopped.value.code


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["transfer", "--device", "cuda"], "transfer: error: torch sees no GPU"),
        (["codec", "--only", "fp4"], "bench codec: error: argument --only: 'fp4' is not NAME"),
        (["tiles", "--minutes", "nan"], "bench tiles: error: argument --minutes: nan is not a finite number"),
        (["cpu_attention", "--continue"], "--continue keeps the results of a file; name it with --json"),
        (
            ["codec", "--only", "layout=fp5"],
            "no case passes --only; the fields of cases are layout, operation",
        ),
        (["attention", "--device", "cpu", "dense"], "bench attention: error: unrecognized arguments: dense"),
    ],
)
def test_invalid_arguments_are_refused(argv, said, capsys):
    assert status(argv) == 2
    assert said in capsys.readouterr().err


def test_a_run_and_its_continuation(tmp_path, capsys):
    report = tmp_path / "new" / "results.json"
    argv = ["--quick", *TINY, "--json", str(report)]
    assert main(["attention", *argv]) == 0
    found = json.loads(report.read_text())
    assert (found["argv"], found["device"], found["wrong"], found["targets"]) == (argv, "cpu", [], [])
    cases = [row["job"] for row in found["results"]]
    shapes = {(case["kind"], case["layout"], case["heads"]) for case in cases}
    assert shapes == {("sparse", "fp4", 2), ("sparse", "fp4", 4)}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("runner=kvpool layout=fp4 kind=sparse heads=2 batch=2 context=128 ")
    assert len(lines) == len(cases) == 2
    # What a whole run makes of it: no time of a CPU is compared.
    measured = {one.metric: one for one in measurements(report.parent)}
    assert {one.kind for one in measured.values()} == {"fact", "count"}
    assert (measured["measured results"].value, measured["wrong or failed results"].value) == (2, 0)
    # A case that was not run is run the next time, and no other.
    found["results"][1] = {"job": cases[1], "status": "not run", "reason": "the 8 minutes were spent"}
    report.write_text(json.dumps(found))
    assert main(["attention", *argv, "--continue"]) == 0
    again = json.loads(report.read_text())["results"]
    assert again[0] == found["results"][0]
    assert (again[1]["job"], again[1]["status"]) == (cases[1], "measured")
    for kept, said in (
        ({**found, "schema": 0}, "has results of schema 0"),
        ({**found, "device": "cuda"}, "has results of device cuda"),
        ({**found, "quick": False}, "has results of quick False"),
        ({**found, "benchmark": "codec"}, "has results of benchmark codec"),
        ([], "has no results; name another file"),
        ({**found, "results": 3}, "has no results; name another file"),
    ):
        report.write_text(json.dumps(kept))
        assert status(["attention", *argv, "--continue"]) == 2
        assert said in capsys.readouterr().err
    report.write_text("{")
    assert status(["attention", *argv, "--continue"]) == 2
    assert ": Expecting property name enclosed in double quotes" in capsys.readouterr().err


def test_what_cannot_be_replaced_by_results(tmp_path, capsys):
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    for path, said in (
        (fifo, "is not a regular file; name another"),
        (tmp_path / ("x" * 255), "name too long"),
    ):
        assert status(["codec", "--json", str(path)]) == 2
        assert said in capsys.readouterr().err
    link.symlink_to(tmp_path / "file")
    replace_file(link, "{}")
    assert link.is_symlink()
    assert (tmp_path / "file").read_text() == "{}"


def test_time_that_is_spent_and_results_that_are_wrong(tmp_path, monkeypatch, capsys):
    report = tmp_path / "results.json"
    argv = ["attention", *TINY, "--json", str(report)]
    assert main([*argv, "--minutes", "1e-9"]) == 1
    assert {row["status"] for row in json.loads(report.read_text())["results"]} == {"not run"}
    printed = capsys.readouterr().out
    assert "WRONG: nothing was measured\n" in printed
    assert "2 of 2 measurements not run: the 1e-09 minutes were spent\n" in printed
    assert {one.metric: one.passed for one in measurements(tmp_path)}["measured results"] is False
    from scripts.bench.attention import measure

    right = measure.check
    monkeypatch.setattr(measure, "check", lambda problem, out, number: right(problem, out + 1, number))
    assert main(argv) == 1
    assert "WRONG: runner=kvpool layout=fp4 kind=sparse" in capsys.readouterr().out
    found = {one.metric: one for one in measurements(tmp_path)}["wrong or failed results"]
    assert (found.value, found.passed) == (2, False)
    assert "relative error" in found.note


def test_attention_on_a_cpu_is_measured(capsys):
    assert main(["cpu_attention", "--quick", "--only", "layout=fp4", "--only", "heads=1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("at least 1.8 times one thread") == 1
