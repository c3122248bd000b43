"""Seven defects that reviews of vLLM's cache layouts found (pull request 42374), put into our code.

A named test notices each. Each runs in a copy of the project.
"""

import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent

#: defect: (file, code, code with the defect, tests that must fail)
MUTATIONS = {
    "geometry guessed from a shape": (
        "connectors/pools.py",
        "if info.buffers.layout is KVBufferLayout.NHD:",
        "if info.buffers.k[0].shape[0] != (pool.size + pool.page_size) // pool.page_size:",
        "tests/connectors/test_describe.py::test_b1_sizes_that_could_be_taken_for_each_other",
    ),
    "the cache copied in every forward": (
        "srt/attention/cpu.py",
        "rows = pool.get_row_buffer(layer.layer_id).squeeze(1)",
        "rows = pool.get_row_buffer(layer.layer_id).squeeze(1).contiguous()",
        "tests/srt/attention/test_arranged_attention.py::test_b2_no_forward_allocates_as_much_as_a_cache",
    ),
    "a reshape that copies": (
        "connectors/cross_layer.py",
        "view = self.tensor.select(-2, position)",
        "view = self.tensor.select(-2, position).reshape(self.pages, -1)",
        "tests/connectors/test_cross_layer.py::test_b2_all_views_share_one_storage",
    ),
    "two axes swapped": (
        "memory/arrangement.py",
        'TOKEN_MAJOR = "token_major", "BNLC"',
        'TOKEN_MAJOR = "token_major", "BLNC"',
        "tests/memory/test_arrangement.py::test_b1_b4_every_byte_has_its_own_place_and_every_place_its_byte",
    ),
    "two strides swapped": (
        "memory/arrangement.py",
        "run_stride_bytes=self.layers * run_bytes,",
        "run_stride_bytes=self.page_size_tokens * run_bytes,",
        "tests/connectors/test_cross_layer.py::test_b1_b3_b4_views_are_the_bytes_at_the_address_and_cover_the_buffer",
    ),
    "the page size taken from the wrong axis": (
        "memory/arrangement.py",
        "pages = rows.div(page_size_tokens,",
        "pages = rows.div(rows_per_page,",
        "tests/memory/test_arrangement.py::test_slots_to_rows",
    ),
    "position and head strides swapped": (
        "connectors/cross_layer.py",
        'axes = "BLC" if arrangement is KVArrangement.PAGE_MAJOR else placement.arrangement.axes',
        'axes = "BLC" if arrangement is KVArrangement.PAGE_MAJOR else "BLNC"',
        "tests/connectors/test_cross_layer.py::test_gpt_oss_head_major",
    ),
}


@pytest.fixture
def project(tmp_path):
    """A copy whose tests import the copy."""
    ignore = shutil.ignore_patterns("__pycache__", "byte_mla_python", "engine", "gpu", "demo")
    for folder in ("sgl_kvpool", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.fixture
def run(fresh, project):
    """`run(test, ...)`: status and output of pytest in the copy, in a process of its own."""

    def run(*tests):
        arguments = ["-q", "-p", "no:cacheprovider", "--tb=line", *tests]
        done = fresh.run(
            f"import pytest, sys; sys.exit(pytest.main({arguments!r}))", project, PYTHONPATH=str(project)
        )
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("defect", MUTATIONS)
def test_a_defect_makes_its_test_fail(defect, run, project):
    file, code, mutated, test = MUTATIONS[defect]
    path = project / "sgl_kvpool" / file
    text = path.read_text()
    assert text.count(code) == 1
    path.write_text(text.replace(code, mutated))
    status, output = run(test)
    assert status == 1, output  # 1: tests ran and failed; any other status is an error of pytest
    assert f"FAILED {test}" in output
    assert " error" not in output.rpartition("\n= ")[2].lower()


def test_without_a_defect_they_pass(run):
    status, output = run(*sorted({mutation[3] for mutation in MUTATIONS.values()}))
    assert status == 0, output
