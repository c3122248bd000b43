"""The command as a process: interrupted in the middle, compared at the end, with a step that fails."""

import json
import signal
import time

from live_processes import holds, naming
from step_cases import start

from scripts.kit.records import read_run, write_lines


def test_interrupted(tmp_path):
    """The benchmark that runs is ended, and what was found before it is written."""
    out, number = tmp_path / "out", signal.SIGINT
    argv = ["--core", "--only", "codec-quick", "--only", "transfer-quick", "--only", "attention-quick"]
    process = start(*argv, "--out", out)
    log = out / "logs" / "attention-quick.log"
    holds(lambda: log.is_file() or process.poll() is not None, 600)
    time.sleep(2)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, printed
    found = read_run(out / "results.jsonl")
    status = {name: record.status for name, record in found.steps.items()}
    expected = {"codec-quick": "ok", "attention-quick": "interrupted", "transfer-quick": "skipped"}
    assert status == expected
    assert found.is_complete
    assert len(found.steps["codec-quick"].measurements) > 20
    assert f"interrupted by {number.name}" in printed
    assert not naming(str(out))


def test_run_and_compare(tmp_path):
    """Compared with an equal run, and with an older run that has a metric which the newer one lacks."""
    first = start("--core", "--only", "codec-quick", "--out", tmp_path / "first")
    printed, _ = first.communicate(timeout=300)
    assert first.returncode == 0, printed
    results = tmp_path / "first" / "results.jsonl"
    again = start("--core", "--only", "codec-quick", "--out", tmp_path / "second", "--compare", results)
    printed, _ = again.communicate(timeout=300)
    assert again.returncode == 0, printed
    assert "0 regressions" in printed

    older = read_run(results)
    changed = tmp_path / "older.jsonl"
    line = json.loads(json.dumps(older.steps["codec-quick"].as_line()))
    line["measurements"][-2] |= {"metric": "what is not measured any more"}
    write_lines(changed, [older.first_line(), line])
    third = start("--compare", changed, "--with", tmp_path / "second" / "results.jsonl")
    printed, _ = third.communicate(timeout=300)
    assert third.returncode == 1
    assert "REGRESSION  codec-quick: what is not measured any more: was 20 results, is missing" in printed
