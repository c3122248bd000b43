"""The CUDA compiler from SGLang's dependencies compiles for Hopper."""

import subprocess
import sysconfig
from pathlib import Path

import pytest

SITE = Path(sysconfig.get_paths()["purelib"])


def test_nvcc_of_the_wheel_compiles_for_hopper(tmp_path):
    found = sorted(SITE.glob("nvidia/**/bin/nvcc"))
    if not found:
        pytest.skip("SGLang's dependencies on this platform bring no nvcc")
    source = tmp_path / "copy.cu"
    source.write_text(
        "#include <cstdint>\n"
        "__global__ void copy(const uint4* from, uint4* to, int64_t n) {\n"
        "  int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;\n"
        "  if (i < n) to[i] = from[i];\n"
        "}\n"
    )
    cubin = tmp_path / "copy.cubin"
    done = subprocess.run(
        [found[0], "-gencode=arch=compute_90a,code=sm_90a", "-cubin", source, "-o", cubin],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert cubin.stat().st_size > 0
