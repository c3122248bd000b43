"""kernels.cu as a library: compiled by nvcc without torch's headers, which would take half a minute."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import torch

__all__ = ["FACTOR", "OPERATIONS", "SELECTOR", "SOURCE", "Library", "compile_library", "find_nvcc"]

SOURCE = Path(__file__).resolve().parent / "kernels.cu"
_USUAL = Path("/usr/local/cuda/bin/nvcc")
_FLAGS = ("-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a")

#: Run-time operands of the instructions, unknown to the assembler: 1.0 twice in bf16, and prmt's selector.
FACTOR, SELECTOR = 0x3F803F80, 0x00010203
#: The operations, in the order of kernels.cu's `Op`: (name, number per thread and round, unit).
OPERATIONS = (
    ("lop3", 64, "instructions"),
    ("shift", 64, "instructions"),
    ("imad", 64, "instructions"),
    ("prmt", 64, "instructions"),
    ("mul.bf16x2", 64, "instructions"),
    ("mul.f16x2", 64, "instructions"),
    ("cvt.f16x2.e4m3x2", 64, "instructions"),
    ("lop3 and imad in turn", 64, "instructions"),
    ("lop3 and mul.bf16x2 in turn", 64, "instructions"),
    ("lop3 and cvt.f16x2.e4m3x2 in turn", 64, "instructions"),
    ("e2m1 as mla_decode decodes it", 128, "values"),
    ("e2m1 by cvt of e4m3 bytes to fp16", 128, "values"),
    ("e4m3 as mla_decode decodes it", 128, "values"),
    ("e4m3 by cvt to fp16", 128, "values"),
)


def find_nvcc() -> str:
    """Path of nvcc: CUDA_HOME or CUDA_PATH, PATH, the wheel that SGLang depends on, or the default folder.

    FileNotFoundError: if nvcc is not found.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    candidates += sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/**/bin/nvcc"))
    for candidate in (*candidates, _USUAL):
        if candidate.exists():
            return str(candidate)
    raise FileNotFoundError("nvcc not found: install the CUDA toolkit, or set CUDA_HOME to its folder")


def compile_library(folder: Path) -> Path:
    """Compile kernels.cu into a folder; returns the library. RuntimeError: if nvcc fails."""
    target = folder / "librates.so"
    command = [find_nvcc(), *_FLAGS, "-shared", "-Xcompiler", "-fPIC", "-o", str(target), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"nvcc failed: {done.stderr.strip()[-2000:]}")
    return target


class Library:
    """The three functions of kernels.cu; each launches a kernel on torch's current stream.

    Sizes of tensors are not checked.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.kvpool_error.restype = ctypes.c_char_p

    def instructions(
        self, op: int, out: torch.Tensor, clocks: torch.Tensor, rounds: int, blocks: int, threads: int
    ) -> None:
        """Run `rounds` rounds of `OPERATIONS[op]` in every thread; writes the clocks of each block, int64."""
        self._call("instructions", op, FACTOR, SELECTOR, out, clocks, rounds, blocks, threads)

    def products(
        self, n: int, kind: int, sums: int, operands: torch.Tensor, out: torch.Tensor, clocks: torch.Tensor,
        rounds: int, blocks: int, groups: int,
    ) -> None:  # fmt: skip
        """Run 16 wgmma m64n{n}k16 per round and warp group, into `sums` accumulators in turn."""
        self._call("products", n, kind, sums, operands, out, clocks, rounds, blocks, groups)

    def gather(
        self, row_bytes: int, how: int, pool: torch.Tensor, ids: torch.Tensor, rows: int, out: torch.Tensor,
        blocks: int,
    ) -> None:  # fmt: skip
        """Gather rows of a pool by int32 row numbers."""
        self._call("gather", row_bytes, how, pool, ids, rows, out, blocks)

    def _call(self, name: str, *arguments: int | torch.Tensor) -> None:
        values: list[Any] = [
            ctypes.c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor) else ctypes.c_uint32(x)
            for x in arguments
        ]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = getattr(self._library, f"kvpool_{name}")(*values, stream)
        if error:
            raise RuntimeError(f"{name}: {self._library.kvpool_error(error).decode()}")
