"""Tests of compiled kernels on an emulated sm_90a; ``docs/developing.md``.

They run in processes of their own (`ptxrun_workers`), without Triton's interpreter, and are reported here.
With ``TEST_PTXRUN_HERE=1`` they run in this process, for a debugger.

Without CI=true, `make test` runs those marked `quick`; naming this folder or a file in it runs all.
"""

import os
import shutil
import sys
from pathlib import Path

import ptxrun_builds
import pytest
from ptxrun_workers import SOCKET_VARIABLE, Answers, Workers

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent / "attention")]


HERE = os.environ.get("TEST_PTXRUN_HERE") == "1" or SOCKET_VARIABLE in os.environ
ALL = os.environ.get("CI", "").lower() not in ("", "0", "false")
if HERE:
    # Before kernels are imported.
    os.environ["TRITON_INTERPRET"] = "0"
    os.environ["TRITON_CACHE_DIR"] = str(ptxrun_builds.cache_folder() / "triton")

_workers = pytest.StashKey[Workers]()


def _ours(items):
    return [item for item in items if item.path.is_relative_to(FOLDER)]


def _named(config):
    """Whether the command line names this folder or something in it."""
    paths = [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]
    return any(path.is_relative_to(FOLDER) for path in paths)


def pytest_configure(config):
    if SOCKET_VARIABLE in os.environ:
        config.pluginmanager.register(Answers(config))


def pytest_collection_modifyitems(config, items):
    ours = _ours(items)
    if shutil.which("g++") is None:
        for item in ours:
            item.add_marker(pytest.mark.skip(reason="needs g++, which compiles the emulator"))
    if not (HERE or ALL or _named(config)):
        left = [item for item in ours if not item.get_closest_marker("quick")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    session = item.session
    if HERE or not item.path.is_relative_to(FOLDER) or item.get_closest_marker("skip"):
        return None
    if _workers not in session.stash:
        items = _ours(session.items)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        session.stash[_workers] = Workers(session.config, items[items.index(item) :], environment)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in session.stash[_workers].reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_sessionfinish(session):
    if _workers in session.stash:
        session.stash[_workers].close()


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


@pytest.fixture
def on_ptxrun(runs, monkeypatch):
    """Public functions call the kernels for CPU tensors as they do for CUDA tensors."""
    import torch

    from sgl_kvpool import codec
    from sgl_kvpool.attention import decode
    from sgl_kvpool.attention.decode_config import decode_config, partial_elements
    from sgl_kvpool.attention.decode_launch import launch
    from sgl_kvpool.codec import triton as codec_triton

    def by_kernels(params):
        tokens, heads, _ = params.out.shape
        config = decode_config(
            params.fmt, heads, params.queries_per_list, params.lists, params.kv_indices.shape[1]
        )
        partial = torch.full((partial_elements(params.fmt, tokens, heads, config.splits),), float("nan"))
        launch(params, partial, config)

    monkeypatch.setattr(codec, "_backend", lambda rows: codec_triton)
    monkeypatch.setattr(decode, "_decode_on_cpu", by_kernels)
    return runs


@pytest.fixture
def few_blocks(monkeypatch):
    """Transfer kernels of 3 blocks instead of 16, so that in cases with more chunks than warps (96 for
    copies, 48 for conversions, no powers of two) a warp takes several chunks.
    """
    from sgl_kvpool.transfer import gpu_engine

    monkeypatch.setattr(gpu_engine, "KERNEL_BLOCKS", 3)
