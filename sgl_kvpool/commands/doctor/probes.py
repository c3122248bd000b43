"""The probes of `sgl-kvpool doctor`. Each returns facts, problems and notes, and may fail.

Probes that import SGLang, the driver's library or psutil run in a process of their own (`in_child`),
since a broken installation may hang, end or crash the process that imports it.
"""

import ctypes
import importlib.metadata
import mmap
import os
import platform
import resource
import runpy
import shlex
import shutil
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sgl_kvpool import __version__, compiler, env
from sgl_kvpool.attention.decode_config import HOPPER, gpu_problem
from sgl_kvpool.commands.processes.worker import Jobs, Worker, WorkerEnded
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.numa import interleave, numa_nodes
from sgl_kvpool.srt.facts.readers import KVPOOL_BACKEND, KVPOOL_DEVICES, suggestions
from sgl_kvpool.transfer.host_options import RESERVED_BYTES
from sgl_kvpool.transfer.store_folders import FILE_STORES

_GROUP = "sglang.srt.plugins"
#: Time limit of a probe: importing all of SGLang's modules that we hook takes 25 s on two cores.
_TIMEOUT_SECONDS = 300


@dataclass
class Finding:
    """Result of one probe; `problems` are reasons why layouts do not work, and what to change."""

    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def machine() -> dict[str, Any]:
    """Processor, cores and the GPU, if torch sees one, for the record of a measurement."""
    import torch

    found: dict[str, Any] = {"cpu": processor(), "cores": os.cpu_count(), "system": platform.system()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
        found["cuda"] = torch.version.cuda
    return found


def packages() -> Finding:
    from sgl_kvpool.sglang_plugin.fingerprint import LIBRARIES, versions
    from sgl_kvpool.sglang_plugin.hook_points import version_problem

    finding = Finding({"sgl-kvpool": __version__, "python": platform.python_version()})
    finding.facts |= versions((*LIBRARIES, "apache-tvm-ffi", "nvidia-cuda-nvcc", "matplotlib"))
    problem = version_problem()
    # The probe of the plugin reports a value that is neither yes nor no.
    if problem and finding.facts["sglang"] and env.is_requested(env.ALLOW_UNTESTED):
        finding.notes.append(f"{problem}; {env.ALLOW_UNTESTED} is set")
    elif problem:
        finding.problems.append(problem)
    return finding


def plugin() -> Finding:
    """Whether SGLang will load the plugin, and the environment variables that it will read."""
    from sgl_kvpool.sglang_plugin.options import OPTIONS, environment_problems

    finding = Finding()
    found = importlib.metadata.entry_points(group=_GROUP, name=env.PLUGIN)
    finding.facts["entry point"] = next((point.value for point in found), None)
    if not found:
        finding.problems.append(
            f"no entry point {env.PLUGIN} in group {_GROUP}: install the package (pip install -e .), a "
            "folder on PYTHONPATH is not enough"
        )
    finding.facts[env.SGLANG_PLUGINS] = os.environ.get(env.SGLANG_PLUGINS) or None
    if problem := env.plugin_list_problem():
        finding.problems.append(problem)
    finding.facts |= {name: env.text(name) for name in env.VARIABLES if env.text(name) is not None}
    finding.problems += environment_problems()
    options = {option.env: option for option in OPTIONS}
    requested = [name for name, option in options.items() if env.text(name) not in (None, option.default)]
    if env.KV_CACHE_LAYOUT not in requested:
        finding.notes += [
            f"{name} is set and {env.KV_CACHE_LAYOUT} is not: a server that is not given "
            "--kv-cache-layout will refuse to start"
            for name in requested
        ]
    return finding


def hook_groups() -> tuple[Any, ...]:
    """All hook groups, and one of what the commands and the demo import of SGLang besides."""
    from sgl_kvpool.sglang_plugin.hook_groups import GROUPS
    from sgl_kvpool.sglang_plugin.hook_points import HookGroup
    from sgl_kvpool.sglang_plugin.imports import importing_sglang

    commands = "`sgl-kvpool plan`, `warmup`, `demo` and `doctor --self-check`"
    return (*GROUPS, HookGroup("commands", commands, modules=tuple(importing_sglang("commands", "demo"))))


def hook_points() -> Finding:
    """Hook groups that fail on the installed SGLang, and its differences from the tested one. Imports it."""
    from sgl_kvpool.sglang_plugin import fingerprint
    from sgl_kvpool.sglang_plugin.hook_points import check

    groups = hook_groups()
    points = [point for group in groups for point in group.points()]
    facts = {"checked": len(points), "hold": len(points) - len(check(points))}
    return Finding(facts, fingerprint.failing(groups), fingerprint.differences(groups))


def gpu() -> Finding:
    """GPUs as torch sees them, and the driver. Imports torch."""
    finding = Finding({"driver": None, "CUDA of the driver": None})
    _driver(finding)

    import torch

    finding.facts["CUDA of torch"] = torch.version.cuda
    finding.facts["devices"] = devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        capability = properties.major, properties.minor
        devices.append(
            {
                "name": properties.name,
                "capability": list(capability),
                "memory_bytes": properties.total_memory,
            }
        )
        if properties.major != HOPPER[0]:
            problem = gpu_problem(capability) or "was compiled and tested for 9.0 (H100, H200) only"
            finding.notes.append(f"{properties.name}: {KVPOOL_BACKEND} {problem}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not devices and finding.facts["driver"] is None:
        finding.notes.append("no GPU: only the models of `sgl-kvpool demo` can be served, on the CPU")
    elif not devices and visible is not None:
        finding.notes.append(f"CUDA_VISIBLE_DEVICES={visible!r} hides the GPUs; unset it to use them")
    elif not devices:
        finding.problems.append(
            f"the driver is for CUDA {finding.facts['CUDA of the driver']} and torch, built for CUDA "
            f"{torch.version.cuda}, sees no GPU: install a driver that is at least as new as torch's CUDA"
        )
    return finding


def _driver(finding: Finding) -> None:
    """Version of the NVIDIA driver; a broken driver is a problem, a missing driver is not."""
    try:
        import pynvml
    except ImportError as error:
        finding.notes.append(f"the driver's version is unknown: {error}")
        return
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        finding.facts["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
        finding.facts["CUDA of the driver"] = f"{version // 1000}.{version % 1000 // 10}"
    except pynvml.NVMLError as error:
        if error.value not in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
            finding.problems.append(
                f"the NVIDIA driver does not answer ({error}): reload its kernel modules, reboot, or "
                "reinstall it"
            )


_CPU_CODEC = "C++ (torch if there is no compiler)"


def used(device: str, capability: tuple[int, int] = HOPPER) -> Finding:
    """Attention backend and codec of a server on `device`, by a GPU's capability, for each layout."""
    from sgl_kvpool.sglang_plugin.options import ARRANGEMENT, AUTO, choose_arrangement
    from sgl_kvpool.sglang_plugin.rules.attention import is_chosen

    finding = Finding({"device": device, "codec": "Triton kernels" if device == "cuda" else _CPU_CODEC})
    try:
        requested = ARRANGEMENT.from_env() or AUTO
    except ValueError:  # reported by the probe of the plugin
        requested = AUTO
    arrangement = choose_arrangement(requested)
    finding.facts["arrangement"] = f"{arrangement} ({AUTO})" if requested == AUTO else str(arrangement)
    problem = gpu_problem(capability)
    by_name = "" if problem else f", or by {KVPOOL_BACKEND} if you name it"
    for layout in MLAKVCacheLayout:
        stock = suggestions(layout, device, arrangement)
        if device in KVPOOL_DEVICES and not is_chosen(layout, arrangement, device):
            text = f"attention by a backend of SGLang's choice{by_name}"
        elif device in KVPOOL_DEVICES and problem is not None:
            text = f"refused: {KVPOOL_BACKEND} {problem}"
        elif device in KVPOOL_DEVICES:
            text = f"attention by {KVPOOL_BACKEND}, chosen by default"
        elif stock:
            text = f"name an --attention-backend: {', '.join(stock)}"
        else:
            text = f"refused on {device} in this release"
        finding.facts[layout.value] = text
    return finding


def host() -> Finding:
    """Memory that a host tier could use, the limit on locked memory, cores, NUMA nodes."""
    cxx = env.text("CXX") or "c++"
    with suppress(ValueError):  # an open quote
        cxx = shlex.split(cxx)[0]
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    finding = Finding(
        {
            "memlock_soft_bytes": None if soft == resource.RLIM_INFINITY else soft,
            "memlock_hard_bytes": None if hard == resource.RLIM_INFINITY else hard,
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE,
            "free_bytes": None,
            "host_tier_bytes": None,
            "compiler": shutil.which(cxx),
            "cores": os.cpu_count(),
            **_numa(),
        }
    )
    if finding.facts["compiler"] is None:
        finding.notes.append(
            "no C++ compiler (c++, or what CXX names): the host tier would use torch's copies, which are "
            "slower; install g++"
        )
    try:
        finding.facts["CUDA toolkit"] = str(compiler.cuda_toolkit()[0])
    except FileNotFoundError as error:
        finding.notes.append(f"{error}. On a GPU the host tier would use torch's copies, which are slower")
    if soft != resource.RLIM_INFINITY:
        finding.notes.append(
            f"at most {soft} bytes of memory may be locked (ulimit -l): registering a host pool with a "
            "network card (RDMA) may fail; raise it with `ulimit -l unlimited` or LimitMEMLOCK=infinity"
        )
    spec = find_spec("sglang")
    package = Path() if spec is None or spec.origin is None else Path(spec.origin).parent
    try:
        # SGLang's own number. Its file is run alone, because importing SGLang takes 10 s.
        names = runpy.run_path(str(package / "srt" / "mem_cache" / "host_memory.py"))
        free = names["available_host_memory_bytes"](allow_cgroup_fallback=True)
    except (ImportError, OSError) as error:
        finding.problems.append(f"free memory is unknown ({error}): reinstall SGLang, and psutil for it")
        return finding
    except Exception as error:  # another SGLang; a control group outside this namespace
        finding.problems.append(f"free memory is unknown: {type(error).__name__} of SGLang: {error}")
        return finding
    finding.facts["free_bytes"] = free
    finding.facts["host_tier_bytes"] = max(0, free - RESERVED_BYTES)
    if free <= RESERVED_BYTES:
        finding.notes.append(
            f"--enable-hierarchical-cache would not start: SGLang keeps {RESERVED_BYTES / 1e9:.1f} GB of "
            "host memory free"
        )
    return finding


def store_folders() -> Finding:
    """Folders in which stores of files would keep pages here, and what lets other accounts reach them."""
    finding = Finding()
    for name, store in FILE_STORES.items():
        folders = store.folders()
        finding.facts[name] = ", ".join(map(str, folders)) or None
        for folder in folders:
            warning = store.warning(folder)
            if warning is not None and (folder.exists() or os.environ.get(store.variable)):
                finding.notes.append(warning)
    return finding


def _numa() -> dict[str, Any]:
    """NUMA nodes, and whether memory that ranks share can be interleaved between them."""
    nodes = numa_nodes()
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        view = (ctypes.c_char * mmap.PAGESIZE).from_buffer(page)
        problem = interleave(ctypes.addressof(view), mmap.PAGESIZE, nodes)
        del view  # the mapping cannot be closed while a view exists
    return {"NUMA nodes": len(nodes) or None, "mbind": "works" if problem is None else problem}


def in_child(name: str) -> Finding:
    """Run the probe of this name in a process of its own; RuntimeError if the process sends no finding."""
    command = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"]
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            with Worker(command, errors=errors) as worker:
                worker.hello(_TIMEOUT_SECONDS)
                return Finding(**worker.run(name, _TIMEOUT_SECONDS)["value"])
        except WorkerEnded as ended:
            errors.seek(0)
            last = "\n".join(errors.read().splitlines()[-3:])
            raise RuntimeError(f"{ended}, and gave no answer: {last}") from None


def serve() -> None:
    """In the child: run the probes whose names are sent."""
    jobs = Jobs()
    for name in jobs.begin():
        if name == "self-check":
            from sgl_kvpool.commands.doctor.self_check import self_check

            finding = Finding(*self_check())
        else:
            finding = {"hook points": hook_points, "gpu": gpu, "host": host}[name]()
        jobs.answer(asdict(finding))
