#!/usr/bin/env python3
"""Hashes of the machine code of every GPU kernel, to show that a refactoring does not change it.

    kernel_hashes.py --json FILE                    compile all kernels and write their hashes
    kernel_hashes.py --json FILE --compare OLD      the same, then compare with an earlier FILE
    kernel_hashes.py --compare OLD                  compile all kernels and compare

Needs Triton but no GPU; takes several minutes. Every Triton kernel is compiled for sm_90a in the
configurations of ``tests/attention/test_decode_compiled.py`` and ``tests/codec/test_codec_compiled.py``, and
every CUDA source of the package by nvcc; without nvcc, a message says that the CUDA kernels are missing.

FILE is JSON, ``{kernel and configuration: sha256 of its SASS}``, with the versions of both compilers: hashes
of other versions cannot be compared. Instructions are hashed without their addresses, and labels and symbols
by their order instead of their names, so that a hash depends neither on the place of a source nor on its
names. ptxas numbers some registers by addresses of its own memory, so it runs without address space
randomisation, gets no line numbers, and it and its temporary files have paths of fixed length.

``--compare`` prints a line for every kernel that differs, is new or is missing; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("attention", "codec", "ptxrun"))]

_NVCC_FLAGS = ("-std=c++20", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-DTORCH_EXTENSION_NAME=engines")
#: torch's macros name a variable "module", a word of C++20.
_NVCC_FLAGS += ("-diag-suppress=3189",)
#: Flag of personality(2), which child processes inherit.
_ADDR_NO_RANDOMIZE = 0x0040000


def kernels(text: str) -> dict[str, str]:
    """Code of each kernel by name, from a text of `nvdisasm -c`."""
    return dict(re.findall(r"^\.text\.([\w$.]+):\n(.*?)(?=^\.text\.|\Z)", text, flags=re.S | re.M))


def normalised(code: str) -> str:
    """Labels and instructions of one kernel, without comments, addresses and names."""
    code = re.sub(r"/\*.*?\*/|//[^\n]*", "", code, flags=re.S)
    lines = [line.strip() for line in code.splitlines()]
    labels = [line[:-1] for line in lines if line.endswith(":")]
    numbers = {label: f"label{number}" for number, label in enumerate(labels)}
    # Other lines with a leading dot are directives: sizes and types of symbols, and the section's name.
    kept = [line for line in lines if line and (line.endswith(":") or not line.startswith("."))]
    return "\n".join(re.sub(r"[.$\w]+", lambda m: numbers.get(m[0], m[0]), line) for line in kept)


def without_path(name: str) -> str:
    """A mangled name without the anonymous namespace's name, which nvcc derives from the source's path."""
    return re.sub(r"\d+_GLOBAL__N__[0-9a-f]{8}_\d+_\w+?_cu_[0-9a-f]{8}", "", name)


def code_hash(code: str) -> str:
    return hashlib.sha256(normalised(code).encode()).hexdigest()


def triton_hashes() -> Iterator[tuple[str, str]]:
    """Name and hash of every Triton kernel in every configuration that the tests compile."""
    import compile_decode
    import compile_kernels
    import test_codec_compiled
    import test_decode_compiled as decode_jobs

    groups: list[tuple[str, Callable[..., Any], list[dict[str, Any]]]] = [
        ("codec", compile_kernels.compile_kernel, test_codec_compiled.JOBS + test_codec_compiled.OTHERS),
        ("decode", compile_decode.compile_decode, decode_jobs.TABLE + decode_jobs.OTHERS),
        ("decode", compile_decode.compile_decode, decode_jobs.GLUON + decode_jobs.GLUON_OTHERS),
        ("merge", compile_decode.compile_merge, decode_jobs.MERGES),
    ]
    for group, compile_job, jobs in groups:
        for job in jobs:
            arguments = {name: value for name, value in job.items() if name != "merge"}
            sass, _ = compile_kernels.machine_code(compile_job(**arguments))
            (code,) = kernels(sass).values()
            configuration = " ".join(f"{name}={value}" for name, value in arguments.items())
            yield f"{group} {configuration}", code_hash(code)


def cuda_hashes(nvcc: str) -> Iterator[tuple[str, str]]:
    """Name and hash of every kernel in the package's CUDA sources."""
    import compile_kernels
    import torch
    import tvm_ffi

    includes = [Path(module.__file__).parent / "include" for module in (torch, tvm_ffi)]
    flags = [*_NVCC_FLAGS, *(f"-I{path}" for path in (*includes, sysconfig.get_paths()["include"]))]
    for source in sorted((ROOT / "sgl_kvpool").rglob("*.cu"), key=lambda path: path.name):
        with tempfile.TemporaryDirectory() as folder:
            cubin = os.path.join(folder, "kernels.cubin")
            subprocess.run([nvcc, *flags, "-cubin", str(source), "-o", cubin], check=True)
            found = kernels(compile_kernels.run_tool("nvdisasm", "-c", cubin))
        for name, code in found.items():
            yield f"{source.name} {without_path(name)}", code_hash(code)


def make_repeatable() -> None:
    """Make compilers started from here give the same code for the same source in every checkout."""
    ctypes.CDLL(None).personality(_ADDR_NO_RANDOMIZE)
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"  # the length of a path affects ptxas's memory
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    os.environ.pop("TRITON_INTERPRET", None)


def all_hashes() -> dict[str, str]:
    """Hash by kernel and configuration, and the compilers' versions."""
    make_repeatable()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # empty, so that the compiler runs
        import triton

        # Called by a path of fixed length: the environment's path would change registers of some kernels.
        os.environ["TRITON_PTXAS_PATH"] = shutil.copy(triton.knobs.nvidia.ptxas.path, cache)
        found = {"compiler triton": triton.__version__, **dict(triton_hashes())}
    from sgl_kvpool.commands.bench.rates.library import find_nvcc

    try:
        nvcc = find_nvcc()
    except FileNotFoundError as error:
        print(f"CUDA kernels are missing: {error}", file=sys.stderr)
        return found
    version = re.findall(r"release .*", subprocess.check_output([nvcc, "--version"], text=True))[0]
    return {**found, "compiler nvcc": version, **dict(cuda_hashes(nvcc))}


def differences(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """One line for each kernel or compiler that differs."""
    lines = [f"gone: {name}" for name in old if name not in new]
    lines += [f"new: {name}" for name in new if name not in old]
    return lines + [f"differs: {name}" for name in new if name in old and old[name] != new[name]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the hashes to this file")
    parser.add_argument("--compare", type=Path, metavar="OLD", help="a FILE of an earlier run")
    arguments = parser.parse_args()
    if not (arguments.json or arguments.compare):
        parser.error("nothing to do: give --json, --compare or both")
    old = json.loads(arguments.compare.read_text()) if arguments.compare else None
    found = all_hashes()
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    lines = differences(old, found) if old is not None else []
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
