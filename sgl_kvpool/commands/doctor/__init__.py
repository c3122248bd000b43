"""`sgl-kvpool doctor`: installed packages, their compatibility, and what a server here would use."""

import json
import os
import struct
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from sgl_kvpool import compiler
from sgl_kvpool.commands.doctor import probes
from sgl_kvpool.commands.doctor.probes import Finding
from sgl_kvpool.commands.warmup.steps import CACHES
from sgl_kvpool.folders import require_own
from sgl_kvpool.refusal import Refusal

SCHEMA = 1


def examine(
    *, with_self_check: bool = False, reached: Callable[[str], None] = lambda name: None
) -> dict[str, Finding]:
    """Run every probe, also after one failed; findings by name. `reached` is called with a name before it."""
    first: dict[str, Callable[[], Finding]] = {
        "packages": probes.packages,
        "plugin": probes.plugin,
        "compiled code": compiled_code,
        "hook points": partial(probes.in_child, "hook points"),
        "gpu": partial(probes.in_child, "gpu"),
    }
    findings = {}
    for name, probe in first.items():
        reached(name)
        findings[name] = _guarded(probe)
    capabilities = [tuple(gpu["capability"]) for gpu in findings["gpu"].facts.get("devices", ())]
    of_gpu = ("cuda", min(capabilities)) if capabilities else ("cpu",)
    findings["would be used"] = _guarded(partial(probes.used, *of_gpu))
    if "devices" not in findings["gpu"].facts:
        findings["would be used"].notes.append("an assumption: the presence of a GPU is unknown, see above")
    reached("host")
    findings["host"] = _guarded(partial(probes.in_child, "host"))
    findings["folders of stores"] = _guarded(probes.store_folders)
    if with_self_check:
        reached("self-check")
        findings["self-check"] = _guarded(partial(probes.in_child, "self-check"))
    return findings


def compiled_code() -> Finding:
    """Number and size of our libraries; libraries and folders of a server's code that cannot be used."""
    folder, libraries = compiler.folder(), compiler.libraries()
    size_bytes = sum(path.lstat().st_size for path in libraries)
    finding = Finding({"folder": str(folder), "libraries": len(libraries), "size_bytes": size_bytes})
    for reason in filter(None, map(compiler.unusable, libraries)):
        if os.access(folder, os.W_OK):
            finding.notes.append(f"{reason}; a server that needs it compiles it again")
        else:
            finding.problems.append(f"{reason}, and its folder is read-only: make it again there")
    there = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    if not (os.path.isdir(there) and os.access(there, os.W_OK)):
        (finding.notes if libraries else finding.problems).append(
            f"{folder} cannot be written, and servers cannot compile what it lacks; set {compiler.VARIABLE} "
            "to a folder of this account"
        )
    for name in ("own", "sglang", "torch", "triton", "flashinfer"):
        cache = CACHES[name]
        try:
            if os.path.exists(cache.folder()):  # also if this account may not look there
                require_own(cache.folder(), cache.variable)
        except Refusal as refusal:
            finding.problems.append(str(refusal))
            continue
        for path in () if name == "own" else cache.compiled():
            if path.suffix == ".so" and path.is_file() and _is_truncated(path):
                finding.problems.append(
                    f"{path} is truncated, and a process that loads it ends with SIGBUS: delete {path.parent}"
                )
    return finding


def _is_truncated(library: Path) -> bool:
    """Whether a library is shorter than its ELF header says."""
    with library.open("rb") as file:
        header = file.read(64)
    if len(header) < 64:
        return True
    # Linkers write the table of sections last.
    offset_bytes, entry_bytes, entries = struct.unpack("<40xQ10xHH2x", header)
    return library.stat().st_size < offset_bytes + entry_bytes * entries


def _guarded(probe: Callable[[], Finding]) -> Finding:
    """A probe's finding; a probe that fails gives a finding with that problem."""
    try:
        return probe()
    except KeyboardInterrupt:
        raise
    except Refusal as refusal:
        return Finding(problems=[str(refusal)])
    except BaseException as error:  # the report is printed after any failure
        return Finding(problems=[f"the probe failed: {type(error).__name__}: {error}"])


def problems(findings: dict[str, Finding]) -> list[str]:
    return [f"{name}: {problem}" for name, finding in findings.items() for problem in finding.problems]


def as_json(findings: dict[str, Finding]) -> str:
    """The report for programs: ``schema``, ``ok``, and facts, problems and notes by probe."""
    probed = {name: asdict(finding) for name, finding in findings.items()}
    return json.dumps({"schema": SCHEMA, "ok": not problems(findings), "probes": probed}, indent=1)


def as_text(findings: dict[str, Finding]) -> str:
    """The report for people; its last line is the verdict."""
    lines = []
    for name, finding in findings.items():
        lines.append(name)
        width = max(20, *map(len, finding.facts), 0)
        lines += [f"  {key:{width}} {_value(key, value)}" for key, value in finding.facts.items()]
        lines += [f"  PROBLEM {problem}" for problem in finding.problems]
        lines += [f"  note: {note}" for note in finding.notes]
    found = problems(findings)
    count = f"{len(found)} problem{'s' if len(found) > 1 else ''}"
    lines += ["", f"{count}, see above" if found else "no problem found"]
    return "\n".join(lines)


def _value(key: str, value: object) -> str:
    if key.startswith("memlock"):
        return "unlimited" if value is None else str(value)
    if value is None:
        return "-"
    if key.endswith("_bytes"):
        return f"{value} ({value / 1e9:.1f} GB)" if isinstance(value, int) else str(value)
    if isinstance(value, list):
        return "; ".join(map(_device, value)) or "none"
    return str(value)


def _device(device: dict) -> str:
    major, minor = device["capability"]
    return f"{device['name']} ({major}.{minor}, {device['memory_bytes'] / 1e9:.0f} GB)"
