"""The compiled side of the GPU engines, csrc/engine_calls.h: built when first used (10 s), then kept.

Beside SGLang its own loader compiles it, through tvm-ffi; without SGLang torch does, from the same sources.
"""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from pathlib import Path
from typing import Any

from sgl_kvpool.transfer.ninja import ninja_on_path

logger = logging.getLogger(__name__)

__all__ = ["SOURCES", "gpu_calls"]

#: Folder of the C++ and CUDA sources.
SOURCES = Path(__file__).resolve().parent / "csrc"

_NAME = "sgl_kvpool_gpu_engines"


@cache
def gpu_calls() -> Any:
    """Functions of csrc/engine_calls.h, whose arguments are all int; addresses are not checked.

    Raises
    ------
    Exception
        Whatever the loader raises: no CUDA compiler, a folder that cannot be written.
    """
    logger.info("sgl-kvpool: loading the GPU transfer engines, compiling them if this is their first time")
    if importlib.util.find_spec("sglang") is not None:
        from sglang.kernels.jit.utils import load_jit

        with ninja_on_path():
            return load_jit(
                _NAME,
                cuda_files=[str(SOURCES / "bind_tvm_ffi.cu")],
                extra_include_paths=[str(SOURCES)],
                header_only=False,
            )
    from torch.utils.cpp_extension import load

    with ninja_on_path():
        return load(
            _NAME,
            sources=[str(SOURCES / "bind_torch.cu")],
            extra_include_paths=[str(SOURCES)],
            extra_cflags=["-std=c++20"],
            extra_cuda_cflags=["-std=c++20", "-O3"],
        )
