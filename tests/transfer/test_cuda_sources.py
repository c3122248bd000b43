"""The CUDA of the transfer engines: it compiles for Hopper, without spills, with 16-byte accesses."""

import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
from live_processes import ran

from sgl_kvpool import compiler
from sgl_kvpool.transfer.gpu_engine import calls_module

SITE = Path(sysconfig.get_paths()["purelib"])
CSRC = Path(__file__).resolve().parents[2] / "sgl_kvpool" / "transfer" / "csrc"
HOPPER = ["-std=c++20", "-O3", "-gencode=arch=compute_90a,code=sm_90a"]


def nvcc():
    found = sorted(SITE.glob("nvidia/**/bin/nvcc"))
    if not found:
        pytest.skip("SGLang's dependencies on this platform bring no nvcc")
    return found[0]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Output of ptxas, and the device code, for the engines' source."""
    import tvm_ffi

    folder = tmp_path_factory.mktemp("cuda")
    include = Path(tvm_ffi.__file__).parent / "include"
    command = [nvcc(), *HOPPER, "-Xptxas=-v", "-I", include, "-cubin", CSRC / "bind_tvm_ffi.cu"]
    done = ran(*command, "-o", folder / "engines.cubin")
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    return done.stderr, folder / "engines.cubin"


def test_no_kernel_spills(compiled):
    output, _ = compiled
    # 4 widths of words, 4 pairs both ways, a latent copied.
    assert len(re.findall("Compiling entry function", output)) == 13
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", output)
    assert len(frames) >= 13
    assert set(frames) == {("0", "0", "0")}
    # A block has 512 threads. Two blocks of a copy kernel, or one of a conversion, share 65536 registers.
    entries = re.findall(r"entry function '(\w+)'.*?Used (\d+) registers", output, flags=re.S)
    for name, registers in entries:
        assert int(registers) <= (64 if "copy_pages" in name else 128), name


def test_rows_move_16_bytes_at_a_time(compiled):
    """By instructions for global memory; nothing is kept in local memory."""
    _, cubin = compiled
    nvdisasm = SITE / "triton" / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not nvdisasm.exists():
        pytest.skip("triton brings no nvdisasm on this platform")
    text = subprocess.check_output([nvdisasm, cubin], text=True)
    kernels = dict(re.findall(r"\.text\.(\w+):\n(.*?)(?=\.text\.\w+:|\Z)", text, flags=re.S))
    assert len(kernels) == 13
    for name, code in kernels.items():
        assert not re.search(r"\b(LD|ST|LDL|STL)\.", code), name
        if "convert_pages" in name:
            assert re.search(r"\bLDG\.E\.(64|128)", code), name
            assert re.search(r"\bSTG\.E\.(64|128)", code), name
    (wide,) = (code for name, code in kernels.items() if "copy_pages" in name and "Bytes16" in name)
    loads, stores = (len(re.findall(rf"\b{word}\.E\.128", wide)) for word in ("LDG", "STG"))
    assert loads == stores >= 4  # as many as a lane has in flight


def test_the_library_is_compiled_as_on_a_gpu_machine(tmp_path, monkeypatch):
    """By a link to pip's nvcc, which has neither lib64 nor libcudart.so; calls without a driver answer."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(nvcc())
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert compiler.cuda_toolkit()[0] == nvcc().parents[1]
    monkeypatch.setenv("TVM_FFI_CACHE_DIR", str(tmp_path / "cache"))
    import torch  # noqa: F401  # loads the runtime, which no path names

    calls = calls_module((9, 0)).load()
    assert calls.has_batches() in (True, False)
    (library,) = compiler.libraries()
    cuobjdump = SITE / "triton" / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.check_output([cuobjdump, "-lelf", library], text=True)
    assert re.findall(r"sm_\w+", text) == ["sm_90a"]
