"""Commands look for a GPU before they import torch, and say how long they have waited."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from sgl_kvpool.commands.waiting import no_gpu

ABSENT = subprocess.run(
    [sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"], capture_output=True
)
without_driver = pytest.mark.skipif(ABSENT.returncode == 0, reason="there is a driver")


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Make the linker find a driver's library that answers with these values."""

    def make(error, count):
        source = tmp_path / "cuda.c"
        source.write_text(
            f"int cuInit(unsigned flags) {{ return {error}; }}\n"
            f"int cuDeviceGetCount(int* count) {{ *count = {count}; return 0; }}\n"
        )
        library = tmp_path / "libcuda.so.1"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return make


@pytest.mark.parametrize(
    ("error", "count", "said"),
    [(0, 2, None), (0, 0, "the driver finds 0 (error 0)"), (100, 0, "the driver finds 0 (error 100)")],
)
def test_what_the_driver_says(driver, error, count, said):
    driver(error, count)
    assert no_gpu() == (None if said is None else f"no GPU is visible: {said}")


@pytest.mark.parametrize(("visible", "hidden"), [("", True), ("-1", True), ("1,0", False)])
def test_hidden_gpus(driver, monkeypatch, visible, hidden):
    driver(0, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert no_gpu() == (f"no GPU is visible: CUDA_VISIBLE_DEVICES={visible!r} hides all" if hidden else None)


@without_driver
@pytest.mark.parametrize(
    "words",
    [
        "sgl_kvpool warmup --device cuda",
        "scripts.bench transfer --device=cuda",
    ],
)
def test_nothing_heavy_is_imported_to_find_no_gpu(words, tmp_path):
    for name in ("torch", "sglang", "triton"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    package = os.path.dirname(find_spec("sgl_kvpool").submodule_search_locations[0])
    done = subprocess.run(
        [sys.executable, "-P", "-m", *words.split()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), package])},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 2
    assert "no GPU is visible: libcuda.so.1, the library of NVIDIA's driver, cannot be loaded" in done.stderr
    assert len(done.stderr.splitlines()) == 1
