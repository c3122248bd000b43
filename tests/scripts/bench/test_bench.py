"""`python -m scripts.bench`: its arguments, its files, and the commit that its results name."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.__main__ import BENCHMARKS, main
from scripts.bench.measurements import measurements

ROOT = Path(__file__).resolve().parents[3]
#: A second of work.
TINY = ["--device", "cpu", "--only", "runner=kvpool", "--only", "layout=fp4", "--only", "kind=sparse"]


def status(argv):
    """Exit status, which argparse raises."""
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    return stopped.value.code


# The command


@pytest.mark.parametrize("name", BENCHMARKS)
def test_help_is_the_benchmarks(name, capsys):
    assert status([name, "--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: python -m scripts.bench {name} [-h]")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "the following arguments are required: benchmark"),
        (["nonsense"], "invalid choice: 'nonsense' (choose from "),
        (["transfer", "--device", "cuda"], "transfer: error: no GPU is visible"),
        (
            ["codec", "--only", "fp4"],
            "python -m scripts.bench codec: error: argument --only: 'fp4' is not NAME",
        ),
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
    assert {(case["kind"], case["layout"], case["heads"]) for case in cases} == {
        ("sparse", "fp4", 2), ("sparse", "fp4", 4),
    }  # fmt: skip
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
    report.write_text(json.dumps({**found, "schema": 0}))
    assert status(["attention", *argv, "--continue"]) == 2
    assert "has results of schema 0" in capsys.readouterr().err


def test_time_that_is_spent_and_results_that_are_wrong(tmp_path, monkeypatch, capsys):
    report = tmp_path / "results.json"
    argv = ["attention", *TINY, "--json", str(report)]
    assert main([*argv, "--minutes", "0"]) == 1
    assert {row["status"] for row in json.loads(report.read_text())["results"]} == {"not run"}
    printed = capsys.readouterr().out
    assert "WRONG: nothing was measured\n" in printed
    assert "2 of 2 measurements not run: the 0 minutes were spent\n" in printed
    assert {one.metric: one.passed for one in measurements(tmp_path)}["measured results"] is False
    from scripts.bench.attention import measure

    right = measure.check
    monkeypatch.setattr(measure, "check", lambda problem, out, number: right(problem, out + 1, number))
    assert main(argv) == 1
    assert "WRONG: runner=kvpool layout=fp4 kind=sparse" in capsys.readouterr().out
    found = {one.metric: one for one in measurements(tmp_path)}["wrong or failed results"]
    assert (found.value, found.passed) == (2, False)
    assert "relative error" in found.note


def test_a_target_that_is_missed_is_said(monkeypatch, capsys):
    from scripts.bench import codec

    argv = ["codec", "--quick", "--only", "layout=bf16", "--only", "operation=gather"]
    key = (codec.Encoding.BF16, "gather")
    for target in (1e-9, 1e9):
        monkeypatch.setitem(codec.CPU_TARGETS, key, target)
        assert main(argv) == 0
    assert "missed       layout=bf16 operation=gather tokens=16384, at least 1000000000.0 of a copy" in (
        capsys.readouterr().out
    )


def test_attention_on_a_cpu_is_measured(capsys):
    assert main(["cpu_attention", "--quick", "--only", "layout=fp4", "--only", "heads=1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("times_as_fast_as torch") == 2  # one thread and two


@pytest.mark.parametrize("name", ["codec", "attention", "transfer"])
def test_files_that_cannot_be_written_are_known_before_the_measurement(name, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file" / "report"):
        assert status([name, "--json", str(path), "--device", "cpu"]) == 2
        printed = capsys.readouterr()
        assert f"{path} cannot be written" in printed.err
        assert printed.out == ""


# Checkouts, and copies that are not checkouts


def copy(folder, name="scripts"):
    shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


def git(folder, *arguments):
    options = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *options, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit_of(folder, **environment):
    """Commit that the copy of the programs in a folder reports."""
    code = "from scripts.kit.outputs import commit; print(commit())"
    # In the folder, which is first on the path.
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env={**os.environ, "PYTHONPATH": "", **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def test_the_commit_of_a_checkout(tmp_path):
    copy(tmp_path)
    assert commit_of(tmp_path) == "None"
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "scripts")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert commit_of(tmp_path) == head
    (tmp_path / "scripts" / "__init__.py").open("a").write("# changed")
    assert commit_of(tmp_path) == f"{head}-dirty"
    assert commit_of(tmp_path, GIT_DIR=str(tmp_path / "elsewhere")) == f"{head}-dirty"
    assert commit_of(tmp_path, PATH=str(tmp_path)) == "None"  # where git is not installed


@pytest.mark.slow
def test_benchmarks_run_without_sglang_and_without_git(tmp_path):
    copy(tmp_path)
    copy(tmp_path, "sgl_kvpool")
    # As where SGLang is not installed: importing it fails.
    (tmp_path / "sglang.py").write_text("raise ImportError('SGLang is not here')")
    report = tmp_path / "report.json"
    for name, *arguments in (["transfer", "--help"], ["attention", *TINY, "--json", report]):
        command = [sys.executable, "-m", "scripts.bench", name, *arguments]
        environment = {**os.environ, "PYTHONPATH": ""}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert {row["status"] for row in found["results"]} == {"measured"}
    assert found["commit"] is None
