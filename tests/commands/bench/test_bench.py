"""The command `sgl-kvpool bench` and the scripts of a checkout that run the same programs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_kvpool.cli import main

ROOT = Path(__file__).resolve().parents[3]
NAMES = ["codec", "attention", "transfer"]
#: A second of work.
TINY = ["--device", "cpu", "--heads", "2", "--layouts", "fp4", "--peers", "none", "--only", "sparse"]


def status(argv):
    """Exit status of `sgl-kvpool`, which argparse raises."""
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    return stopped.value.code


# The command


@pytest.mark.parametrize("name", NAMES)
def test_help_is_the_benchmarks(name, capsys):
    assert status(["bench", name, "--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: sgl-kvpool bench {name} [-h] [--quick] [--check]")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "the following arguments are required: benchmark\n"),
        (["nonsense"], "invalid choice: 'nonsense' (choose from "),
        (["--quick", "codec"], "unrecognized arguments: --quick"),
        (
            ["codec", "--quick", "--threads", "0"],
            "sgl-kvpool bench codec: error: --threads 0 is not positive",
        ),
        (["attention", "dense"], "bench attention: error: unrecognized arguments: dense"),
    ],
)
def test_invalid_arguments_are_refused(argv, said, capsys):
    assert status(["bench", *argv]) == 2
    assert said in capsys.readouterr().err


def test_options_go_to_the_benchmark_and_its_status_comes_back(tmp_path, capsys):
    report = tmp_path / "new" / "report.json"
    argv = ["--quick", *TINY, "--json", str(report)]
    assert main(["bench", "attention", *argv]) == 0
    found = json.loads(report.read_text())
    assert found["argv"] == argv
    assert {(row["group"], row["layout"]) for row in found["results"]} == {("sparse", "fp4")}
    assert capsys.readouterr().out.startswith("dry run on a CPU")


@pytest.mark.parametrize("name", NAMES)
def test_files_that_cannot_be_written_are_known_before_the_measurement(name, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    options = ["--json"] if name == "codec" else ["--json", "--plot"]
    for option in options:
        for path in (tmp_path, tmp_path / "file" / "report"):
            device = [] if name == "codec" else ["--device", "cpu"]
            assert status(["bench", name, option, str(path), *device]) == 2
            printed = capsys.readouterr()
            assert f"{path} cannot be written" in printed.err
            assert printed.out == ""


def test_nothing_heavy_is_imported_before_it_is_needed():
    code = (
        "import sys; from sgl_kvpool.cli import main; main(['layouts']);"
        "print(*{'torch', 'numpy', 'sglang', 'triton'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""


# Checkouts, and copies that are not checkouts


def copy_package(folder):
    shutil.copytree(ROOT / "sgl_kvpool", folder / "sgl_kvpool", ignore=shutil.ignore_patterns("__pycache__"))


def git(folder, *arguments):
    options = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *options, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit_of(folder, **environment):
    """Commit that the copy of the package in a folder reports."""
    code = "from sgl_kvpool.commands.bench.outputs import commit; print(commit())"
    # In the folder: it is first on the path, before any installed package.
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
    copy_package(tmp_path)
    repository(tmp_path)
    assert commit_of(tmp_path) == "None"  # the package is there and not in the repository
    git(tmp_path, "add", "sgl_kvpool")
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
        copy_package(folder)
    assert commit_of(alone) == "None"
    repository(tmp_path / "project")
    assert commit_of(inside) == "None"
    git(tmp_path / "project", "add", "--all", "--force")  # even if the environment is committed
    git(tmp_path / "project", "commit", "--quiet", "-m", "all")
    assert commit_of(inside) == "None"


@pytest.mark.slow
def test_scripts_run_the_package_beside_them_without_sglang(tmp_path):
    copy_package(tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    codec = tmp_path / "sgl_kvpool" / "commands" / "bench" / "codec.py"
    codec.write_text(codec.read_text().replace('"""Speed of', '"""A copy. Speed of', 1))
    # As where SGLang is not installed: importing it fails.
    (tmp_path / "sglang.py").write_text("raise ImportError('SGLang is not here')")

    def run(name, *arguments):
        # -I: neither the current folder nor PYTHONPATH says where the package is.
        command = [sys.executable, "-I", tmp_path / "scripts" / f"bench_{name}.py", *arguments]
        return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120)

    assert "\nA copy. Speed of" in run("codec", "--help").stdout
    assert run("transfer", "--help").returncode == 0
    report = tmp_path / "report.json"
    done = run("attention", *TINY, "--json", report)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert {row["status"] for row in found["results"]} == {"measured"}
    assert found["versions"]["commit"] is None
