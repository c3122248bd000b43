"""Runs of `sgl-kvpool demo` and `sgl-kvpool evaluate` with the small model, also killed ones."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
from live_processes import ended
from programs import clean_environment, printed_by, python_path

from sgl_kvpool.commands.processes.server import cpu_arguments
from sgl_kvpool.demo.model import held_out_windows
from sgl_kvpool.demo.model import model_path as shipped_model_path

HERE = Path(__file__).resolve().parent
MODELS = "sgl_kvpool.demo.models"


def demo(model_path, folder):
    """The demo with its small model, for all layouts; what it prints, and demo.json."""
    folder.mkdir()
    program = Path(sys.executable).parent / "sgl-kvpool"
    return {
        "printed": printed_by([program, "demo", "--model", "bytes", "--out", folder / "results"], 1800),
        "files": sorted(path.name for path in (folder / "results").iterdir()),
        **json.loads((folder / "results" / "demo.json").read_text()),
    }


def evaluated(model_path, folder):
    """`evaluate` with two layouts, killed before its hidden numbers, and again; with a third whose rows are
    decoded wrongly on purpose; and of a model that it takes for one with sparse attention, in two pools.
    """
    folder.mkdir()
    text = folder / "text.txt"
    text.write_text("".join(window.text for window in held_out_windows()[:3]))
    arguments = cpu_arguments(shipped_model_path(), 1)[4:]  # without model and port
    command = [sys.executable, "-m", "sgl_kvpool", "evaluate", "--model", shipped_model_path()]
    command += ["--text", text, "--windows", "5", "--window-tokens", "512", "--hidden-tokens", "1000"]
    killed = killed_evaluation(
        [*command, "--layouts", "bf16,fp4", "--out", folder / "results", "--", *arguments],
        folder / "results" / "evaluate.json",
    )
    printed = [
        printed_by(
            [*command, "--layouts", layouts, "--out", folder / "results", "--", *arguments], 900,
            SGLANG_EXTERNAL_MODEL_PACKAGE=models, PYTHONPATH=python_path(HERE),
        )
        for layouts, models in (("bf16,fp4", MODELS), ("bf16,fp4_fp8_rope", "damaged_models"))
    ]  # fmt: skip
    sparse = shutil.copytree(shipped_model_path(), folder / "sparse")
    config = {**json.loads((sparse / "config.json").read_text()), "index_topk": 64}
    (sparse / "config.json").write_text(json.dumps(config))
    command = [*command[:5], sparse, *command[6:-2], "--layouts", "fp4"]
    environment = clean_environment(SGLANG_EXTERNAL_MODEL_PACKAGE=MODELS, SGLANG_RADIX_FORCE_MISS="1")
    pools = []
    for tokens in ("3072", "1536"):
        out = folder / f"pool-{tokens}"
        pool = ["--page-size", "256", "--max-total-tokens", tokens, "--host", "192.0.2.1"]
        done = subprocess.run(
            [*command, "--out", out, "--", *arguments, *pool],
            stdout=subprocess.PIPE, text=True, timeout=900, env={**os.environ, **environment},
        )  # fmt: skip
        json_file = out / "evaluate.json"
        pools.append((done.returncode, done.stdout, json_file.exists() and json.loads(json_file.read_text())))
    found = {"printed": printed, "killed": killed, "pools": pools}
    found["files"] = sorted(path.name for path in (folder / "results").iterdir())
    return found | json.loads((folder / "results" / "evaluate.json").read_text())


def killed_evaluation(command, results):
    """Results of `evaluate` that is killed once there are some, and what is left of its processes."""
    environment = {**os.environ, **clean_environment(SGLANG_EXTERNAL_MODEL_PACKAGE=MODELS)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    while not results.exists() and process.poll() is None:
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    left = [one.pid for one in family if not ended(one.pid, 10)]
    return {"family": len(family), "left": left, "results": json.loads(results.read_text())["results"]}


#: The demo with its small model and one layout.
BYTES_DEMO = (sys.executable, "-m", "sgl_kvpool", "demo", "--model", "bytes", "--layouts", "fp4")


def killed(model_path, folder):
    """The demo, whose scheduler is killed while it scores, as Linux does when memory is short."""
    folder.mkdir()
    env = {**os.environ, **clean_environment()}
    command = [*BYTES_DEMO, "--out", folder / "results"]
    printed = folder / "printed"
    with printed.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
    while "ready after" not in printed.read_text() and process.poll() is None:
        time.sleep(0.2)
    # Forked processes keep the name of the importing one; the scheduler has most memory of its own.
    family = psutil.Process(process.pid).children(recursive=True)
    servers = [child for child in family if child.ppid() != process.pid]
    max(servers, key=lambda child: child.memory_full_info().uss).kill()
    return {"status": process.wait(timeout=300), "printed": printed.read_text()}


JOBS = {"demo": demo, "evaluated": evaluated, "killed": killed}
