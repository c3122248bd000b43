"""Steps that run a few lines of Python, and the program that runs steps, for its tests."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import asdict

from scripts.kit.environment import ROOT, Machine
from scripts.kit.records import Measurement
from scripts.kit.runner import Step
from scripts.servers.server_steps import measurements

GOOD = Measurement("answer", 42.0, "s", "fact")
#: A machine with a GPU, torch and what tests need, without SGLang.
ONLY_TORCH = Machine(("NVIDIA H200",), frozenset({"pytest", "numpy", "ml_dtypes", "triton", "tvm_ffi"}))


def step(name, code, *, limit_s=30.0, parse=measurements, **more):
    """A step that runs Python code, in which `folder` is its folder."""
    text = "import sys; from pathlib import Path; folder = Path(sys.argv[1])\n" + textwrap.dedent(code)
    return Step(name, name, (sys.executable, "-c", text, "{folder}"), limit_s, parse, **more)


def measured(measurement, times=1):
    """Code that writes a measurement."""
    text = (json.dumps(asdict(measurement)) + "\n") * times
    return f"(folder / 'measurements.jsonl').write_text({text!r})"


def good(name, measurement=GOOD, **more):
    """A step that writes a measurement and counts its runs."""
    return step(name, measured(measurement) + "; (folder / 'ran').open('a').write('x')", **more)


def start(*argv):
    """A process of the program; its errors are on stdout."""
    return subprocess.Popen(
        [sys.executable, ROOT / "scripts" / "h100_regression.py", *map(str, argv)], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
