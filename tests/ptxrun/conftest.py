"""Tests of compiled kernels on an emulated sm_90a; ``docs/developing.md``.

They run in a pytest of their own, because Triton reads TRITON_INTERPRET, which is 1 for other tests, when
kernels are imported, and ptxrun replaces its driver. `make test` runs those marked `quick`, with CI=true all.
"""

import os
import shutil
import sys
from pathlib import Path

import ptxrun_builds
import pytest

FOLDER = Path(__file__).resolve().parent
COMPILED = os.environ.get("TEST_COMPILED") == "1"
if COMPILED:
    os.environ["TRITON_CACHE_DIR"] = str(ptxrun_builds.cache_folder() / "triton")


def pytest_collection_modifyitems(items):
    reason = "needs g++, which compiles the emulator" if COMPILED else "runs if only tests/ptxrun is named"
    if not COMPILED or shutil.which("g++") is None:
        for item in items:
            if item.path.is_relative_to(FOLDER):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _fixed_random_numbers():
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(1234)


@pytest.fixture
def runs():
    """Launches of Triton kernels on ptxrun, with an H100's conversion instructions for e4m3 and bf16."""
    import ptxrun_triton

    from sgl_kvpool.codec import triton as codec_triton

    found = ptxrun_triton.install()
    found.launched.clear()
    codec_triton.is_native = lambda device: True
    return found
