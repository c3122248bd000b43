"""Shared by all tests: Triton's interpreter without a GPU, GPU tests skipped and counted, bounded threads."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import forks
import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Folders with modules that tests of other folders import: oracles, pools, cases. Their names are unique.
HELPERS = (
    *("attention", "codec", "docs", "gpu", "sglang_plugin", "transfer"),
    *("srt/attention", "srt/host", "srt/pool"),
)
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in HELPERS]
sys.path.append(str(ROOT / "scripts"))


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()


HAS_GPU = _has_gpu()
if not HAS_GPU:
    # Before anything imports triton: kernels then run on CPU tensors, in numpy.
    os.environ.setdefault("TRITON_INTERPRET", "1")


#: Folders whose tests share servers or processes, so that one worker runs them all; the servers, for which
#: tests wait longest, begin.
TOGETHER = ("tests/engine", "tests/gpu", "tests/ptxrun")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n`: a worker runs whole files, or folders of `TOGETHER`."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return next((folder for folder in TOGETHER if file.startswith(f"{folder}/")), file)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(TOGETHER))
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter):
    skipped = [
        report
        for report in terminalreporter.stats.get("skipped", [])
        if "gpu" in getattr(report, "keywords", {})
    ]
    terminalreporter.write_line(f"GPU: {'present' if HAS_GPU else 'none'}; {len(skipped)} GPU tests skipped")


@pytest.fixture(scope="session")
def published():
    """SGLang's runtime context in this process, as a scheduler on a CPU has it."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="dummy", device="cpu")
    publish(args, role="scheduler", ranks=SpawnRanks(0, None, 0))
    return args


@pytest.fixture(scope="session")
def fresh(tmp_path_factory):
    """`fresh.run(code)`: in a new process with SGLang's pools imported and nothing of ours."""
    modules = ("pytest", "sglang.srt.mem_cache.memory_pool")
    folder = tmp_path_factory.mktemp("fresh")
    with forks.after_importing(*modules, output=folder, environment=dict(os.environ)) as process:
        yield process
