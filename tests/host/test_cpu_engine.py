"""The compiled engine against plain indexing, and its addresses under both compilers."""

import itertools
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from test_plan import ARRANGEMENTS, LAYERS, PAGES, distinct, side

from sgl_kvpool.host.cpu_engine import CpuEngine
from sgl_kvpool.host.plan import TransferPlan

CSRC = Path(__file__).resolve().parents[2] / "sgl_kvpool" / "host" / "csrc"


@pytest.mark.parametrize("threads", [1, 2, 5, 64])
@pytest.mark.parametrize(("device", "host"), list(itertools.product(ARRANGEMENTS, repeat=2)))
def test_pages_arrive_and_nothing_else_changes(device, host, threads):
    """There and back, all layers and one; lists that are not contiguous."""
    source, from_pages = side(device, distinct)
    target, to_pages = side(host, -18, pages=PAGES + 2)
    there = CpuEngine(TransferPlan(source, target, "kv"), threads)
    taken, put = np.array([6, 9, 0, 9, 3])[::2], np.array([8, 9, 2, 9, 5], dtype=np.int32)[::2]
    before, expected = from_pages.copy(), to_pages.copy()
    expected[:, put] = from_pages[:, taken].reshape(LAYERS, 3, *expected.shape[2:])
    there.copy(taken, put)
    assert np.array_equal(to_pages, expected)
    assert np.array_equal(from_pages, before)

    back = CpuEngine(TransferPlan(target, source, "kv"), threads)
    expected = from_pages.copy()
    expected[1, [4, 2]] = to_pages[1, [8, 5]].reshape(2, *expected.shape[2:])
    back.copy(np.array([8, 5]), np.array([4, 2]), back.prepared(back.plan.copy_runs_of([1])))
    assert np.array_equal(from_pages, expected)


def test_nothing_is_copied_of_lists_that_are_none():
    source, _ = side("page_major", distinct)
    target, to_pages = side("layer_major", -18)
    engine = CpuEngine(TransferPlan(source, target, "kv"))
    none = np.array([], dtype=np.int64)
    engine.copy(none, none)
    engine.copy(np.array([1]), np.array([1]), engine.prepared([]))
    for bad in (([0, 1], [2, 2]), ([0, PAGES], [0, 1]), ([0], [0, 1])):
        with pytest.raises(ValueError):
            engine.copy(*map(np.array, bad))
    assert (to_pages == -18).all()


def test_the_addresses_compile_for_hopper(tmp_path):
    """The header that g++ compiles for the engine is the one that kernels will use."""
    found = sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/**/bin/nvcc"))
    if not found:
        pytest.skip("SGLang's dependencies on this platform bring no nvcc")
    source = tmp_path / "addresses.cu"
    source.write_text(
        '#include "copy_run.h"\n'
        "__global__ void addresses(const kvpool::CopyRun* run, int64_t page, int64_t* out) {\n"
        "  out[threadIdx.x] = run->target(page, threadIdx.x) - run->source(page, threadIdx.x);\n"
        "}\n"
    )
    command = [found[0], "-gencode=arch=compute_90a,code=sm_90a", "-I", CSRC, "-cubin", source]
    done = subprocess.run(
        [*command, "-o", tmp_path / "out.cubin"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
