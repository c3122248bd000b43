"""The command as a process: interrupted in the middle, compared at the end, with a step that fails."""

import json
import signal
import time

import pytest
from live_processes import naming
from step_cases import start

from scripts.kit.records import read_run, write_lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted(tmp_path, number):
    """The benchmark that runs is ended, and what was found before it is written."""
    out = tmp_path / "out"
    argv = ["--core", "--only", "codec-quick", "--only", "transfer-quick", "--only", "attention-quick"]
    process = start(*argv, "--out", out)
    log = out / "logs" / "attention-quick.log"
    for _ in range(6000):
        if log.is_file() or process.poll() is not None:
            break
        time.sleep(0.1)
    time.sleep(2)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=60)
    killed = number == signal.SIGKILL
    assert process.returncode == (-number if killed else 128 + number), printed
    found = read_run(out / "results.jsonl")
    status = {name: record.status for name, record in found.steps.items()}
    stopped = {} if killed else {"attention-quick": "interrupted", "transfer-quick": "skipped"}
    assert status == {"codec-quick": "ok", **stopped}
    assert found.is_complete != killed
    assert len(found.steps["codec-quick"].measurements) > 20
    assert killed or f"interrupted by {number.name}" in printed
    for _ in range(200 * killed):  # Linux tells the step, which then ends
        if not naming(str(out)):
            break
        time.sleep(0.1)
    assert not naming(str(out))


#: SGLang and packages that come with it; for `find_spec` they are not there.
HIDDEN = ("sglang", "sgl_kernel", "transformers", "flashinfer", "safetensors")


def test_run_and_compare(tmp_path):
    """On a box with torch alone, from another folder; compared with an equal run, and with an older run that
    has a metric which the newer one lacks.
    """
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({HIDDEN}))")
    core = ("--core", "--only", "codec-quick", "--out", "first")
    first = start(*core, folder=tmp_path, PYTHONPATH=str(tmp_path))
    printed, _ = first.communicate(timeout=300)
    assert first.returncode == 0, printed
    results = tmp_path / "first" / "results.jsonl"
    facts = read_run(results).facts
    assert "sglang" not in facts["modules"]
    assert "torch" in facts["versions"]
    # A second run into the same folder has nothing left to do.
    second = start(*core, folder=tmp_path)
    printed, _ = second.communicate(timeout=300)
    assert second.returncode == 0
    assert "[1/" not in printed
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
