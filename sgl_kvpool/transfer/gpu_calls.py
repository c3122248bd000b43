"""The compiled side of the GPU engines, csrc/engine_calls.h: built when first used (10 s), then kept.

By torch; beside SGLang its own loader compiles the same sources, `sgl_kvpool.srt.host.gpu_calls`.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

from sgl_kvpool.compiler import ninja_on_path

logger = logging.getLogger(__name__)

__all__ = ["NAME", "SOURCES", "gpu_calls"]

#: Folder of the C++ and CUDA sources.
SOURCES = Path(__file__).resolve().parent / "csrc"

NAME = "sgl_kvpool_gpu_engines"


@cache
def gpu_calls() -> Any:
    """Functions of csrc/engine_calls.h, whose arguments are all int; addresses are not checked.

    Raises
    ------
    Exception
        Whatever the loader raises: no CUDA compiler, a folder that cannot be written.
    """
    logger.info("sgl-kvpool: loading the GPU transfer engines, compiling them if this is their first time")
    from torch.utils.cpp_extension import load

    with ninja_on_path():
        return load(
            NAME,
            sources=[str(SOURCES / "bind_torch.cu")],
            extra_include_paths=[str(SOURCES)],
            extra_cflags=["-std=c++20"],
            extra_cuda_cflags=["-std=c++20", "-O3"],
        )
