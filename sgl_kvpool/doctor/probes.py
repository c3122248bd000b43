"""What `sgl-kvpool doctor` looks at. Each probe returns facts, problems and notes, and may fail.

Probes that import torch or SGLang run in a process of their own (``python -m sgl_kvpool.doctor.probes
NAME``), since a broken installation may hang, end or crash the process that imports it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sgl_kvpool import __version__, env
from sgl_kvpool.layout import MLAKVCacheLayout

__all__ = ["Finding", "cgroup_free_bytes", "gpu", "host", "in_child"]

#: Distributions whose version matters; those after the first four may be absent.
_PACKAGES = (
    *("sglang", "torch", "flashinfer-python", "triton"),
    *("sglang-kernel", "apache-tvm-ffi", "nvidia-cuda-nvcc", "matplotlib"),
)
_GROUP = "sglang.srt.plugins"
#: Importing all of SGLang's modules that we touch takes 25 s on two cores.
_TIMEOUT_SECONDS = 300


@dataclass
class Finding:
    """What one probe saw.

    Attributes
    ----------
    facts : dict
        Values by name, JSON types only.
    problems : list of str
        What keeps layouts from working, with the way out.
    notes : list of str
        What is worth knowing and no problem.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def packages() -> Finding:
    """Versions of Python and of the distributions that play a part."""
    from sgl_kvpool.sglang_plugin.seams import version_problem

    finding = Finding({"sgl-kvpool": __version__, "python": platform.python_version()})
    for name in _PACKAGES:
        try:
            finding.facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            finding.facts[name] = None
    problem = version_problem()
    if problem and finding.facts["sglang"] and env.flag(env.ALLOW_UNTESTED):
        finding.notes.append(f"{problem}; {env.ALLOW_UNTESTED} is set")
    elif problem:
        finding.problems.append(problem)
    return finding


def plugin() -> Finding:
    """Whether SGLang will load the plugin, and what the environment asks of it."""
    finding = Finding()
    found = importlib.metadata.entry_points(group=_GROUP, name=env.PLUGIN)
    finding.facts["entry point"] = next((point.value for point in found), None)
    if not found:
        finding.problems.append(
            f"no entry point {env.PLUGIN} in group {_GROUP}: install the package (pip install -e .), a "
            "folder on PYTHONPATH is not enough"
        )
    finding.facts[env.SGLANG_PLUGINS] = os.environ.get(env.SGLANG_PLUGINS) or None
    problem = env.plugin_list_problem()
    if problem:
        finding.problems.append(problem)
    for name in (env.KV_CACHE_LAYOUT, env.PREFILL_READS_ROWS, env.ALLOW_UNTESTED, env.CHECK_FINITE):
        value = env.text(name)
        if value is None:
            continue
        finding.facts[name] = value
        try:
            if name != env.KV_CACHE_LAYOUT:
                env.flag(name)
            elif value != "auto":
                MLAKVCacheLayout.parse(value)
        except ValueError as error:
            finding.problems.append(f"{name}: {error}")
    return finding


def seams() -> Finding:
    """Whether the installed SGLang still has what we take hold of. Imports SGLang."""
    from sgl_kvpool.sglang_plugin import seams as ours

    every = [*ours.SERVER_ARGS, *ours.LAUNCHER, *ours.SCHEDULER]
    problems = ours.check(every)
    return Finding({"checked": len(every), "hold": len(every) - len(problems)}, problems)


def gpu() -> Finding:
    """GPUs as torch sees them, and the driver. Imports torch."""
    finding = Finding({"driver": None, "CUDA of the driver": None})
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        finding.facts["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
        finding.facts["CUDA of the driver"] = f"{version // 1000}.{version % 1000 // 10}"
    except Exception as error:  # whichever of NVML's errors: torch may know more
        finding.facts["driver"] = f"not found ({type(error).__name__}: {error})"

    import torch

    finding.facts["CUDA of torch"] = torch.version.cuda
    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": properties.name,
                "capability": [properties.major, properties.minor],
                "memory_bytes": properties.total_memory,
            }
        )
        if properties.major != 9:
            finding.notes.append(
                f"{properties.name} has compute capability {properties.major}.{properties.minor}; the "
                "kernels are compiled and tested for 9.0 (H100, H200)"
            )
    finding.facts["devices"] = devices
    if devices:
        return finding
    if finding.facts["CUDA of the driver"]:
        finding.problems.append(
            f"there is an NVIDIA driver, but torch sees no GPU (torch is for CUDA {torch.version.cuda}, "
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r})"
        )
    else:
        finding.notes.append("no GPU: only the model of `sgl-kvpool demo` can be served, on the CPU")
    return finding


def used(device: str) -> Finding:
    """What a server on `device` would use for each layout."""
    from sgl_kvpool.attention.readers import KVPOOL_BACKEND, KVPOOL_DEVICES, readers

    finding = Finding({"device": device, "codec": "Triton kernels" if device == "cuda" else "torch"})
    for layout in MLAKVCacheLayout:
        stock = readers(layout)[1:]
        if device in KVPOOL_DEVICES:
            text = f"attention by {KVPOOL_BACKEND}, chosen by itself"
        elif stock:
            text = f"name an --attention-backend: {', '.join(stock)}"
        else:
            text = f"refused on {device} in this release"
        finding.facts[layout.value] = text
    return finding


def host() -> Finding:
    """Memory that a host tier could use, the limit on locked memory, and cores."""
    import psutil

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memory = psutil.virtual_memory()
    limited = cgroup_free_bytes()
    finding = Finding(
        {
            "memlock_soft_bytes": None if soft == resource.RLIM_INFINITY else soft,
            "memlock_hard_bytes": None if hard == resource.RLIM_INFINITY else hard,
            "memory_bytes": memory.total,
            "free_bytes": memory.available if limited is None else min(memory.available, limited),
            "cores": os.cpu_count(),
        }
    )
    if soft != resource.RLIM_INFINITY:
        finding.notes.append(
            f"at most {soft} bytes of memory may be locked (ulimit -l): registering a host pool with a "
            "network card (RDMA) may fail; raise it with `ulimit -l unlimited` or LimitMEMLOCK=infinity"
        )
    return finding


def cgroup_free_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left under this control group's limit, of version 2 or 1; None without a limit."""
    for limit, use in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            # "max" where version 2 sets no limit; version 1 then says nearly 2^63.
            allowed, taken = int((root / limit).read_text()), int((root / use).read_text())
        except (OSError, ValueError):
            continue
        return None if allowed >= 2**62 else max(0, allowed - taken)
    return None


#: Probes that run in a process of their own.
_IN_CHILD: dict[str, Callable[[], Finding]] = {"seams": seams, "gpu": gpu}


def in_child(name: str) -> Finding:
    """Run one of the probes `seams` and `gpu` in a process of its own; RuntimeError if that fails."""
    done = subprocess.run(
        [sys.executable, "-m", "sgl_kvpool.doctor.probes", name],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_TIMEOUT_SECONDS,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        ending = "\n".join(done.stderr.splitlines()[-3:])
        raise RuntimeError(f"its process ended with status {done.returncode}: {ending}")
    return Finding(**json.loads(done.stdout))


def _main() -> None:
    """Print one finding as JSON; whatever imports print goes to stderr."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    finding = _IN_CHILD[sys.argv[1]]()
    with answer:
        json.dump(asdict(finding), answer)


if __name__ == "__main__":
    _main()
