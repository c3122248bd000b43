"""scripts/h100_regression.py without a GPU: the reduced form of one layout, and a broken product.

Runs in the background like the servers of the other tests; see conftest.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from programs import printed_by

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.append(str(ROOT))

# ruff: noqa: E402
# These imports need the path.
from scripts.kit.environment import Machine
from scripts.kit.records import read_run, write_lines
from scripts.kit.runner import Step, run_steps
from scripts.servers.server_steps import measurements

SERVER = "serve-demo-fp4"


def regression(model_path, folder):
    """The command for one layout; then that layout's server once more, its decoder damaged."""
    out = folder / "results"
    command = [sys.executable, ROOT / "scripts" / "h100_regression.py", "--layouts", "fp4", "--out", out]
    printed = printed_by(command, 1500)
    run = read_run(out / "results.jsonl")
    return {"printed": printed, "run": run, "damaged": _damaged(out, run, folder)}


def _damaged(out, run, folder):
    """The run as it would have been with a decoder that negates every second value."""
    request = json.loads((out / "steps" / SERVER / "request.json").read_text())
    request["environment"] |= {
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "damaged_models",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]),
    }
    request["parts"] = ["accuracy"]
    # Its own process, because a step ends all descendants of the process that runs it.
    command = [sys.executable, __file__, json.dumps(request), folder / "damaged"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1500, check=True)
    path = folder / "damaged.jsonl"
    others = [one.as_line() for one in run.steps.values() if one.name != SERVER]
    write_lines(path, [run.first_line(), *others, json.loads(done.stdout.splitlines()[-1])])
    return read_run(path)


def main():
    """Run the step of a request; its lines of results.jsonl are the last line of the output."""
    request, folder = sys.argv[1:]
    command = (sys.executable, "-m", "scripts.servers.serve", "{folder}")
    given = {"files": {"request.json": request}, "environment": {"OMP_NUM_THREADS": "1"}}
    step = Step(SERVER, "damaged", command, 900, measurements, **given)
    records = []
    run_steps([step], Machine(), Path(folder), ended=records.append, say=print)
    print(json.dumps(records[0].as_line()))


if __name__ == "__main__":
    main()
