"""What compiles our C++: `ninja`, by which tvm-ffi and torch build and which SGLang brings; flags for g++."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["cpu_flags", "ninja_on_path"]


@contextmanager
def ninja_on_path() -> Iterator[None]:
    """For builds within: it is on the PATH of activated environments only."""
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
    """For g++, by what torch found the CPU to be; part of the key under which tvm-ffi keeps the result.

    Parameters
    ----------
    capability : str
        Of ``torch.backends.cpu.get_cpu_capability()``.
    """
    flags = ["-std=c++20", "-O3", "-Wall", "-Wextra"]
    # Every operation rounds by itself, as everywhere; that it may trap would keep loops from being vectors.
    flags += ["-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"]
    if capability.startswith("AVX512"):
        wide = [f"-mavx512{part}" for part in ("f", "bw", "dq", "vl")]
        return [*flags, *wide, "-mprefer-vector-width=512"]
    return [*flags, "-mavx2"] if capability.startswith("AVX") else flags
