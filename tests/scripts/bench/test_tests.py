"""Tests that hang, crash or break CUDA, run by `python -m scripts.bench tests` with real pytest processes."""

import json
import signal
import subprocess
import sys
import textwrap

import pytest
from live_processes import ended, holds

from scripts.bench.measurements import measurements
from scripts.bench.tests import in_order
from scripts.kit.environment import on_path

TESTS = """
    import os, time
    import pytest

    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_good(n): pass

    @pytest.mark.parametrize("n", [1, 2])
    def test_bad(n): assert n == 5, "not five"

    def test_hangs(): time.sleep(600)

    def test_crashes(): os.kill(os.getpid(), 11)

    @pytest.mark.skip(reason="no kernel here")
    def test_skipped(): pass

    def test_broken(nothing_of_the_kind): pass

    @pytest.fixture
    def left_open():
        yield
        raise OSError("cannot be closed")

    def test_teardown(left_open): pass
"""
#: Tests with a stand-in for torch: CUDA is in use, and fails once a kernel has failed.
BREAKS_CUDA = """
    import sys, types

    torch = sys.modules["torch"] = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=lambda: None)

    def test_1_faults():
        def fails():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        torch.cuda.synchronize = fails
        fails()

    def test_2_is_not_concerned():
        torch.cuda.synchronize()
"""


@pytest.fixture
def project(tmp_path):
    """`project(name=code, ...)`: files of tests in a folder without any settings of pytest."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")

    def write(**files):
        for name, code in files.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(code))
        return [f"{name}.py" for name in files]

    write.folder = folder
    return write


def start(project, out, *words):
    code = "from scripts.bench import __main__, tests; tests.PytestCases.case_limit_s = 5.0"
    argv = ["tests", *words, "--json", str(out / "results.json")]
    return subprocess.Popen(
        [sys.executable, "-c", f"{code}; raise SystemExit(__main__.main({argv!r}))"],
        cwd=project.folder, env=on_path(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def outcomes(out):
    path = out / "results.json"
    rows = json.loads(path.read_text())["results"] if path.exists() and path.stat().st_size else []
    return {row["job"]["test"]: (row["status"], row.get("reason", "")) for row in rows}


def counts(out):
    """Of measurements that are not of one test."""
    found = measurements(out)
    return {one.metric: one.value for one in found if not one.metric.startswith("test=")}


@pytest.fixture
def run(project, tmp_path):
    """`run(words)`: (exit status, outcomes by test, what was printed)."""

    def go(*words, out="out"):
        process = start(project, tmp_path / out, *words)
        printed, errors = process.communicate(timeout=300)
        return process.returncode, outcomes(tmp_path / out), printed + errors

    return go


def test_every_way_to_end(project, run, tmp_path):
    files = project(test_some=TESTS, test_absent="import no_such_module")
    status, found, printed = run(*files)
    assert status == 1
    reasons = {name.removeprefix("test_some.py::"): both for name, both in found.items()}
    assert reasons["test_good[1]"] == reasons["test_good[2]"] == reasons["test_good[3]"] == ("measured", "")
    assert reasons["test_bad[1]"] == ("wrong", "AssertionError: not five assert 1 == 5")
    assert reasons["test_hangs"] == ("failed", "hung: killed after 5 s")
    assert reasons["test_crashes"] == ("failed", "its process was killed by SIGSEGV")
    assert reasons["test_skipped"] == ("skipped", "no kernel here")
    assert reasons["test_broken"][0] == "wrong"
    assert "fixture 'nothing_of_the_kind' not found" in reasons["test_broken"][1]
    assert reasons["test_teardown"] == ("wrong", "OSError: cannot be closed")
    absent = ("wrong", "cannot be collected: ModuleNotFoundError: No module named 'no_such_module'")
    assert reasons["test_absent.py"] == absent
    # The whole of a failure is in the log.
    assert 'def test_bad(n): assert n == 5, "not five"' in printed
    assert counts(tmp_path / "out") == {"measured results": 3, "wrong or failed results": 7}
    assert "WRONG: test=test_some.py::test_bad[1]: wrong: AssertionError: not five" in printed


def test_what_breaks_cuda_fails_alone(project, run):
    status, found, _ = run(*project(test_cuda=BREAKS_CUDA))
    assert status == 1
    outcome = {name.partition("::")[2]: said for name, (said, _) in found.items()}
    assert outcome == {"test_1_faults": "wrong", "test_2_is_not_concerned": "measured"}
    assert "illegal memory access" in found["test_cuda.py::test_1_faults"][1]


def test_in_one_process_the_fixtures_of_a_module_are_kept(project, run, tmp_path):
    files = project(test_some="""
        import pytest
        @pytest.fixture(scope="module")
        def made(request): return []
        @pytest.mark.parametrize("n", [0, 1, 2])
        def test_good(made, n): made.append(n); assert len(made) == n + 1
        def test_bad(made): raise ValueError(made)
        @pytest.mark.skip(reason="no kernel here")
        def test_skipped(): pass
    """, test_absent="import no_such_module")  # fmt: skip
    status, found, _ = run("--together", *files)
    assert status == 1
    assert [outcome for outcome, _ in found.values()].count("measured") == 3
    assert found["test_some.py::test_bad"] == ("wrong", "ValueError: [0, 1, 2]")
    assert found["test_some.py::test_skipped"] == ("skipped", "no kernel here")
    assert found["test_absent.py"][1].startswith("cannot be collected: ModuleNotFoundError")
    status, _, printed = run("--together", "test_no_such_file.py", out="other")
    assert status == 2
    assert "error: pytest ended with status 4 before its first test" in printed


def test_without_tests(run):
    status, found, printed = run("test_no_such_file.py")
    assert (status, found) == (1, {})
    assert "pytest ended with status 4 before its first test" in printed
    assert "WRONG: nothing was measured\n" in printed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_what_it_found_and_no_process(project, tmp_path, number):
    code = """
        import os, time
        from pathlib import Path
        def test_quick(): pass
        def test_slow():
            Path("pid").write_text(str(os.getpid()))
            time.sleep(600)
        def test_later(): pass
    """
    out = tmp_path / "out"
    process = start(project, out, *project(test_some=code))
    pid = project.folder / "pid"
    assert holds(lambda: pid.exists() and pid.read_text(), 60)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert outcomes(out) == {"test_some.py::test_quick": ("measured", "")}
    assert counts(out)["cases not reached"] == 2
    assert ended(int(pid.read_text()))


def test_the_first_case_of_each_function_comes_first():
    names = ["a.py::x[1]", "a.py::x[2]", "a.py::y", "b.py::x[7]", "b.py::x[8]", "b.py::x[9]"]
    assert in_order(names) == [names[0], names[2], names[3], names[1], names[4], names[5]]
