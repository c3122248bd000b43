"""`scripts.soak` as a user types it, for one minute; and on a server that is broken on purpose."""

import json
import os
import sys
from pathlib import Path

from live_processes import ran
from programs import clean_environment

ROOT = Path(__file__).resolve().parents[2]
SOAK = (sys.executable, "-m", "scripts.soak")


def soak(*arguments):
    """A job of conftest's: runs the script, and returns its report with `printed` and `status`."""

    def job(_model_path, folder):
        folder.mkdir()
        command = [*SOAK, *arguments, "--json", folder / "soak.json", "--out", folder / "logs"]
        done = ran(*command, cwd=ROOT, timeout=1500, env={**os.environ, **clean_environment()})
        assert done.returncode in (0, 1), done.stdout[-4000:] + done.stderr[-4000:]
        report = json.loads((folder / "soak.json").read_text())
        return {**report, "printed": done.stdout, "status": done.returncode}

    return job


#: What conftest starts by name.
JOBS = {
    "soak": soak("--legs", "fp4", "--minutes", "1"),
    "soak-broken": soak("--legs", "bf16", "--minutes", "0.75", "--break", "load-order", "host-leak"),
}
