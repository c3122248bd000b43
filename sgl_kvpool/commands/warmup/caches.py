"""Where compiled code is kept on disk, by whom, and which variable moves it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CACHES", "VARIABLES", "Cache"]

#: Files that are compiled code. What else lies there (sources, logs, locks) may be of a failed attempt.
_COMPILED = (".so", ".cubin", ".hsaco")


@dataclass(frozen=True)
class Cache:
    """One folder.

    Attributes
    ----------
    name : str
        Whose it is.
    variable : str
        Environment variable that moves it.
    folder : callable
        Its path, once SGLang has been imported, which moves some of them.
    """

    name: str
    variable: str
    folder: Callable[[], Path]

    def compiled(self) -> dict[Path, int]:
        """Compiled files in it and when they were last written, ns; none if there is no such folder."""
        found = {}
        for path in self.folder().rglob("*"):
            if path.suffix in _COMPILED:
                with contextlib.suppress(FileNotFoundError):  # another process moves its own into place
                    found[path] = path.stat().st_mtime_ns
        return found


def _from(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or default).expanduser()


def _torch_extensions() -> Path:
    from torch.utils.cpp_extension import get_default_build_root

    return _from("TORCH_EXTENSIONS_DIR", get_default_build_root())


def _flashinfer() -> Path:
    return _from("FLASHINFER_WORKSPACE_BASE", "~") / ".cache" / "flashinfer"


#: By a short name. SGLang sets the variables of the last two when it is imported, unless they are set.
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
#: For help, by device.
VARIABLES = {
    "cpu": [CACHES[name].variable for name in ("tvm_ffi", "torch")],
    "cuda": [CACHES[name].variable for name in ("torch", "sglang", "triton", "flashinfer")],
}
