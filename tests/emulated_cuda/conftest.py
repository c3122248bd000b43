"""Processes on the device, forked from one that has imported SGLang."""

import json
import os
from pathlib import Path

import forks
import pytest

HERE = Path(__file__).resolve().parent
#: SGLang's options: none of DeepGEMM's compiled code, and a radix tree in Python, which takes such tensors.
OPTIONS = {"SGLANG_ENABLE_JIT_DEEPGEMM": "0", "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
MODULES = (
    *("sglang.srt.managers.scheduler", "sglang.srt.entrypoints.engine"),
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller",
)


def environment(device):
    """Environment of processes on the device, or of processes that have none."""
    paths = [HERE.parent.parent, HERE.parent, HERE.parent / "codec", HERE.parent / "engine"]
    if device == "cuda":
        return {**os.environ, **OPTIONS, "PYTHONPATH": os.pathsep.join(map(str, [HERE / "site", *paths]))}
    left_out = ("TEST_EMULATED", "TRITON_INTERPRET", "TRITON_CACHE_DIR", "CUDA_HOME", "TVM_FFI_CACHE_DIR")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, paths))}


def said(processes, code, limit_s=900, **environment):
    """What the code prints last, as JSON, in a process of `Forks`; and its log."""
    done = processes.run(code, limit_s=limit_s, **environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


@pytest.fixture(scope="session")
def on_device(tmp_path_factory):
    """`Forks` on the device, with SGLang imported."""
    folder = tmp_path_factory.mktemp("device")
    with forks.Forks(*MODULES, output=folder, environment=environment("cuda")) as process:
        yield process
