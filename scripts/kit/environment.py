"""Properties of this machine: facts for the first line of results, and requirements of steps."""

import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.kit.outputs import commit
from sgl_kvpool import __version__, compiler
from sgl_kvpool.commands.doctor.probes import processor
from sgl_kvpool.sglang_plugin.fingerprint import versions

_PACKAGES = (
    *("triton", "sglang", "sglang-kernel", "flashinfer-python", "sgl-flash-mla", "sgl-deep-gemm"),
    *("tilelang", "transformers"),
)
_SOURCES = (".py", ".cu", ".cuh", ".h", ".cpp")
#: Fields of nvidia-smi, with present and highest clocks.
_GPU_FIELDS = {
    "name": "name",
    "driver": "driver_version",
    "sm_clock_mhz": "clocks.sm",
    "sm_clock_max_mhz": "clocks.max.sm",
    "power_limit_w": "power.limit",
}
#: Time limit of nvidia-smi in seconds.
_DRIVER_S = 60.0
#: Run in its own process, because a CUDA context here would take memory from the steps.
_ASK_TORCH = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda,
    "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
    "capability": torch.cuda.get_device_capability() if count else None}))
"""
#: Modules that steps may require or compare with.
OPTIONAL_MODULES = (
    *("pytest", "numpy", "ml_dtypes", "hypothesis", "sglang", "flashinfer", "transformers", "safetensors"),
    *("tilelang", "deep_gemm", "sgl_flash_mla", "flash_mla", "triton", "tvm_ffi"),
)


@dataclass(frozen=True)
class Machine:
    """Properties that steps may require.

    `gpus`: Names of the GPUs that torch sees.
    `modules`: Modules of `OPTIONAL_MODULES` that can be imported.
    `lacks`: Reasons by need, of `_missing_compilers`.
    `has_plugin`: Whether SGLang would find this package through its entry point.
    `has_fa3`: Whether sgl_kernel has FlashAttention-3, which SGLang uses for BF16 rows of sparse attention.
    `facts`: Facts from torch, for the first line of results.
    """

    gpus: tuple[str, ...] = ()
    modules: frozenset[str] = frozenset()
    lacks: dict[str, str] = field(default_factory=dict)
    has_plugin: bool = False
    has_fa3: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def missing(self, needs: tuple[str, ...]) -> str | None:
        """Reason why a requirement of `needs` is not met; None if all are met.

        Needs are "gpu", "gpus:N", "plugin", "cc" (for Triton), "c++", "nvcc" or the name of a module.
        """
        return next(filter(None, map(self._missing, needs)), None)

    def _missing(self, need: str) -> str | None:
        if need == "gpu":
            return None if self.gpus else "torch sees no GPU"
        if need.startswith("gpus:"):
            count = int(need.removeprefix("gpus:"))
            return None if len(self.gpus) >= count else f"needs {count} GPUs, torch sees {len(self.gpus)}"
        if need == "plugin":
            found = "sgl-kvpool is not installed, so SGLang does not find it; pip install -e ."
            return None if self.has_plugin else found
        if need in ("cc", "c++", "nvcc"):
            return self.lacks.get(need)
        package = "apache-tvm-ffi" if need == "tvm_ffi" else need
        return None if need in self.modules else f"{package} is not installed"


def on_path() -> dict[str, str]:
    """This process's environment, with the repository first on PYTHONPATH, and without the current folder."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}


def _missing_compilers() -> dict[str, str]:
    """Which of "cc", "c++" and "nvcc" cannot work here, and why."""
    found = {}
    cc, cxx = (os.environ.get(variable) or name for variable, name in (("CC", "cc"), ("CXX", "c++")))
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])
    for need, command in (("cc", cc), ("c++", cxx), ("c++", "ninja")):
        if shutil.which(shlex.split(command)[0], path=path) is None:
            found[need] = f"{command} is not on the PATH"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        found["cc"] = "Triton compiles with Python.h, which is not installed"
    try:
        compiler.cuda_toolkit()
    except FileNotFoundError as error:
        found["nvcc"] = str(error)
    return found


def find_machine() -> Machine:
    """Determine the properties of this machine.

    RuntimeError: if torch cannot be imported, which every step needs.
    """
    done = subprocess.run(
        [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=300, env=on_path()
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"{sys.executable} cannot import torch, which every step needs: {last}")
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    kernels = importlib.util.find_spec("sgl_kernel")
    folder = Path(kernels.submodule_search_locations[0]) if kernels else None  # type: ignore[index]
    return Machine(
        gpus=tuple(facts["gpus"]),
        modules=frozenset(name for name in OPTIONAL_MODULES if importlib.util.find_spec(name) is not None),
        lacks=_missing_compilers(),
        has_plugin="sgl_kvpool" in {one.name for one in metadata.entry_points(group="sglang.srt.plugins")},
        has_fa3=folder is not None and any(folder.glob("flash_ops*")),
        facts=facts,
    )


def facts_of(machine: Machine, argv: list[str]) -> dict[str, Any]:
    """Fields of the first line of results: date, commit, machine and versions."""
    ours = {"torch": machine.facts.get("torch"), "sgl-kvpool": __version__}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": argv,
        "commit": commit(),
        "sources_sha256": sources_sha256(),
        "gpu": machine.gpus[0] if machine.gpus else None,
        "gpu_count": len(machine.gpus),
        "capability": machine.facts.get("capability"),
        "gpus": driver_facts(),
        "cuda": machine.facts.get("cuda"),
        "cpu": processor(),
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {**versions(_PACKAGES), **ours},
        "modules": sorted(machine.modules),
    }


def sources_sha256() -> str:
    """SHA-256 of the sources, which identifies the code also without git."""
    digest = hashlib.sha256()
    for folder in ("sgl_kvpool", "scripts", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in _SOURCES and path.is_file():
                digest.update(f"{path.relative_to(ROOT)}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def driver_facts() -> list[dict[str, str]]:
    """The driver's present values for each GPU; empty without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(_GPU_FIELDS.values())}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_S)
    except subprocess.TimeoutExpired:  # a failed GPU must not lose the results of the run
        return [{"nvidia-smi": f"no answer within {_DRIVER_S:g} s"}]
    if done.returncode != 0:
        return [{"nvidia-smi": f"exit status {done.returncode}: {done.stdout.strip()[:200]}"}]
    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.strip().splitlines()]
    return [dict(zip(_GPU_FIELDS, row, strict=True)) for row in rows]
