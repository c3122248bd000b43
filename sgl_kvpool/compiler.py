"""Build tools for the C++ code: `ninja`, which SGLang installs for tvm-ffi and torch, and flags for g++."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["cpu_flags", "ninja_on_path"]


@contextmanager
def ninja_on_path() -> Iterator[None]:
    """Make `ninja` available on PATH inside the block, also if the Python environment is not activated."""
    if shutil.which("ninja") is not None:
        yield
        return
    path = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join([path, sysconfig.get_path("scripts")])
    try:
        yield
    finally:
        os.environ["PATH"] = path


def cpu_flags(capability: str) -> list[str]:
    """g++ flags for a CPU capability; tvm-ffi includes them in the key of its build cache.

    Parameters
    ----------
    capability : str
        Value of ``torch.backends.cpu.get_cpu_capability()``.
    """
    flags = ["-std=c++20", "-O3", "-Wall", "-Wextra"]
    # No fused multiply-add: every operation rounds once, as in the encoders on a GPU. Trapping math would
    # keep g++ from vectorizing loops.
    flags += ["-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"]
    if capability.startswith("AVX512"):
        wide = [f"-mavx512{part}" for part in ("f", "bw", "dq", "vl")]
        return [*flags, *wide, "-mprefer-vector-width=512"]
    return [*flags, "-mavx2"] if capability.startswith("AVX") else flags
