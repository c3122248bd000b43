"""Puts the device in place, and makes pytest run GPU tests on it: `--emulated`."""

import ctypes
import gc
import os
import shutil
import subprocess
import threading
from collections import Counter
from pathlib import Path

import ptxrun_builds
import pytest

#: Functions of the driver that libraries of sgl_kernel, FlashMLA and FlashInfer need when they are loaded.
_DRIVER = """
cuCtxFromGreenCtx cuCtxPopCurrent_v2 cuCtxPushCurrent_v2 cuDevResourceGenerateDesc
cuDevSmResourceSplitByCount cuDeviceGetDevResource cuGetErrorString cuGetProcAddress_v2
cuGreenCtxCreate cuGreenCtxDestroy cuGreenCtxGetDevResource cuPointerGetAttribute cuStreamCreate cuInit
cuDeviceGetCount cuGetProcAddress cuGetErrorName cuCtxGetCurrent cuModuleLoadData cuModuleGetFunction
cuLaunchKernelEx cuLaunchKernel cuTensorMapEncodeTiled cuMemGetAddressRange_v2 cuDeviceGet
cuDeviceGetAttribute cuFuncSetAttribute cuModuleUnload cuDevicePrimaryCtxRetain cuCtxSetCurrent
cuOccupancyMaxActiveClusters cuFuncGetAttribute
"""
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_DRIVER_VERSION = 13000
#: Backends are in cycles with their buffers, half a gigabyte a test; Python counts objects, not bytes.
_COLLECTED_BYTES = 2 << 30


def _driver_library() -> Path:
    """A libcuda.so.1 that has a version, and functions that fail: enough for what is linked against it."""
    source = "".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in _DRIVER.split())
    source += f"int cuDriverGetVersion(int* version) {{ *version = {_DRIVER_VERSION}; return 0; }}\n"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o"]

    def make(path: Path) -> None:
        subprocess.run([*command, path], input=source, text=True, check=True)

    return ptxrun_builds.made_once("libcuda", ".so", [source.encode()], make)


def install() -> None:
    """Put the device in place in this process, before SGLang or Triton are imported."""
    cache = ptxrun_builds.cache_folder()
    os.environ["TRITON_INTERPRET"] = "0"
    os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    ctypes.CDLL(str(_driver_library()), mode=ctypes.RTLD_GLOBAL)
    which = shutil.which
    shutil.which = lambda name, *args, **options: (
        "/bin/true" if name == "nvidia-smi" else which(name, *args, **options)
    )

    from emulated_cuda import described, imports, jit_kernels, launches, libcudart, libraries, models
    from emulated_cuda.operators import Mode

    if (home := libcudart.toolkit()) is not None:
        os.environ["CUDA_HOME"] = str(home)
    # Libraries that are linked with this libcudart are of no use on a GPU, and the other way round.
    os.environ["TVM_FFI_CACHE_DIR"] = str(cache / "tvm-ffi")
    libcudart.install()
    described.install()
    launches.install()
    libraries.install_process_groups()
    imports.after("flashinfer", libraries.install)
    imports.after("sglang.srt.distributed.device_communicators.pynccl", libraries.disable_nccl)
    imports.after("sglang.srt.mem_cache.pool_host.base", libraries.keep_no_host_memory)
    imports.after("sglang.kernels.ops.kv_canary._dispatch", libraries.use_torch_in_canary)
    imports.after("sglang.srt.utils.phase_checker", libraries.check_phases_in_torch)
    imports.after("sglang.kernels.jit.utils.compile.loader", jit_kernels.install)
    models.install()
    mode = Mode()
    mode.__enter__()  # for the main thread, until the process ends
    start = threading.Thread.start

    def start_with_mode(self: threading.Thread) -> None:
        run = self.run

        def run_with_mode() -> None:
            with Mode():
                run()

        self.run = run_with_mode  # type: ignore[method-assign]
        start(self)

    threading.Thread.start = start_with_mode  # type: ignore[method-assign]


class Plugin:
    """Runs the selected GPU tests on the device, and fails a test after which the allocator found a fault."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        from emulated_cuda.memory import ALLOCATOR

        ALLOCATOR.problems.clear()
        result = yield
        if ALLOCATOR.problems:
            pytest.fail("\n".join(dict.fromkeys(ALLOCATOR.problems)))
        return result

    def pytest_runtest_setup(self):
        import torch

        from emulated_cuda import errors
        from emulated_cuda.memory import ALLOCATOR

        if ALLOCATOR.held_bytes > _COLLECTED_BYTES:
            gc.collect()
        errors.taken()  # of a test that failed
        torch.cuda.synchronize()  # with its work

    def pytest_terminal_summary(self, terminalreporter):
        import ptxrun_triton

        from emulated_cuda.operators import COUNTS

        kernels = Counter(name for name, _ in ptxrun_triton.install().launched)
        counts = ", ".join(f"{n} {name}" for name, n in COUNTS.items())
        terminalreporter.write_line(f"emulated device: {counts}; kernels: {dict(kernels)}")
