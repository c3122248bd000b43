"""Where compiled code finds nvcc, its headers and libcudart."""

import os
import shutil
from pathlib import Path

import pytest

from sgl_kvpool import compiler
from sgl_kvpool.compiler import Module


@pytest.fixture
def on_cuda(tmp_path, monkeypatch):
    """A module that nvcc would compile."""
    monkeypatch.setenv("TVM_FFI_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "small.cu").touch()
    return Module("small", tmp_path / "source" / "small.cu", (), cuda_arch="9.0a")


def toolkit(home, *files):
    """A folder with the files of a CUDA toolkit."""
    for name in files:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch(mode=0o755)
    return home


#: Files of toolkits as NVIDIA's installer, pip, Debian and conda lay them out, libcudart last.
TOOLKITS = [
    ("bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart.so"),
    ("bin/nvcc", "include/cuda_runtime.h", "lib/libcudart.so.13"),
    ("bin/nvcc", "include/cuda_runtime.h", "lib/x86_64-linux-gnu/libcudart.so"),
    ("bin/nvcc", "targets/sbsa-linux/include/cuda_runtime.h", "targets/sbsa-linux/lib/libcudart.so"),
]


@pytest.mark.parametrize("files", TOOLKITS, ids=lambda files: files[-1])
@pytest.mark.parametrize("is_link", [False, True])
def test_toolkits(files, is_link, tmp_path, monkeypatch):
    """nvcc on the PATH is in the toolkit, or a link into it."""
    home = toolkit(tmp_path / "cuda", *files)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(home / "bin" / "nvcc")
    monkeypatch.setenv("PATH", str((tmp_path if is_link else home) / "bin"))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert compiler.cuda_toolkit() == (home, home / files[-1])


def test_folders_that_are_no_toolkit(on_cuda, tmp_path, monkeypatch):
    """A wrapper script on the PATH, in a folder without headers; a CUDA_HOME that lacks one file."""
    toolkit(tmp_path, "bin/nvcc")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    home = toolkit(tmp_path / "nvidia" / "cu99", *TOOLKITS[1])
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with monkeypatch.context() as in_root:
        in_root.setattr(shutil, "which", lambda _: "/nvcc")
        compiler.cuda_toolkit()
    assert compiler.cuda_toolkit()[0] in (home, Path("/usr/local/cuda"))
    monkeypatch.setenv("CUDA_HOME", str(home))
    for name in TOOLKITS[1]:
        (home / name).rename(tmp_path / "kept")
        with pytest.raises(RuntimeError, match=f"^{home}: no bin/nvcc, cuda_runtime.h and .*; set CUDA_HOME"):
            on_cuda.load()
        (tmp_path / "kept").rename(home / name)
    assert compiler.cuda_toolkit()[0] == home


def test_the_environment_is_as_before(on_cuda, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # no ninja, no nvcc
    monkeypatch.setenv("CUDA_PATH", str(toolkit(tmp_path / "cuda", *TOOLKITS[0])))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    before = dict(os.environ)
    with on_cuda._tools():
        assert shutil.which("ninja")
        assert os.environ["TVM_FFI_CUDA_ARCH_LIST"] == "9.0a"
        assert os.environ["CUDA_HOME"] == str(tmp_path / "cuda")
    assert dict(os.environ) == before
