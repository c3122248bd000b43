"""Worker processes whose jobs hang, crash, or leave the worker unusable; all of them real processes."""

import subprocess
import sys
from pathlib import Path

import pytest
from live_processes import alive, ended

from scripts.kit.workers import run_jobs

ROOT = Path(__file__).resolve().parents[3]
#: A worker that does what a job says; its hello is its process id.
WORKER = """
import os, signal, sys, time
from scripts.kit.workers import Jobs

jobs = Jobs()
print("not an answer")
for job in jobs.begin(os.getpid()):
    match job:
        case ["sleep", seconds]: time.sleep(seconds)
        case ["exit", status]: os._exit(status)
        case ["kill", number]: os.kill(os.getpid(), number)
        case ["broken"]: jobs.answer("broken", usable=False)
    jobs.answer([os.getpid(), job])
"""


@pytest.fixture
def crew(tmp_path):
    """`crew(jobs)`: (outcomes in order of completion, why jobs were left undone)."""
    program = tmp_path / "worker.py"
    program.write_text(WORKER)

    def go(jobs, *, command=(sys.executable, str(program)), **options):
        found = []
        return found, run_jobs(command, jobs, ended=found.append, **options)

    return go


def test_jobs_of_one_worker_are_run_in_order(crew):
    found, left = crew([["sleep", 0], "a", {"b": [1]}])
    assert left == ""
    assert [one.value[1] for one in found] == [["sleep", 0], "a", {"b": [1]}] == [one.job for one in found]
    assert len({one.value[0] for one in found}) == 1
    assert all(one.failure == "" and one.seconds < 5 for one in found)


def test_a_job_that_hangs_or_crashes_costs_no_other(crew):
    found, left = crew(
        ["first", ["sleep", 600], "second", ["exit", 3], ["kill", 11], ["broken"], "last"], job_limit_s=2.0
    )
    assert left == ""
    said = {str(one.job): one.failure for one in found}
    assert said == {
        "first": "",
        "['sleep', 600]": "hung: killed after 2 s",
        "second": "",
        "['exit', 3]": "its process ended with exit status 3",
        "['kill', 11]": "its process was killed by SIGSEGV",
        "['broken']": "",
        "last": "",
    }
    pids = [one.value[0] for one in found if isinstance(one.value, list)]
    assert len(set(pids)) == len(pids) == 3  # a new worker after each of the bad jobs
    assert [one.value for one in found if one.job == ["broken"]] == ["broken"]


def test_several_workers_share_the_jobs(crew):
    found, _ = crew([["sleep", 3.0]] * 4, workers=4)
    assert len({one.value[0] for one in found}) > 1


def test_jobs_may_be_made_from_the_first_hello(crew):
    found, left = crew(lambda pid: [[pid, number] for number in range(3)], workers=2)
    assert left == ""
    assert sorted(one.job[1] for one in found) == [0, 1, 2]
    (told,) = {one.job[0] for one in found}
    assert isinstance(told, int)


def test_workers_that_do_not_start(crew):
    found, left = crew(["a", "b"], command=(sys.executable, "-c", "raise SystemExit(7)"), workers=2)
    assert found == []
    assert left == "no worker could be started: its process ended with exit status 7 before its first job"
    _, left = crew(lambda hello: [], command=("/no/such/program",))
    assert left.startswith("no worker could be started: [Errno 2]")
    hangs = (sys.executable, "-c", "import time; time.sleep(600)")
    _, left = crew(["a"], command=hangs, start_limit_s=0.5)
    assert left == "no worker could be started: hung: killed after 0.5 s before its first job"


def test_what_the_program_raises_ends_it(crew, tmp_path):
    def raises(outcome):
        raise KeyError("no room")

    with pytest.raises(KeyError, match="no room"):
        run_jobs([sys.executable, str(tmp_path / "worker.py")], ["a", "b"], ended=raises)


def test_no_jobs_start_no_worker(crew):
    assert crew([], command=("/no/such/program",)) == ([], "")


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_workers_end_with_a_program_that_is_killed(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    code = f"""
import sys
from scripts.kit.workers import run_jobs
def jobs(pid):
    print(pid, flush=True)
    return [["sleep", 600]]
run_jobs([sys.executable, {str(tmp_path / "worker.py")!r}], jobs, ended=print)
"""
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    worker = int(program.stdout.readline())
    assert alive(worker)
    program.kill()
    program.communicate()
    assert ended(worker)


def test_a_broken_cuda_context_is_noticed(monkeypatch):
    import torch

    from scripts.kit.workers import cuda_is_broken

    assert not cuda_is_broken()  # no context here, or a sound one
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert not cuda_is_broken()

    def fails():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    assert cuda_is_broken()
