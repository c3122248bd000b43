"""Things to compile, one after the other, and the caches that keep them.

A step that fails does not keep the others from being compiled.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CACHES", "VARIABLES", "Cache", "Outcome", "Step", "carry_out"]

#: Lines of a compiler's message that are shown.
_LINES = 20
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


@dataclass(frozen=True)
class Step:
    """Something that is compiled when it is first used.

    Attributes
    ----------
    name : str
    caches : tuple of Cache
        Where it is kept.
    use : callable
        Uses it; whatever it raises is the reason why it cannot be had.
    """

    name: str
    caches: tuple[Cache, ...]
    use: Callable[[], object]


@dataclass(frozen=True)
class Outcome:
    """What became of a step.

    Attributes
    ----------
    name : str
    state : str
        "compiled": files are new in its caches. "was there": none are. "FAILED".
    seconds : float
    reason : str or None
        Of a failure.
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
    """Use everything once, in order; prints a line for each."""
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
    except Exception as error:  # compilers and loaders fail in any way; what comes after may still work
        return Outcome(step.name, "FAILED", time.perf_counter() - began, f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - began
    after = [cache.compiled() for cache in step.caches]
    return Outcome(step.name, "was there" if before == after else "compiled", seconds)
