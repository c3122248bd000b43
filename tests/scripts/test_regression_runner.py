"""Steps as real processes: those that hang, fail, print garbage, are killed, or leave servers behind."""

import os
import signal
import subprocess
import sys
from dataclasses import asdict

import pytest
from live_processes import ended
from step_cases import GOOD, good, measured, step

from scripts.kit import processes
from scripts.kit.environment import Machine
from scripts.kit.records import Measurement, write_lines
from scripts.kit.runner import Interrupted, Step, run_steps, signals_interrupt
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
    assert "[10/10] good ... " in run.said


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[1, 2]", "expected an object"),
        ('{"metric": "a", "value": 1}', "without kind, unit"),
        ('{"metric": "a", "value": NaN, "unit": "s", "kind": "fact"}', "finite"),
        ('{"metric": "a", "value": "1", "unit": "s", "kind": "fact"}', "finite"),
        ('{"metric": "a", "value": 1, "unit": "s", "kind": "speed"}', "kind 'speed'"),
        ('{"metric": "a", "value": null, "unit": "s", "kind": "fact"}', "no note"),
    ],
)
def test_invalid_measurements_fail_the_step(run, line, why):
    found = run(step("one", f"(folder / 'measurements.jsonl').write_text({line!r} + chr(10))"))["one"]
    assert found.status == "failed"
    assert why in found.reason


def test_a_metric_measured_twice_is_no_result(run):
    found = run(step("one", measured(GOOD, times=2)))["one"]
    assert found.reason == "its results cannot be read: ValueError: 'answer' was measured twice"


def test_what_was_measured_before_the_end_is_kept(run):
    found = run(step("slow", measured(GOOD) + "; import time; time.sleep(600)", limit_s=1.5))["slow"]
    assert (found.status, found.measurements) == ("timed out", (GOOD,))


def test_limits_fail_a_step(run):
    found = run(good("one", Measurement("distance", 0.4, "nats", "distance", "lower", at_most=0.25)))["one"]
    assert (found.status, found.reason) == ("failed", "distance: 0.4 nats, limit at most 0.25")


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


@pytest.mark.parametrize("seconds", [1, 600])
def test_children_that_end_slowly_are_waited_for(run, tmp_path, monkeypatch, seconds):
    """A server's child that takes a while to stop is not left behind; a child that never ends is."""
    monkeypatch.setattr(processes, "_DYING_S", 4.0)
    code = f"""
        import subprocess, time
        inner = "import signal, sys, time; "
        inner += "signal.signal(signal.SIGTERM, lambda *_: (time.sleep({seconds}), sys.exit())); "
        inner += "print('here', flush=True); time.sleep(600)"
        child = subprocess.Popen(
            [sys.executable, "-c", inner], start_new_session=True, stdout=subprocess.PIPE, text=True
        )
        child.stdout.readline()
        (folder / 'pid').write_text(str(child.pid))
        time.sleep(1)  # the runner has seen it by then
        child.terminate()
    """
    found = run(step("one", code, parse=None))["one"]
    assert ended(int((tmp_path / "steps" / "one" / "pid").read_text()))
    assert found.reason == ("" if seconds == 1 else "1 processes outlived it and were killed")
    assert found.status == ("ok" if seconds == 1 else "failed")


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
        good("needs-sglang", needs=("sglang",)),
        good("needs-plugin", needs=("plugin",)),
        good("elsewhere", without="too small a machine"),
        step("model", "sys.exit('disk full')"),
        good("server", requires=("model",)),
        good("compared", peers=("model",)),
    )
    said = {name: (record.status, record.reason) for name, record in found.items()}
    assert said["needs-gpu"] == ("skipped", "torch sees no GPU")
    assert said["needs-two"] == ("skipped", "needs 2 GPUs, torch sees 0")
    assert said["needs-sglang"] == ("skipped", "sglang is not installed")
    assert said["needs-plugin"][1].endswith("pip install -e .")
    assert said["elsewhere"] == ("skipped", "too small a machine")
    assert said["server"][0] == "skipped"
    assert "disk full" in said["server"][1]
    # A step that compares reports the failure of its peer itself.
    assert said["compared"][0] == "ok"


def test_minutes_for_all_together(run):
    found = run(step("long", "import time; time.sleep(600)", limit_s=300), good("late"), minutes=1.5 / 60)
    assert (found["long"].status, found["long"].reason) == ("timed out", "ended at the end of --minutes")
    assert found["late"].status == "skipped"
    assert "minutes were spent" in found["late"].reason


def test_a_step_says_how_long_it_takes(run):
    run(good("quick", expected_s=700), good("absent", expected_s=700, needs=("gpu",)))
    assert "[1/2] quick, about 12 min ... " in run.said
    assert "[2/2] absent ... 0 s skipped" in run.said


def test_limits_are_scaled(run):
    found = run(step("one", "import time; time.sleep(600)", limit_s=10), time_limit_scale=0.1)["one"]
    assert found.reason == "ended at its limit of 1 s"


def test_a_signal_ends_the_step_and_the_rest_is_skipped(run, tmp_path):
    """SIGTERM goes to this process only, not to the step's; unlike Ctrl-C in a terminal."""
    slow = step("slow", SERVER + "\n    time.sleep(600)\n", limit_s=60)
    command = [sys.executable, "-c", f"import os, time; time.sleep(3); os.kill({os.getpid()}, 15)"]
    before = signal.getsignal(signal.SIGTERM)
    sender = subprocess.Popen(command)
    with signals_interrupt(), pytest.raises(Interrupted) as caught:
        run(slow, good("after"))
    sender.wait()
    assert caught.value.number == signal.SIGTERM
    assert (run.records["slow"].status, run.records["slow"].reason) == ("interrupted", "by SIGTERM")
    assert run.records["after"].reason == "interrupted by SIGTERM"
    pids = (tmp_path / "steps" / "slow" / "pids").read_text().split()
    assert all(ended(int(pid)) for pid in pids)
    assert signal.getsignal(signal.SIGTERM) is before


def test_measurements_are_read_as_written(tmp_path):
    other = Measurement("b", None, "x", "kernel_ratio", "lower", note="no peer", layout="fp4")
    write_lines(tmp_path / "measurements.jsonl", [asdict(GOOD)])
    write_lines(tmp_path / "measurements.jsonl", [asdict(other)])
    assert measurements(tmp_path) == [GOOD, other]
