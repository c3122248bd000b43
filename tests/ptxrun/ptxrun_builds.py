"""What ptxrun compiles, each once per checkout: its own library by g++, CUDA sources by nvcc.

Results lie in ``.ptxrun_cache`` of the checkout (or ``TEST_PTXRUN_CACHE``), under a hash of sources, options
and compiler: the versions of g++ and nvcc. If several processes request the same result at the same
time, one of them makes it.
"""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
_PACKAGE = HERE.parents[1] / "sgl_kvpool"
#: Options that change no rounding and no order of sums.
_FAST = ["-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
_GXX = ["g++", "-std=c++20", *_FAST, "-fPIC", "-shared"]
_NVCC = ["-std=c++20", "-arch=compute_90a", "-ptx"]


def cache_folder() -> Path:
    """Ignored by git; removed by `make clean`."""
    folder = Path(os.environ.get("TEST_PTXRUN_CACHE") or HERE.parents[1] / ".ptxrun_cache")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def made_once(name: str, suffix: str, parts: Iterable[bytes], make: Callable[[Path], None]) -> Path:
    """The file that `make(path)` writes, made where there is none for these parts yet."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    stem = f"{name}-{digest.hexdigest()[:16]}"

    def intact() -> Path | None:
        paths = cache_folder().glob(f"{stem}-*{suffix}")
        return next((path for path in paths if path.name == _name(stem, path)), None)

    found = intact()
    if found is None:
        with open(cache_folder() / f"{stem}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = intact()
            if found is None:
                with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
                    made = Path(scratch) / f"{stem}{suffix}"
                    make(made)
                    found = made.rename(cache_folder() / _name(stem, made))
    return found


def _name(stem: str, path: Path) -> str:
    """Name of a result, which ends with a digest of its bytes: a truncated library would be a SIGBUS."""
    return f"{stem}-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}{path.suffix}"


def _processor() -> str:
    """What -march=native depends on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@functools.cache
def library() -> Path:
    """The emulator as a shared library; half a minute of g++ where it has not been compiled yet."""
    sources = sorted((HERE / "emulator").iterdir())
    version = subprocess.check_output(["g++", "--version"])
    parts = [version, _processor().encode(), " ".join(_GXX).encode(), *map(Path.read_bytes, sources)]

    def make(path: Path) -> None:
        subprocess.run([*_GXX, "-o", path, HERE / "emulator" / "ptxrun.cpp"], check=True)

    return made_once("ptxrun", ".so", parts, make)


@functools.cache
def nvcc() -> str | None:
    """The CUDA compiler of SGLang's dependencies, else that on the path; None if there is none."""
    found = sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/**/bin/nvcc"))
    return str(found[0]) if found else shutil.which("nvcc")


@functools.cache
def nvcc_ptx(source: str, flags: Sequence[str] = (), include: Path | None = None) -> str:
    """PTX for sm_90a of the text of a .cu file.

    Headers of the folder `include` may include others of the package; the PTX is made anew when a source of
    the package changes.
    """
    compiler = nvcc()
    if compiler is None:
        raise FileNotFoundError("no nvcc, neither of the wheel nvidia-cuda-nvcc nor on the path")
    headers = sorted(_PACKAGE.glob("**/csrc/*")) if include else []
    options = [*_NVCC, *flags, *(["-I", str(include)] if include else [])]
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    parts = [compiler, version, *options, source, *(path.name for path in headers)]

    def make(path: Path) -> None:
        text = path.with_suffix(".cu")
        text.write_text(source)
        subprocess.run([compiler, *options, text, "-o", path], check=True)

    contents = [*(part.encode() for part in parts), *(path.read_bytes() for path in headers)]
    return made_once("cuda", ".ptx", contents, make).read_text()
