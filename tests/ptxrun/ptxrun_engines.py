"""The kernels of the transfer engines as nvcc compiles them, on ptxrun, called by the engines.

The engines, plans, jobs and csrc/staging.h are the package's, over the emulated streams of
``tests/transfer/emulated.py``; only the kernels run here, on the memory that a test names.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulated
import ptxrun
import ptxrun_builds
import torch

CSRC = Path(__file__).resolve().parents[2] / "sgl_kvpool" / "transfer" / "csrc"
#: `Transfer` and `RowLayout` of csrc: int64 numbers, by value.
_TRANSFER, _ROW_LAYOUT = struct.Struct("9q"), struct.Struct("11q")
_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_COPY_THREADS, _CONVERT_THREADS = 1024, 512


def ptx() -> str:
    """PTX of the file that SGLang's loader is given."""
    import tvm_ffi

    include = Path(tvm_ffi.__file__).parent / "include"
    flags = ("-O3", "-I", str(include))
    return ptxrun_builds.nvcc_ptx('#include "bind_tvm_ffi.cu"\n', flags, CSRC)


@functools.cache
def _module(text: str) -> tuple[ptxrun.Module, dict[Any, str]]:
    """The module, and names of kernels by bytes of a word or by the ids of both latents."""
    words = {"NS_7Bytes16E": 16, "NS_6Bytes8E": 8, "j": 4, "h": 1}
    module, names = ptxrun.Module(text), {}
    for name in module.kernels:
        if "copy_pages" in name:
            (size,) = (size for word, size in words.items() if f"kernelI{word}E" in name)
            names[size] = name
        else:
            names[tuple(map(int, re.findall(r"(?:LatentE|LS1_)(\d)E", name)))] = name
    return module, names


class Kernels:
    """Carries out the kernels of emulated streams.

    Parameters
    ----------
    change : callable, optional
        Changes the PTX text.

    Attributes
    ----------
    memories : list
        Memory that kernels may access, beside the plan's runs, page indices and k_scales.
    options : dict
        Options of `ptxrun.Module.launch`.
    launched : list
        (word bytes, or ids of both latents; Result)
    """

    def __init__(self, change: Callable[[str], str] = str, **options: int) -> None:
        self.memories: list[torch.Tensor] = []
        self.options = options
        self.launched: list[tuple[Any, ptxrun.Result]] = []
        self._module, self._names = _module(change(ptx()))
        self._error: BaseException | None = None
        self._called = _KERNEL(self._carry_out)

    def __enter__(self) -> Kernels:
        calls = emulated.calls()
        calls.forget()
        calls.carry_out_kernels(ctypes.cast(self._called, ctypes.c_void_p).value)
        return self

    def __exit__(self, *_: object) -> None:
        emulated.calls().carry_out_kernels(0)

    def tools(self, page_bytes: int, host: torch.Tensor | None = None) -> Any:
        """`EngineTools` of one direction."""
        tools = emulated.tools(page_bytes)
        self.memories.append(tools.buffer.memory)
        return tools

    def play(self, seed: int = 0) -> None:
        """Carry out what was enqueued."""
        emulated.calls().play(seed)
        if self._error is not None:
            raise self._error

    def _carry_out(self, job: int, transfer: int) -> None:
        if self._error is None:
            try:
                self._launch(job, transfer)
            except Exception as error:
                self._error = error  # a callback of C++ cannot raise

    def _launch(self, job: int, transfer: int) -> None:
        runs, run_count, word_bytes, blocks, source, target, k_scales = struct.unpack(
            "7q", ctypes.string_at(job, 56)
        )
        lists = ctypes.string_at(transfer, _TRANSFER.size)
        numbers = _TRANSFER.unpack(lists)
        page_count = numbers[6]
        told = [(runs, 64 * run_count)]
        for slots, stride in (numbers[2:4], numbers[4:6]):
            if slots and page_count:
                told.append((slots, ((page_count - 1) * stride + 1) * 8))
        if source:
            layouts = [ctypes.string_at(at, _ROW_LAYOUT.size) for at in (source, target)]
            kind: Any = tuple(_ROW_LAYOUT.unpack(layout)[0] for layout in layouts)
            arguments, threads = [lists, *layouts, k_scales], _CONVERT_THREADS
            told.append((k_scales, 4 * run_count))
        else:
            kind, arguments, threads = word_bytes, [lists], _COPY_THREADS
        result = self._module.launch(
            self._names[kind],
            blocks,
            threads,
            arguments,
            regions=self.memories,
            readonly=told,
            **self.options,
        )
        self.launched.append((kind, result))
