"""`scripts.soak` as it is typed: its options, what it says before and afterwards, and signals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.kit.processes import processes
from scripts.soak import __main__ as soak
from scripts.soak import checks as soak_checks

ROOT = Path(__file__).resolve().parents[2]


def session(pid):
    """Processes of a session that still run."""
    return [process for process, (_, leader, _) in processes().items() if leader == pid]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_server_too(number, tmp_path):
    """The signal comes long before the server is ready; its processes have to end with the command."""
    report = tmp_path / "soak.json"
    command = [sys.executable, "-m", "scripts.soak", "--legs", "fp8", "fp4", "--json", report]
    with subprocess.Popen(
        [*command, "--out", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        # A background job of a script inherits an ignored SIGINT, and a job of nohup an ignored SIGHUP.
        preexec_fn=lambda: [signal.signal(one, signal.SIG_DFL) for one in (signal.SIGINT, signal.SIGHUP)],
    ) as process:
        servers, deadline = [], time.monotonic() + 120
        while not servers and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
            servers = [
                pid
                for pid, (parent, leader, _) in processes().items()
                if parent == process.pid and leader == pid  # a server has a session of its own
            ]
        assert len(servers) == 1, "no server was seen"
        process.send_signal(number)
        printed, complaints = process.communicate(timeout=60)
    left = session(servers[0])
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
    assert process.returncode == 128 + number
    assert complaints == ""
    assert f"stopped by {number.name}; 0 of 2 servers were soaked" in printed
    assert json.loads(report.read_text())["stopped_by"] == number.name


def test_nohup_keeps_it_from_a_hangup():
    code = (
        "import os, signal; from scripts.kit.runner import signals_interrupt\n"
        "with signals_interrupt(): os.kill(os.getpid(), signal.SIGHUP); print('here')"
    )
    done = subprocess.run(
        ["nohup", sys.executable, "-c", code],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "here\n"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "--minutes 0 is not above 0"),
        (["--minutes=-1"], "--minutes -1 is not above 0"),
        (["--minutes", "nan"], "--minutes nan is not above 0"),
        (["--clients", "0"], "--clients 0 is below 1"),
        (["--server-args", "--x 'y"], "No closing quotation"),
        (["--json", "/"], "/ cannot be written (Is a directory)"),
        (["--out", f"{__file__}/logs"], "Not a directory"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        soak.parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_variable_that_no_server_takes(monkeypatch, capsys):
    """Refused before a server starts, whose refusal would be reported as a violation."""
    monkeypatch.setenv("KVPOOL_LAYOUT", "fp4")
    with pytest.raises(SystemExit) as ended:
        soak.parse([])
    assert ended.value.code == 2
    assert "KVPOOL_LAYOUT='fp4' is not a variable of sgl-kvpool" in capsys.readouterr().err


def test_what_too_few_requests_did_not_reach():
    """The counts of 12 s on a busy machine."""
    few = {
        "answers_complete": 9,
        "answers_given_up": 1,
        "found_tokens": {"device": 48, "host": 0, "storage": 0},
        "server_counts": {"evicted_tokens": 0, "backed_up_tokens": 96, "loaded_tokens": 0},
        "censuses": 2,
    }
    assert soak_checks.too_few(few, 2048, has_store=False) == [
        "9 answers, fewer than 20",
        "aborted requests: 1, fewer than 2",
        "0 tokens evicted from a pool of 2048",
        "loaded tokens: 0",
        "2 censuses, fewer than 3: growth of memory not checked",
        "nothing found in the host tier",
    ]
    assert soak_checks.too_few(few, 2048, has_store=True)[-1] == "nothing found in the store"
    assert soak_checks.too_few({**few, "found_tokens": {}}, 2048, has_store=False)[5] == (
        "nothing found on the device"
    )


def test_too_few_requests_are_said_last(monkeypatch, capsys):
    def one(leg, *_, **__):
        few = ["9 answers, fewer than 20"] if leg.name == "fp8" else []
        return {"name": leg.name, "violations": [], "too_few": few}

    monkeypatch.setattr(soak, "soak", one)
    monkeypatch.setattr("sys.argv", ["soak.py", "--legs", "fp8", "fp4", "--minutes", "0.4"])
    assert soak.main() == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("servers fp8, fp4, one after the other, 12 s of traffic on each")
    assert "  TOO FEW REQUESTS to mean anything: 9 answers, fewer than 20" in lines
    assert lines[-2].startswith("TOO FEW REQUESTS to mean anything on fp8: give each server a minute")
    assert "(--minutes 2)" in lines[-2]
    assert lines[-1].startswith("violations: 0; again: python -m scripts.soak")


def test_a_violation_is_more_than_too_few_requests(monkeypatch, capsys):
    record = {"violations": ["x"], "too_few": ["9 answers, fewer than 20"]}
    monkeypatch.setattr(soak, "soak", lambda leg, *_, **__: {"name": leg.name, **record})
    monkeypatch.setattr("sys.argv", ["soak.py", "--legs", "fp4"])
    assert soak.main() == 1
    assert "TOO FEW REQUESTS to mean anything on fp4" in capsys.readouterr().out


def test_damage_that_no_check_notices_is_no_success(monkeypatch, capsys):
    def one(leg, *_, **__):
        return {"name": leg.name, "violations": ["x"] if leg.name == "fp8" else []}

    monkeypatch.setattr(soak, "soak", one)
    monkeypatch.setattr("sys.argv", ["soak.py", "--legs", "fp8", "fp4", "--break", "load-byte"])
    assert soak.main() == 1
    assert "\nDAMAGE NOT NOTICED on fp4: load-byte\n" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["soak.py", "--legs", "fp4", "--break", "load-byte"])
    assert soak.main() == 3


def test_transfers_that_the_watch_did_not_see_are_reported():
    """As if SGLang moved pages by another method than the watched ones."""
    values = {"sglang:hicache_backup_tokens_total": 192.0, "sglang:load_back_tokens_total": 64.0}
    device = {"page_size_tokens": 32}
    seen = {"backed_up_pages": 6, "loaded_pages": 2}
    assert soak_checks.watch_problems(values, {"device": device, "transfers": seen}) == []
    assert soak_checks.watch_problems({}, {"device": device, "transfers": None}) == []
    assert soak_checks.watch_problems(
        values, {"device": device, "transfers": {**seen, "loaded_pages": 1}}
    ) == ["sglang:load_back_tokens_total is 64, but the transfers of 32 were compared"]
    assert len(soak_checks.watch_problems(values, {"device": device, "transfers": None})) == 2
