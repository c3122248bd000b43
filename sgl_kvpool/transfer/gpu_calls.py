"""The compiled side of the GPU engines, csrc/engine_calls.h: built when first used (10 s), then kept.

This module builds it with torch. Servers build the same sources with SGLang's loader
(`sgl_kvpool.srt.host.gpu_calls`).
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
        Errors of the loader, such as a missing CUDA compiler or a folder that cannot be written.
    """
    logger.info("sgl-kvpool: loading the GPU transfer engines, which are compiled on first use")
    from torch.utils.cpp_extension import load

    with ninja_on_path():
        return load(
            NAME,
            sources=[str(SOURCES / "bind_torch.cu")],
            extra_include_paths=[str(SOURCES)],
            extra_cflags=["-std=c++20"],
            extra_cuda_cflags=["-std=c++20", "-O3"],
        )
