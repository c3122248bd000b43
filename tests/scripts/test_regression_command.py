"""The command as a process: interrupted in the middle, compared at the end, with a step that fails."""

import signal
import time

from live_processes import naming
from step_cases import start

from scripts.kit.records import read_run


def test_interrupted(tmp_path):
    """The benchmark that runs is ended, and what was found before it is written."""
    out, number = tmp_path / "out", signal.SIGINT
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
    assert process.returncode == 128 + number, printed
    found = read_run(out / "results.jsonl")
    status = {name: record.status for name, record in found.steps.items()}
    expected = {"codec-quick": "ok", "attention-quick": "interrupted", "transfer-quick": "skipped"}
    assert status == expected
    assert found.is_complete
    assert len(found.steps["codec-quick"].measurements) > 20
    assert f"interrupted by {number.name}" in printed
    assert not naming(str(out))
