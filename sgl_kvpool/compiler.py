"""Compiles C++ and CUDA sources with tvm-ffi, once for each content, and loads the libraries.

A library is a file ``NAME-INPUTS-COMPILERS-BYTES.so`` in `folder()`, named by three digests: of the sources,
flags and versions that it is made from; of the compilers' versions; and of its own bytes, which is checked
before the library is loaded, because a truncated one ends the process with SIGBUS. Neither paths nor times
are in a name, so all installations of a user share libraries.
"""

import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_kvpool import folders
from sgl_kvpool.version import VERSION

logger = logging.getLogger(__name__)

#: Variable with tvm-ffi's cache folder, in which `folder()` is.
VARIABLE = "TVM_FFI_CACHE_DIR"
_PACKAGE = Path(__file__).resolve().parent
#: Errors of builds by the library's name: a process does not repeat a build that has failed.
_FAILURES: dict[str, str] = {}
#: Files of a CUDA toolkit, each with its places in NVIDIA's, pip's, Debian's and conda's folders.
_TOOLKIT = (
    ("bin/nvcc",), ("include/cuda_runtime.h", "targets/*/include/cuda_runtime.h"),
    ("lib64/libcudart.so*", "lib/libcudart.so*", "lib/*/libcudart.so*", "targets/*/lib/libcudart.so*"),
)  # fmt: skip


def folder() -> Path:
    """Folder of the libraries. It may be removed at any time, also while servers run."""
    return folders.named(VARIABLE, "~/.cache/tvm-ffi") / "sgl_kvpool"


def libraries() -> list[Path]:
    """All libraries in `folder()`, of any version."""
    return sorted(folder().glob("*.so")) if os.path.exists(folder()) else []


def damaged(library: Path) -> bool:
    """Whether a library is not a file with the digest that its name contains."""
    try:
        # Only a file is opened: to open a FIFO waits for a writer.
        return not (library.is_file() and library.stem.endswith(f"-{_file_digest(library)}"))
    except OSError:
        return True


def unusable(library: Path) -> str | None:
    """Why a library is not loaded, as a clause with its path; None if it is."""
    if damaged(library):
        return f"{library} is damaged"
    facts = folders.exposure(library, reading=False)
    return None if facts is None else f"{library} can be changed by other accounts ({facts})"


@dataclass(frozen=True)
class Module:
    """A module of C++ or CUDA code.

    `source` may include files of its folder and of the package's ``csrc`` folders. `flags` are for g++, or
    for nvcc if `cuda_arch` is set, the compute capability for which it compiles, such as "9.0a".
    """

    name: str
    source: Path
    flags: tuple[str, ...]
    cuda_arch: str | None = None

    def load(self) -> Any:
        """The loaded module; without an intact library, one of the processes that start at once compiles it.

        RuntimeError if it cannot be compiled or its folder cannot be written; Refusal if the folder cannot be
        made, or other accounts can change it; errors of tvm-ffi.
        """
        from tvm_ffi import load_module

        folders.own(folder(), VARIABLE)
        name = f"{self.name}-{self._inputs()}"
        compilers = self._compilers()
        logger.info("sgl-kvpool: loading %s, compiled at first use and kept in %s", name, folder())
        # Where nothing compiles, as in an image that was warmed up elsewhere, any compiler's library will do.
        pattern = f"{name}-{compilers or '*'}-*.so"
        found = _usable(pattern)
        if found is not None:
            try:
                return load_module(str(found))
            except Exception as error:  # linked with another C library, for example
                logger.warning("sgl-kvpool: %s cannot be loaded and is compiled again: %s", found, error)
        try:
            if (key := f"{name}-{compilers}") in _FAILURES:
                raise RuntimeError(_FAILURES[key])
            library: Path | None = self._made(key, pattern, found)
        except Exception as error:  # of a compiler, tvm-ffi or the disk: raised again, with the folder
            _FAILURES[key] = str(error)
            library = _usable(f"{name}-*.so", other_than=found)
            if library is None:
                where = f"{self.name} is kept in {folder()}, which {VARIABLE} moves"
                raise RuntimeError(f"{error}\n{where}") from error
            reason = str(error).partition("\n")[0]
            logger.warning("sgl-kvpool: %s, of another compiler, is loaded: %s", library, reason)
        return load_module(str(library))

    def _made(self, name: str, pattern: str, failed: Path | None) -> Path:
        """A library that another process has just made, or a new one; removes those that cannot be used."""
        from filelock import FileLock  # installed with torch
        from tvm_ffi import cpp

        with FileLock(folder() / f".{name}.lock"):
            for path in folder().glob(pattern):
                if (reason := unusable(path)) is not None:
                    logger.warning("sgl-kvpool: %s and is compiled again", reason)
                elif path != failed:
                    return path
                path.unlink(missing_ok=True)
            with tempfile.TemporaryDirectory(prefix=".build-", dir=folder()) as scratch, self._tools():
                if self.cuda_arch:  # tvm-ffi links with lib64/libcudart.so, which not every toolkit has
                    (Path(scratch) / "libcudart.so").symlink_to(cuda_toolkit()[1].resolve())
                made = cpp.build(
                    self.name,
                    sources=[str(self.source)],
                    extra_cflags=[] if self.cuda_arch else self.flags,
                    extra_cuda_cflags=self.flags if self.cuda_arch else [],
                    extra_ldflags=[f"-L{scratch}"],
                    build_directory=scratch,
                )
                # With a umask of 0 the linker lets anybody write it.
                os.chmod(made, os.stat(made).st_mode & ~0o022)
                # Renamed when it is complete, so that no process sees a part of it.
                return Path(made).rename(folder() / f"{name}-{_file_digest(made)}.so")

    def _inputs(self) -> str:
        """Digest of what the library is made from, except compilers."""
        import tvm_ffi

        files = {path for path in self.source.parent.iterdir() if path.is_file()}
        files |= set(_PACKAGE.glob("*/csrc/*"))
        contents = sorted((path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files)
        versions = (VERSION, tvm_ffi.__version__, platform.machine())
        return _digest(self.name, self.source.name, self.flags, self.cuda_arch, versions, contents)

    def _compilers(self) -> str | None:
        """Digest of the compilers' versions; None if one is missing."""
        try:
            commands = [shlex.split(os.environ.get("CXX") or "c++")]
            if self.cuda_arch:
                commands.append([str(cuda_toolkit()[0] / "bin" / "nvcc")])
            return _digest(*(_version(*command) for command in commands))
        except (OSError, ValueError, subprocess.CalledProcessError):  # ValueError: an open quote
            return None

    @contextmanager
    def _tools(self) -> Iterator[None]:
        """Set the variables in which tvm-ffi finds ninja (also if the environment is not active) and nvcc."""
        changed = {}
        if shutil.which("ninja") is None:
            path = os.environ.get("PATH", os.defpath)
            changed["PATH"] = os.pathsep.join([path, sysconfig.get_path("scripts")])
        if self.cuda_arch:
            changed |= {"CUDA_HOME": str(cuda_toolkit()[0]), "TVM_FFI_CUDA_ARCH_LIST": self.cuda_arch}
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _usable(pattern: str, other_than: Path | None = None) -> Path | None:
    """A library in `folder()` that can be loaded."""
    paths = (path for path in folder().glob(pattern) if path != other_than and unusable(path) is None)
    return next(paths, None)


def cuda_toolkit() -> tuple[Path, Path]:
    """Folder of the CUDA toolkit, and its libcudart; FileNotFoundError if no folder has all of `_TOOLKIT`."""
    named, nvcc = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"), shutil.which("nvcc")
    # nvcc looks for its files beside itself, not beside a link to it; a wrapper script may be anywhere.
    above = [path.parent.parent for path in (Path(nvcc).resolve(), Path(nvcc).absolute())] if nvcc else []
    packages = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu[1-9]*"))
    homes = [Path(named)] if named else [*above, Path("/usr/local/cuda"), *packages]
    for home in homes:
        files = [[path for one in places for path in sorted(home.glob(one))] for places in _TOOLKIT]
        if all(files):
            return home, files[-1][0]
    tried = ", ".join(map(str, dict.fromkeys(homes)))
    raise FileNotFoundError(f"{tried}: no bin/nvcc, cuda_runtime.h and libcudart; set CUDA_HOME to a toolkit")


@functools.cache
def _version(*command: str) -> str:
    """What a compiler says of its version; the same under any name, from any folder, and in any locale."""
    english, no = {**os.environ, "LC_ALL": "C"}, subprocess.PIPE
    text = subprocess.check_output([*command, "--version"], errors="replace", env=english, stderr=no)
    return re.sub(r"\A(?!.* version )[^(\n]*(?=\()|^InstalledDir:.*$", "", text, flags=re.MULTILINE)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _file_digest(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def cpu_flags(capability: str, *, exact: bool = True) -> tuple[str, ...]:
    """g++ flags for a value of ``torch.backends.cpu.get_cpu_capability()``, or AVX512_BF16.

    With `exact` there is no fused multiply-add: every operation rounds once, as in the encoders on a GPU.
    """
    # Trapping math would keep g++ from vectorizing loops.
    flags = ["-std=c++20", "-O3", "-Wall", "-Wextra", "-fno-trapping-math", "-fno-math-errno"]
    flags.append(f"-ffp-contract={'off' if exact else 'fast'}")
    if capability.startswith("AVX512"):
        parts = ("f", "bw", "dq", "vl", *(["bf16"] if capability.endswith("BF16") else []))
        return (*flags, *(f"-mavx512{part}" for part in parts), "-mprefer-vector-width=512")
    if capability.startswith("AVX"):
        flags += ["-mavx2"] if exact else ["-mavx2", "-mfma"]
    return tuple(flags)
