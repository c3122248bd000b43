"""Cache folders of compiled code, with their owners and environment variables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CACHES", "VARIABLES", "Cache"]

#: Suffixes of compiled files. Other files there (sources, logs, locks) may be left by a failed build.
_COMPILED = (".so", ".cubin", ".hsaco")


@dataclass(frozen=True)
class Cache:
    """One cache folder.

    Attributes
    ----------
    name : str
        Owner of the folder.
    variable : str
        Environment variable that moves it.
    folder : callable
        Returns its path; call it after the import of SGLang, which moves some folders.
    """

    name: str
    variable: str
    folder: Callable[[], Path]

    def compiled(self) -> dict[Path, int]:
        """Compiled files and their times of modification in ns; empty if the folder does not exist."""
        found = {}
        for path in self.folder().rglob("*"):
            if path.suffix in _COMPILED:
                with contextlib.suppress(FileNotFoundError):  # another process may replace it now
                    found[path] = path.stat().st_mtime_ns
        return found


def _from(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or default).expanduser()


def _torch_extensions() -> Path:
    from torch.utils.cpp_extension import get_default_build_root

    return _from("TORCH_EXTENSIONS_DIR", get_default_build_root())


def _flashinfer() -> Path:
    return _from("FLASHINFER_WORKSPACE_BASE", "~") / ".cache" / "flashinfer"


#: Folders by a short name. SGLang's import sets the variables of the last two unless they are set.
CACHES = {
    "tvm_ffi": Cache("tvm-ffi", "TVM_FFI_CACHE_DIR", lambda: _from("TVM_FFI_CACHE_DIR", "~/.cache/tvm-ffi")),
    "torch": Cache("torch's extensions", "TORCH_EXTENSIONS_DIR", _torch_extensions),
    "sglang": Cache(
        "SGLang's kernels",
        "SGLANG_JIT_CACHE_DIR",
        lambda: _from("SGLANG_JIT_CACHE_DIR", "~/.cache/sglang/jit"),
    ),
    "triton": Cache("Triton", "TRITON_CACHE_DIR", lambda: _from("TRITON_CACHE_DIR", "~/.triton/cache")),
    "flashinfer": Cache("FlashInfer", "FLASHINFER_WORKSPACE_BASE", _flashinfer),
}
#: Variables by device, for the help text.
VARIABLES = {
    "cpu": [CACHES[name].variable for name in ("tvm_ffi", "torch")],
    "cuda": [CACHES[name].variable for name in ("torch", "sglang", "triton", "flashinfer")],
}
