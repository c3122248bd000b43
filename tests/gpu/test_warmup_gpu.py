"""`sgl-kvpool warmup` on a GPU: everything is compiled, and found by a second process."""

import os
import subprocess
import sys

import pytest

#: `silicon`: processes of their own, which have no emulated device.
pytestmark = [pytest.mark.gpu, pytest.mark.silicon]
#: Seconds that one of the two processes may take.
LIMIT_S = 850


@pytest.mark.timeout(2 * LIMIT_S + 100)
def test_a_second_process_compiles_nothing(tmp_path):
    pytest.importorskip("sglang")
    moved = ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")
    environment = {name: value for name, value in os.environ.items() if name not in moved}
    environment |= {"SGLANG_CACHE_DIR": str(tmp_path), "SGLANG_JIT_CACHE_DIR": str(tmp_path / "jit")}
    environment["TORCH_EXTENSIONS_DIR"] = str(tmp_path / "torch")
    command = [sys.executable, "-m", "sgl_kvpool", "warmup", "--device", "cuda"]
    command += ["--kv-cache-layout", "fp4", "--tp", "8", "--draft-tokens", "2"]
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        for _ in range(2)
    )
    assert first.returncode == 0, first.stdout + first.stderr
    assert second.returncode == 0, second.stdout + second.stderr
    assert not first.stdout.splitlines()[-1].startswith("0 compiled, ")
    assert second.stdout.splitlines()[-1].startswith("0 compiled, ")
