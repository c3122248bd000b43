"""The compiled side of the GPU engines, built by SGLang's loader with tvm-ffi, without torch's headers."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from sglang.kernels.jit.utils import load_jit

from sgl_kvpool.compiler import ninja_on_path
from sgl_kvpool.transfer.gpu_calls import NAME, SOURCES

logger = logging.getLogger(__name__)

__all__ = ["gpu_calls"]


@cache
def gpu_calls() -> Any:
    """Functions of transfer/csrc/engine_calls.h, whose arguments are all int; addresses are not checked.

    Raises
    ------
    Exception
        Errors of the loader, such as a missing CUDA compiler or a folder that cannot be written.
    """
    logger.info("sgl-kvpool: loading the GPU transfer engines, which are compiled on first use")
    with ninja_on_path():
        return load_jit(
            NAME,
            cuda_files=[str(SOURCES / "bind_tvm_ffi.cu")],
            extra_include_paths=[str(SOURCES)],
            header_only=False,
        )
