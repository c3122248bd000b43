"""First light where only the packages that docs/benchmarks.md lists are installed."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.kit.environment import ROOT
from scripts.servers.steps import first_light_steps

#: Distributions of programs that the page names.
DISTRIBUTIONS = {"nvcc": "nvidia-cuda-nvcc"}
#: What is missing for each step on this machine with a GPU, by the steps of first light.
NEEDS = """
import dataclasses, json
from scripts.kit.environment import find_machine
from scripts.servers.steps import first_light_steps
machine = dataclasses.replace(find_machine(), gpus=("NVIDIA H100",))
print(json.dumps({step.name: machine.missing(step.needs) for step in first_light_steps(on_gpu=True)}))
"""
#: Compiles what the steps run: the transfer engines, a decode kernel, the codec.
COMPILED = """
import sys, torch
sys.path.insert(0, "tests/attention")
from compile_decode import compile_decode
from sgl_kvpool.transfer.gpu_engine import calls_module
print(calls_module((9, 0)).load().has_batches(), len(compile_decode("fp4", 16).asm["cubin"]) > 1000)
import ml_dtypes, numpy, scripts.bench.attention.benchmark, scripts.bench.codec, scripts.bench.tiles
import scripts.bench.tests, scripts.bench.transfer
"""


def documented():
    """The list of the page."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    (listed,) = re.findall(r"\. ([^.]+) are enough;", page)
    return [DISTRIBUTIONS.get(name.lower(), name.lower()) for name in re.split(r",\s+|\s+and\s+", listed)]


def with_requirements(names):
    """Distributions of this environment with what they require, by name."""
    found, left = {}, [Requirement(name) for name in names]
    while left:
        wanted = left.pop()
        one = found[wanted.name] = metadata.distribution(wanted.name)
        for text in one.requires or ():
            more = Requirement(text)
            extras = [{"extra": extra} for extra in (*wanted.extras, "")]
            needed = more.marker is None or any(map(more.marker.evaluate, extras))
            if needed and (more.name not in found or more.extras):
                left.append(more)
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Python of an environment with links to these distributions' files, and nothing else."""
    folder = tmp_path_factory.mktemp("bare") / "env"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for one in with_requirements(documented()).values():
        for file in one.files:
            source = Path(one.locate_file(file))
            compiled = [Path(importlib.util.cache_from_source(source))] if source.suffix == ".py" else []
            for path in (source, *compiled):
                target = Path(os.path.normpath(site / os.path.relpath(path, one.locate_file(""))))
                if path.exists() and not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.symlink_to(path)
    return folder / "bin" / "python"


def run(bare, *words, **changes):
    """Output of the environment's Python, in the checkout, with nothing of this environment."""
    kept = {name: os.environ[name] for name in ("HOME", "PATH", "TMPDIR") if name in os.environ}
    here = str(Path(sys.executable).parent)
    kept["PATH"] = os.pathsep.join(one for one in kept["PATH"].split(os.pathsep) if one != here)
    kept |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **changes}
    done = subprocess.run([bare, *words], cwd=ROOT, env=kept, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_no_step_lacks_anything_and_its_code_compiles(bare, tmp_path):
    assert set(json.loads(run(bare, "-c", NEEDS)).values()) == {None}
    listed = run(bare, "scripts/h100_regression.py", "--first-light", "--device", "cpu", "--list")
    assert "skipped" not in listed
    cache = {name: str(tmp_path) for name in ("TVM_FFI_CACHE_DIR", "TRITON_CACHE_DIR")}
    assert run(bare, "-c", COMPILED, **cache) in ("True True\n", "False True\n")


def test_every_test_is_collected(bare):
    files = [word for step in first_light_steps(on_gpu=True) for word in step.command if word.endswith(".py")]
    words = ["-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", *files]
    counts = re.findall(r"^(tests/gpu/\w+\.py): (\d+)$", run(bare, *words), flags=re.M)
    assert {name for name, _ in counts} == set(files)
    assert sum(int(count) for _, count in counts) > 500
