"""Results of tests that run in workers are reported by the pytest that was started."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os
import pytest

def test_first():
    assert os.environ["TRITON_INTERPRET"] == "0"

@pytest.mark.parametrize("number", [1, 2])
def test_odd(number):
    print("printed", number)
    assert number % 2 == 1

def test_crash():
    os.kill(os.getpid(), 11)

@pytest.mark.skip(reason="not now")
def test_skipped():
    pass

@pytest.mark.quick
def test_last():
    pass
"""

#: Collected behind `TESTS`: the workers have ended with the last test that they ran.
LATER = """
import psutil

def test_no_worker_is_left():
    assert psutil.Process().children() == []
"""


@pytest.fixture
def run(tmp_path):
    """`run(*arguments, CI=...)`: output of pytest over `TESTS`, in a copy of this folder."""
    folder = tmp_path / "tests" / "ptxrun"
    folder.mkdir(parents=True)
    for name in ("conftest.py", "ptxrun_workers.py", "ptxrun_builds.py"):
        shutil.copy(Path(__file__).parent / name, folder)
    (folder / "test_some.py").write_text(TESTS)
    (tmp_path / "tests" / "test_without_workers.py").write_text(LATER)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\nmarkers = quick\n")
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("TEST_PTXRUN", "TRITON", "CI", "PYTEST"))
    }

    def run(*arguments, **environment):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env={**kept, **environment}, capture_output=True, text=True, timeout=600
        )
        return done.stdout + done.stderr

    return run


@pytest.mark.quick
def test_failures_and_crashes_are_reported(run):
    output = run("tests/ptxrun")
    for outcome, name in (
        ("PASSED", "test_first"),
        ("PASSED", "test_odd[1]"),
        ("FAILED", "test_odd[2]"),
        ("FAILED", "test_crash"),
        ("SKIPPED", "test_skipped"),
        ("PASSED", "test_last"),
    ):
        assert any(f"::{name} {outcome}" in line for line in output.splitlines()), output
    assert "assert (2 % 2) == 1" in output
    assert "printed 2" in output
    assert "the process ended while it ran this test\nexit status -11" in output
    assert "2 failed, 3 passed, 1 skipped" in output


def test_workers_end_with_their_last_test(run):
    output = run("tests", CI="true")
    assert "test_no_worker_is_left PASSED" in output
    assert "2 failed, 4 passed, 1 skipped" in output


def test_which_cases_run(run):
    """Few in `make test`, all in CI and where the folder is named."""
    assert "2/7 tests collected (5 deselected)" in run("--collect-only")
    assert "7 tests collected" in run("--collect-only", CI="true")
    assert "6 tests collected" in run("--collect-only", "tests/ptxrun")
