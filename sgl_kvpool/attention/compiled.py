"""Attention over rows on CPUs in C++, which g++ compiles at first use, in 20 s."""

from functools import cache
from pathlib import Path
from typing import Any

import torch

from sgl_kvpool import metrics
from sgl_kvpool.compiler import Module, cpu_flags

_SOURCE = Path(__file__).resolve().parent / "csrc" / "cpu_attention.cpp"


def capability() -> str:
    """Torch's name for this CPU's instructions, or the one of `cpu_flags` with bf16 products."""
    found = torch.backends.cpu.get_cpu_capability()
    return "AVX512_BF16" if found == "AVX512" and torch.cpu.get_capabilities()["avx512_bf16"] else found


@cache
def module(*, required: bool = False) -> Any:
    """The compiled attention. If the build fails: its error if `required`, else None, logged and counted."""
    try:
        return Module("sgl_kvpool_cpu_attention", _SOURCE, cpu_flags(capability(), exact=False)).load()
    except Exception as error:  # no compiler, no tvm-ffi, a cache folder that cannot be written
        if required:
            raise
        metrics.failed("attention_build", "attention on CPUs", error=error)
        return None
