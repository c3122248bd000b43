"""A libcudart under which compiled code runs on the device: each of its functions is one of `Runtime`.

The library is made of one line of C per function. Its symbols have a version of their own: torch has the real
libcudart in the process, and code that was linked with this one finds no symbol of that. `toolkit` is a
CUDA_HOME with this libcudart, for nvcc, tvm-ffi and SGLang's `load_jit`.
"""

import atexit
import contextlib
import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import ptxrun_builds

from emulated_cuda.runtime import RUNTIME

#: Functions of the library and their arguments: "p" a pointer, a handle or a size, "i" an int.
_FUNCTIONS = {
    "__cudaRegisterFatBinary": "p",
    "__cudaRegisterFatBinaryEnd": "p",
    "__cudaUnregisterFatBinary": "p",
    "__cudaRegisterFunction": "ppppipppp",
    "__cudaRegisterVar": "ppppipii",
    "__cudaInitModule": "p",
    "__cudaPushCallConfiguration": "ppppp",
    "__cudaPopCallConfiguration": "pppp",
    "__cudaGetKernel": "pp",
    "__cudaLaunchKernel": "ppppppp",
    "cudaLaunchKernelExC": "ppp",
    "cudaMemcpyAsync": "pppip",
    "cudaMemcpyBatchAsync": "pppppppp",
    "cudaEventCreateWithFlags": "pi",
    "cudaEventDestroy": "p",
    "cudaEventRecord": "pp",
    "cudaStreamCreateWithFlags": "pi",
    "cudaStreamDestroy": "p",
    "cudaStreamSynchronize": "p",
    "cudaStreamWaitEvent": "ppi",
    "cudaDriverGetVersion": "p",
    "cudaRuntimeGetVersion": "p",
    "cudaGetDevice": "p",
    "cudaDeviceGetAttribute": "pii",
    "cudaGetLastError": "",
    "cudaGetErrorString": "i",
}
_TYPES = {"p": ("void*", ctypes.c_void_p), "i": ("int", ctypes.c_int)}
_SONAME = "libcudart-emulated.so"
_SYMBOLS = "EMULATED_CUDART { global: cuda*; __cuda*; emulated_functions; local: *; };\n"


def _source() -> str:
    lines = ["#include <stddef.h>", f"void* emulated_functions[{len(_FUNCTIONS)}];"]
    for number, (name, letters) in enumerate(_FUNCTIONS.items()):
        types = [_TYPES[letter][0] for letter in letters]
        parameters = ", ".join(f"{kind} a{i}" for i, kind in enumerate(types)) or "void"
        arguments = ", ".join(f"a{i}" for i in range(len(types)))
        found = f"emulated_functions[{number}]"
        function = f"((size_t (*)({', '.join(types) or 'void'})){found})"
        # Compiled modules unregister their kernels after the interpreter has ended.
        lines.append(f"size_t {name}({parameters}) {{ return {found} ? {function}({arguments}) : 0; }}")
    return "\n".join([*lines, ""])


@functools.cache
def _library() -> Path:
    source = _source()

    def make(path: Path) -> None:
        script = path.with_suffix(".map")
        script.write_text(_SYMBOLS)
        command = ["gcc", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{_SONAME},--version-script={script}"]
        subprocess.run([*command, "-x", "c", "-", "-o", path], input=source, text=True, check=True)

    return ptxrun_builds.made_once("libcudart", ".so", [source.encode(), _SYMBOLS.encode()], make)


def toolkit() -> Path | None:
    """Folder of the CUDA toolkit with this library as its libcudart; None without nvcc."""
    compiler = ptxrun_builds.nvcc()
    if compiler is None:
        return None
    home = Path(compiler).parents[1]
    made = ptxrun_builds.cache_folder() / f"{_library().stem}-toolkit"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=ptxrun_builds.cache_folder()) as scratch:
            folder = Path(scratch) / "toolkit"
            (folder / "lib64").mkdir(parents=True)
            (folder / "lib64" / "libcudart.so").symlink_to(_library())
            for entry in home.iterdir():
                if entry.name != "lib64":
                    (folder / entry.name).symlink_to(entry)
            with contextlib.suppress(OSError):  # another process has made it
                folder.rename(made)
    return made


@functools.cache
def install() -> list[Any]:
    """Load the library, which compiled code finds by its soname; returns what must stay alive."""
    kept: list[Any] = []
    table = (ctypes.c_void_p * len(_FUNCTIONS)).in_dll(ctypes.CDLL(str(_library())), "emulated_functions")
    for number, (name, letters) in enumerate(_FUNCTIONS.items()):
        kind = ctypes.CFUNCTYPE(ctypes.c_size_t, *(_TYPES[letter][1] for letter in letters))
        kept.append(kind(functools.partial(RUNTIME.call, name)))
        table[number] = ctypes.cast(kept[-1], ctypes.c_void_p).value
    atexit.register(ctypes.memset, table, 0, ctypes.sizeof(table))
    return kept
