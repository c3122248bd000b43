"""Steps as real processes: those that hang, fail, print garbage, are killed, or leave servers behind."""

import pytest
from live_processes import ended
from step_cases import GOOD, good, step

from scripts.kit import processes
from scripts.kit.environment import Machine
from scripts.kit.records import Measurement
from scripts.kit.runner import Step, run_steps
from scripts.servers.server_steps import measurements

MACHINE = Machine(modules=frozenset({"numpy"}))
UNMEASURED = Measurement("answer", None, "s", "fact", note="not run: no time left")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(steps)`: records by name; all printed lines are in `run.said`."""
    # Processes that a step leaves behind here never end by themselves.
    monkeypatch.setattr(processes, "_DYING_S", 1.0)

    def go(*steps, **more):
        found, go.said = {}, ""

        def say(text):
            go.said += text

        def keep(record):
            found[record.name] = record

        go.records = found
        returned = run_steps(steps, MACHINE, tmp_path, ended=keep, say=say, **more)
        assert [record.name for record in returned] == [one.name for one in steps] == list(found)
        return found

    return go


def test_one_bad_step_does_not_stop_the_others(run):
    found = run(
        step("fails", "print('first'); sys.exit('no such kernel')"),
        step("garbage", "(folder / 'measurements.jsonl').write_text('{\"metric\": \\n')"),
        step("silent", "pass"),
        step("empty", "(folder / 'measurements.jsonl').write_text('')"),
        good("unmeasured", UNMEASURED),
        step("needs no measurement", "pass", parse=None),
        step("killed", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        step("hangs", "import time; time.sleep(600)", limit_s=1.0),
        Step("absent", "absent", ("/no/such/program",), 5, measurements),
        good("good"),
    )
    said = {name: (record.status, record.reason) for name, record in found.items()}
    assert said["fails"] == ("failed", "exit status 1: no such kernel")
    assert said["garbage"][0] == "failed"
    assert "is not JSON" in said["garbage"][1]
    assert said["silent"][0] == "failed"
    assert "measurements.jsonl" in said["silent"][1]
    assert said["empty"] == ("failed", "nothing was measured")
    assert said["unmeasured"] == ("failed", "nothing was measured: not run: no time left")
    assert said["needs no measurement"] == ("ok", "")
    assert said["killed"] == ("failed", "killed by SIGSEGV")
    assert said["hangs"] == ("timed out", "ended at its limit of 1 s")
    assert found["hangs"].seconds < 15
    assert "cannot start /no/such/program" in said["absent"][1]
    assert said["good"] == ("ok", "")
    assert found["good"].measurements == (GOOD,)
    assert "[10/10] good: " in run.said


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"metric": "a", "value": 1}', "without kind, unit"),
        ('{"metric": "a", "value": NaN, "unit": "s", "kind": "fact"}', "finite"),
        ('{"metric": "a", "value": 1, "unit": "s", "kind": "speed"}', "kind 'speed'"),
        ('{"metric": "a", "value": null, "unit": "s", "kind": "fact"}', "no note"),
    ],
)
def test_invalid_measurements_fail_the_step(run, line, why):
    found = run(step("one", f"(folder / 'measurements.jsonl').write_text({line!r} + chr(10))"))["one"]
    assert found.status == "failed"
    assert why in found.reason


#: Starts a "server" in a session of its own, which starts another, and writes their ids.
SERVER = """
    import subprocess, time
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    inner = f"import subprocess, time; print(subprocess.Popen({sleep!r}).pid, flush=True); time.sleep(600)"
    server = subprocess.Popen(
        [sys.executable, "-c", inner], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    (folder / 'pids').write_text(f"{server.pid} {server.stdout.readline()}")
    time.sleep(1.5)  # the runner has seen both by then
"""


@pytest.mark.parametrize("how", ["time.sleep(600)", "import os; os._exit(3)", "sys.exit(0)"])
def test_servers_of_a_step_end_with_it(run, tmp_path, how):
    """However it ends: at its limit, by a crash, or by forgetting them."""
    found = run(step("one", f"{SERVER}\n    {how}\n", limit_s=4.0, parse=None))["one"]
    pids = (tmp_path / "steps" / "one" / "pids").read_text().split()
    assert len(pids) == 2
    assert all(ended(int(pid)) for pid in pids)
    assert found.is_bad
    if how == "sys.exit(0)":
        assert found.reason == "2 processes outlived it and were killed"


def test_orphans_of_a_server_end_with_its_step(run, tmp_path):
    """A scheduler whose server has died is adopted by the program that runs the steps."""
    code = """
        import subprocess, time
        inner = "import subprocess, sys, time; time.sleep(1.5); "
        inner += "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print(p.pid)"
        server = subprocess.Popen(
            [sys.executable, "-c", inner], start_new_session=True, stdout=subprocess.PIPE, text=True
        )
        (folder / 'pids').write_text(server.stdout.readline())
        server.wait()
    """
    found = run(step("one", code, parse=None))["one"]
    pid = (tmp_path / "steps" / "one" / "pids").read_text()
    assert ended(int(pid))
    assert found.reason == "1 processes outlived it and were killed"


def test_a_step_that_ignores_sigterm_is_killed(run, monkeypatch):
    monkeypatch.setattr(processes, "_GRACE_S", 1.0)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    found = run(step("deaf", code, limit_s=2.0))["deaf"]
    assert found.status == "timed out"
    assert found.seconds < 12


def test_steps_whose_needs_are_missing_are_skipped_with_the_reason(run):
    found = run(
        good("needs-gpu", needs=("numpy", "gpu")),
        good("needs-two", needs=("gpus:2",)),
        good("needs-plugin", needs=("plugin",)),
        step("model", "sys.exit('disk full')"),
        good("server", requires=("model",)),
        good("compared", peers=("model",)),
    )
    said = {name: (record.status, record.reason) for name, record in found.items()}
    assert said["needs-gpu"] == ("skipped", "torch sees no GPU")
    assert said["needs-two"] == ("skipped", "needs 2 GPUs, torch sees 0")
    assert said["needs-plugin"][1].endswith("pip install -e .")
    assert said["server"][0] == "skipped"
    assert "disk full" in said["server"][1]
    # A step that compares reports the failure of its peer itself.
    assert said["compared"][0] == "ok"
