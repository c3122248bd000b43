"""Compilation steps in sequence, after failures too, and the cache folders of their results."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CACHES", "VARIABLES", "Cache", "Outcome", "Step", "carry_out"]

#: Lines shown of a compiler's message.
_LINES = 20
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


@dataclass(frozen=True)
class Step:
    """Code that is compiled at its first use.

    Attributes
    ----------
    name : str
    caches : tuple of Cache
        Caches of the compiled code.
    use : callable
        Uses the code; an exception is reported as the reason of the failure.
    """

    name: str
    caches: tuple[Cache, ...]
    use: Callable[[], object]


@dataclass(frozen=True)
class Outcome:
    """Result of a step.

    Attributes
    ----------
    name : str
    state : str
        "compiled": its caches have new files; "cached": they have not; or "FAILED".
    seconds : float
    reason : str or None
        Reason of a failure.
    """

    name: str
    state: str
    seconds: float
    reason: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.seconds:7.1f} s  {self.state:9}  {self.name}"]
        if self.reason is not None:
            first, *rest = self.reason.strip().splitlines() or ["no message"]
            lines[0] += f": {first}"
            if len(rest) > _LINES:
                rest = ["...", *rest[-_LINES:]]
            lines += [f"    {line}" for line in rest]
        return "\n".join(lines)


def carry_out(steps: Sequence[Step]) -> list[Outcome]:
    """Run all steps in order; prints a line for each."""
    outcomes = []
    for step in steps:
        outcomes.append(_outcome(step))
        print(outcomes[-1], flush=True)
    return outcomes


def _outcome(step: Step) -> Outcome:
    before = [cache.compiled() for cache in step.caches]
    began = time.perf_counter()
    try:
        step.use()
    except Exception as error:  # compilers and loaders raise anything; later steps may still work
        return Outcome(step.name, "FAILED", time.perf_counter() - began, f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - began
    after = [cache.compiled() for cache in step.caches]
    return Outcome(step.name, "cached" if before == after else "compiled", seconds)
