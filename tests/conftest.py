"""Shared by all tests: Triton's interpreter without a GPU, GPU tests skipped and counted, common fixtures."""

import importlib.util
import os
import shutil
import sys
import threading
import trace
from pathlib import Path

import forks
import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Folders with modules that tests of other folders import: oracles, pools, cases. Their names are unique.
HELPERS = (
    *("attention", "codec", "commands/evaluate", "demo", "docs", "gpu", "ptxrun", "sglang_plugin"),
    *("transfer", "srt/attention", "srt/facts", "srt/host", "srt/pool", "srt/self_check"),
)
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in HELPERS]
sys.path.append(str(ROOT))

HAS_GPU = shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()
#: GPU tests run on the emulated device of tests/emulated_cuda.
EMULATED = "--emulated" in sys.argv or os.environ.get("TEST_EMULATED") == "1"


def _named():
    """Paths that the command line names, of files and folders with tests."""
    for before, word in zip(sys.argv, sys.argv[1:], strict=False):
        path = Path(word.partition("::")[0]).resolve()
        if path.is_relative_to(ROOT / "tests") and path.exists() and before not in ("--ignore", "--deselect"):
            yield path


NAMED = list(_named())
#: Only tests of tests/ptxrun, which run compiled kernels on CPU tensors.
COMPILED = bool(NAMED) and all(path.is_relative_to(ROOT / "tests" / "ptxrun") for path in NAMED)
COMPILED |= os.environ.get("TEST_COMPILED") == "1"  # a worker of `-n`
if EMULATED:
    os.environ["TEST_EMULATED"] = "1"  # for the workers of `-n`
    import emulated_cuda.plugin

    site = str(ROOT / "tests" / "emulated_cuda" / "site")
    if site in os.environ.get("PYTHONPATH", ""):  # a worker of `-n`, whose sitecustomize puts it in place
        import torch  # noqa: F401
    else:
        emulated_cuda.plugin.install()
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
    # Processes that tests start are on the device too; xdist gives a worker the path from before this line.
    sys.path.append(site)
elif COMPILED:
    os.environ["TEST_COMPILED"] = "1"
    os.environ["TRITON_INTERPRET"] = "0"
elif not HAS_GPU:
    # Before anything imports triton: kernels then run on CPU tensors, in numpy.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if importlib.util.find_spec("hypothesis") is not None:  # core GPU tests run without it
    import hypothesis

    # Times on a busy machine say nothing; `make test` uses all of its cores.
    hypothesis.settings.register_profile("kvpool", hypothesis.settings(), deadline=None)
    hypothesis.settings.load_profile("kvpool")


#: Why the emulated device skips GPU tests with the mark `silicon`.
SILICON = "measures a GPU's time, takes an hour, needs NVIDIA's driver or more than 24 GB of memory"
#: Folders whose tests share servers or processes: one worker runs a whole folder. The servers take longest
#: and start first.
TOGETHER = ("tests/engine", "tests/gpu")
#: On the emulated device, one worker runs all servers of a model, and another worker those of the next.
SHAPES = ("deepseek_v3", "kimi_k2", "glm5", "kimi_linear", "lightning")
#: Engines of two and of four ranks, one after another: a rank takes 4 GB, and the machine has 24.
RANKS = ("test_sparse_dcp.py", "test_sparse_mtp.py", "test_dense_dcp.py")


def pytest_addoption(parser):
    parser.addoption(
        "--emulated", action="store_true", help="run GPU tests on an emulated device (developing.md)"
    )
    parser.addoption("--executed", metavar="FOLDER", help="write the package's lines that ran, and did not")


def pytest_configure(config):
    if folder := config.getoption("--executed"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        tracer = trace.Trace(trace=False, infile=f"{folder}/counts", outfile=f"{folder}/counts")
        # Its own filter goes by a module's last name, which modules of other packages have too.
        tracer.ignore.names = lambda file, module: not file.startswith(str(ROOT / "sgl_kvpool"))
        threading.settrace(tracer.globaltrace)
        sys.settrace(tracer.globaltrace)
        config.add_cleanup(lambda: _write_lines(tracer.results(), folder))
    if EMULATED:
        config.pluginmanager.register(emulated_cuda.plugin.Plugin())


def _write_lines(results, folder):
    threading.settrace(None)
    sys.settrace(None)
    results.write_results(summary=False, coverdir=folder)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n`: a worker runs whole files, or folders of `TOGETHER`; of tests/ptxrun, any test."""
    if COMPILED:
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file, _, test = nodeid.partition("::")
            if EMULATED and file.endswith("test_server_gpu.py"):
                return next((shape for shape in SHAPES if f"[{shape}-" in f"{test}-".replace("]", "-")), file)
            if file.endswith(RANKS):
                return "ranks"
            return next((folder for folder in TOGETHER if file.startswith(f"{folder}/")), file)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(TOGETHER))
    has_gpu = HAS_GPU and importlib.import_module("torch").cuda.is_available()
    for item in items:
        if EMULATED and item.get_closest_marker("silicon"):
            item.add_marker(pytest.mark.skip(reason=SILICON))
        elif item.get_closest_marker("gpu") and not (has_gpu or EMULATED):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif not EMULATED and item.nodeid.startswith("tests/emulated_cuda/"):
            item.add_marker(pytest.mark.skip(reason="tests of the emulated device: --emulated"))


def pytest_terminal_summary(terminalreporter):
    def of_gpu(outcome):
        """Keywords of the GPU tests with this outcome."""
        reports = terminalreporter.stats.get(outcome, [])
        return [found for report in reports if "gpu" in (found := getattr(report, "keywords", {}))]

    skipped = of_gpu("skipped")
    if not EMULATED:
        present = "present" if HAS_GPU else "none"
        terminalreporter.write_line(f"GPU: {present}; {len(skipped)} GPU tests skipped")
        return
    silicon = sum("silicon" in keywords for keywords in skipped)
    terminalreporter.write_line(
        f"GPU: emulated; {len(of_gpu('passed'))} GPU tests passed, skipped: {silicon} silicon, "
        f"{len(skipped) - silicon} for another reason"
    )


@pytest.fixture(autouse=True)
def every_failure_is_logged():
    """The line of a failure is otherwise left out for a minute after another test's of that kind."""
    if metrics := sys.modules.get("sgl_kvpool.metrics"):
        metrics._quiet.clear()


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


@pytest.fixture
def kept_context():
    """SGLang's runtime context is put back at the end.

    SGLang's snapshot refers to dicts that its `override`, `publish` and `clear_stamp` change in place.
    """
    from sglang.srt.runtime_context import restore_context, snapshot_context

    before = snapshot_context()
    parts = before["__parallel__"]
    parts.update((name, dict(part)) for name, part in parts.items() if isinstance(part, dict))
    yield
    restore_context(before)


@pytest.fixture(scope="session")
def fresh(tmp_path_factory):
    """`fresh.run(code)`: in a new process that has imported SGLang's pools and nothing of this package."""
    modules = ("pytest", "sglang.srt.mem_cache.memory_pool")
    folder = tmp_path_factory.mktemp("fresh")
    with forks.Forks(*modules, output=folder, environment=dict(os.environ)) as process:
        yield process


@pytest.fixture(scope="session")
def process_group():
    """A group of this process alone."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


@pytest.fixture
def no_reserve(monkeypatch, published):
    """Allow host tiers on a machine of any size: SGLang otherwise leaves 10 GiB of memory free."""
    from sglang.srt.mem_cache.pool_host import base

    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)


@pytest.fixture(scope="session")
def counting():
    """`counting(name, **labels)`: value of a metric in this process."""
    from prometheus_client import REGISTRY

    from sgl_kvpool import metrics

    metrics.publish(
        layout="fp4", host_layout="fp4", arrangement="layer_major", backend="kvpool_mla", dcp_size=1
    )
    return lambda name, **labels: REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.fixture
def failures(counting):
    """`failures()`: failures counted since the test began, by kind."""
    from sgl_kvpool.metrics import FAILURES

    def now():
        return {kind: counting("sgl_kvpool_failures_total", kind=kind) for kind in FAILURES}

    before = now()
    return lambda: {kind: n - before[kind] for kind, n in now().items() if n != before[kind]}


@pytest.fixture
def threads():
    """Sets torch's number of threads."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=["C++", "torch"])
def each_attention(request, monkeypatch):
    """Attention on a CPU as it is, and where nothing compiles."""
    if request.param == "torch":
        monkeypatch.setattr("sgl_kvpool.attention.cpu.module", lambda **_: None)


@pytest.fixture
def nothing_left_out():
    """Emulated streams without work of another test."""
    from emulated import calls

    calls().forget()
    yield
    assert calls().play(0) == 0  # the test has played all of its work
