"""The compiled engine against plain indexing, and its addresses under both compilers."""

import itertools
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from live_processes import ran
from test_plan import ARRANGEMENTS, PAGES, distinct, side

from sgl_kvpool.transfer.cpu_engine import CpuEngine, TorchEngine
from sgl_kvpool.transfer.plan import TransferPlan
from sgl_kvpool.transfer.slots import Transfer

#: Torch's copies have no number of threads.
MAKERS = {"torch": TorchEngine, **{f"cpu-{n}": lambda plan, n=n: CpuEngine(plan, n) for n in (1, 2, 5, 64)}}


@pytest.mark.parametrize("engine", MAKERS)
@pytest.mark.parametrize(("device", "host"), list(itertools.product(ARRANGEMENTS, repeat=2)))
def test_pages_arrive_and_nothing_else_changes(device, host, engine):
    """There and back, all layers and one; lists that are not contiguous."""
    source, from_pages = side(device, distinct)
    target, to_pages = side(host, -18, pages=PAGES + 2)
    there = MAKERS[engine](TransferPlan(source, target, "kv"))
    taken, put = np.array([6, 9, 0, 9, 3])[::2], np.array([8, 9, 2, 9, 5], dtype=np.int32)[::2]
    before, expected = from_pages.copy(), to_pages.copy()
    expected[:, put] = from_pages[:, taken]
    there.copy(Transfer(put, taken, to_host=True))
    assert np.array_equal(to_pages, expected)
    assert np.array_equal(from_pages, before)

    back = MAKERS[engine](TransferPlan(target, source, "kv"))
    expected = from_pages.copy()
    expected[1, [4, 2]] = to_pages[1, [8, 5]]
    back.copy(Transfer(np.array([8, 5]), np.array([4, 2]), to_host=False), 1)
    assert np.array_equal(from_pages, expected)


@pytest.mark.parametrize("row", [1023, 1024, 1041])
def test_long_runs_at_odd_addresses(row):
    """Runs long enough for streamed stores; for 1023 and 1041 their sizes are not multiples of 16 bytes."""
    sizes = {"layers": 3, "tokens": 5, "row": row}
    source, from_pages = side("layer_major", distinct, **sizes)
    target, to_pages = side("page_major", -18, pages=PAGES + 2, **sizes)
    expected = to_pages.copy()
    expected[:, [1, 8, 4]] = from_pages[:, [6, 0, 5]]
    transfer = Transfer(np.array([1, 8, 4]), np.array([6, 0, 5]), to_host=True)
    CpuEngine(TransferPlan(source, target, "kv"), 3).copy(transfer)
    assert np.array_equal(to_pages, expected)


@pytest.mark.parametrize("torchs", [1, 2])
def test_a_machine_that_grants_no_threads(torchs):
    """The calling thread also copies the share of threads that could not be started; torch's have been."""
    program = """
import resource, sys, threading
import numpy as np
import torch
from test_plan import side, distinct, PAGES
from sgl_kvpool.transfer.cpu_engine import CpuEngine
from sgl_kvpool.transfer.plan import TransferPlan
from sgl_kvpool.transfer.slots import Transfer
source, from_pages = side("layer_major", distinct, row=65536)
target, to_pages = side("page_major", -18, row=65536)
torchs = int(sys.argv[1])
engine = CpuEngine(TransferPlan(source, target, "kv"), 16 if torchs == 1 else torchs)
torch.set_num_threads(torchs)
torch.ones(1 << 20).exp()
# Addresses left: less than the stack of a thread.
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
_, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + 2**20, hard))
try:
    threading.Thread(target=int).start()
    raise SystemExit("a thread could be started")
except RuntimeError:
    pass
pages = np.arange(PAGES)
engine.copy(Transfer(pages[::-1].copy(), pages, to_host=True))
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
assert np.array_equal(to_pages, from_pages[:, ::-1])
print("copied")
"""
    done = ran(sys.executable, "-c", program, str(torchs), cwd=Path(__file__).parent, timeout=120)
    assert done.stdout == "copied\n", done.stderr[-2000:]


def test_built_where_ninja_is_not_on_the_path(tmp_path):
    """As on a new machine, where ninja is in the virtual environment only, which is not activated."""
    for folder in os.get_exec_path():
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            if name != "ninja" and not (tmp_path / name).exists():
                (tmp_path / name).symlink_to(os.path.join(folder, name))
    program = "import os; from sgl_kvpool.transfer import cpu_engine as engine; "
    program += "print(engine._module(), os.environ['PATH'])"
    environment = {**os.environ, "PATH": str(tmp_path), "TVM_FFI_CACHE_DIR": str(tmp_path / "cache")}
    done = ran(sys.executable, "-c", program, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == str(tmp_path)


def test_an_engine_requested_by_name_has_to_be_built(monkeypatch, failures):
    from sgl_kvpool.transfer import cpu_engine

    def fails():
        raise RuntimeError("ninja exited with status 1")

    monkeypatch.setattr(cpu_engine, "_module", fails)
    assert cpu_engine.engine_class() is TorchEngine
    assert failures() == {"engine_build": 1}
    with pytest.raises(RuntimeError, match="ninja"):
        cpu_engine.engine_class(required=True)


def test_instructions_are_those_of_the_machine():
    from sgl_kvpool.compiler import cpu_flags

    assert "-mavx2" in cpu_flags("AVX2")
    assert "-mavx512bw" in cpu_flags("AVX512")
    for capability in ("DEFAULT", "NO AVX", "VSX", "SVE256"):
        assert not [flag for flag in cpu_flags(capability) if flag.startswith("-m")]
    assert not [flag for flag in cpu_flags("AVX2") if "fast" in flag or "fma" in flag]


def test_nothing_is_copied_for_empty_or_invalid_page_lists():
    source, _ = side("page_major", distinct)
    target, to_pages = side("layer_major", -18)
    engine = CpuEngine(TransferPlan(source, target, "kv"))
    none = np.array([], dtype=np.int64)
    engine.copy(Transfer(none, none, to_host=False))
    for bad in (([0, 1], [2, 2]), ([0, PAGES], [0, 1]), ([0], [0, 1])):
        with pytest.raises(ValueError):
            engine.copy(Transfer(*map(np.array, bad), to_host=False))
    assert (to_pages == -18).all()
