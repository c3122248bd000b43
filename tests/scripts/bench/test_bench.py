"""`python -m scripts.bench`: its arguments, its files, and the commit that its results name."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.__main__ import BENCHMARKS, main

ROOT = Path(__file__).resolve().parents[3]
#: A second of work.
TINY = ["--device", "cpu", "--heads", "2", "--layouts", "fp4", "--peers", "none", "--only", "sparse"]


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
            ["codec", "--quick", "--threads", "0"],
            "python -m scripts.bench codec: error: --threads 0 is not positive",
        ),
        (["attention", "--device", "cpu", "dense"], "bench attention: error: unrecognized arguments: dense"),
    ],
)
def test_invalid_arguments_are_refused(argv, said, capsys):
    assert status(argv) == 2
    assert said in capsys.readouterr().err


def test_options_go_to_the_benchmark_and_its_status_comes_back(tmp_path, capsys):
    report = tmp_path / "new" / "report.json"
    argv = ["--quick", *TINY, "--json", str(report)]
    assert main(["attention", *argv]) == 0
    found = json.loads(report.read_text())
    assert found["argv"] == argv
    assert {(row["group"], row["layout"]) for row in found["results"]} == {("sparse", "fp4")}
    assert capsys.readouterr().out.startswith("dry run on a CPU")


@pytest.mark.parametrize("name", ["codec", "attention", "transfer"])
def test_files_that_cannot_be_written_are_known_before_the_measurement(name, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file" / "report"):
        device = [] if name == "codec" else ["--device", "cpu"]
        assert status([name, "--json", str(path), *device]) == 2
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


def repository(folder):
    """A new repository with one file in it."""
    git(folder, "init", "--quiet")
    (folder / "README").write_text("x")
    git(folder, "add", "README")
    git(folder, "commit", "--quiet", "-m", "first")


def test_the_commit_of_a_checkout(tmp_path):
    copy(tmp_path)
    repository(tmp_path)
    assert commit_of(tmp_path) == "None"  # the programs are there and not in the repository
    git(tmp_path, "add", "scripts")
    git(tmp_path, "commit", "--quiet", "-m", "second")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert commit_of(tmp_path) == head
    (tmp_path / "README").write_text("y")
    assert commit_of(tmp_path) == f"{head}-dirty"
    assert commit_of(tmp_path, GIT_DIR=str(tmp_path / "elsewhere")) == f"{head}-dirty"
    assert commit_of(tmp_path, PATH=str(tmp_path)) == "None"  # where git is not installed


def test_no_commit_where_there_is_none(tmp_path):
    alone, inside = tmp_path / "alone", tmp_path / "project" / "venv" / "site-packages"
    for folder in (alone, inside):
        copy(folder)
    assert commit_of(alone) == "None"
    repository(tmp_path / "project")
    assert commit_of(inside) == "None"
    git(tmp_path / "project", "add", "--all", "--force")  # even if the environment is committed
    git(tmp_path / "project", "commit", "--quiet", "-m", "all")
    assert commit_of(inside) == "None"


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
    assert found["versions"]["commit"] is None
