"""Defects put into our code, in memory: a named test notices each. B2 and B3: vLLM pull request 42374."""

import pytest

pytestmark = pytest.mark.slow

#: defect: (file, code, code with the defect, tests that must fail)
MUTATIONS = {
    "B3: two strides swapped": (
        "memory/arrangement.py",
        "run_stride_bytes=self.layers * run_bytes,",
        "run_stride_bytes=self.page_size_tokens * run_bytes,",
        "tests/connectors/test_cross_layer.py::test_b1_b3_b4_views_are_the_bytes_at_the_address_and_cover_the_buffer",
    ),
    "B2: the cache copied in every forward": (
        "srt/attention/cpu.py",
        "rows = pool.get_row_buffer(layer.layer_id).squeeze(1)",
        "rows = pool.get_row_buffer(layer.layer_id).squeeze(1).contiguous()",
        "tests/srt/attention/test_arranged_attention.py::test_b2_no_forward_allocates_as_much_as_a_cache",
    ),
    "errors of a block summed in another order": (
        "codec/scalars.py",
        "values[..., 0::2] + values[..., 1::2]",
        "values[..., : values.shape[-1] // 2] + values[..., values.shape[-1] // 2 :]",
        "tests/codec/test_codec_rules.py::test_errors_are_summed_in_the_order_of_the_rules",
    ),
    "a chunk's limits are those of the list": (
        "attention/cpu.py",
        "left = kv_lens[of_list] - begin",
        "left = kv_lens[of_list]",
        "tests/attention/test_decode_arguments.py::test_long_lists_are_read_in_chunks_by_torch",
    ),
    "runs joined that only the source has side by side": (
        "transfer/plan.py",
        "and self.target_address + self.run_bytes == other.target_address",
        "and True",
        "tests/transfer/test_plan.py::test_pages_arrive_and_nothing_else_changes",
    ),
    "a rule that asks for one of two readers": (
        "srt/facts/topk_transform.py",
        "if prefill != decode and prefill in SGLANG_READERS[layout].dsa_paired:",
        "if prefill != decode and decode == KVPOOL_DECODE:",
        "tests/srt/facts/test_topk_transform.py::test_every_cell",
    ),
}
#: Runs pytest with other code in one file of the package.
PROGRAM = """
import sys, pytest
from importlib.machinery import SourceFileLoader
ending, code, mutated, test = {defect!r}
own = SourceFileLoader.get_code
def get_code(self, name):
    if not self.path.endswith("sgl_kvpool/" + ending):
        return own(self, name)
    text = self.get_data(self.path).decode()
    assert text.count(code) == 1, text.count(code)
    return compile(text.replace(code, mutated), self.path, "exec")
SourceFileLoader.get_code = get_code
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--tb=line", test]))
"""


@pytest.mark.parametrize("defect", MUTATIONS)
def test_a_defect_makes_its_test_fail(defect, fresh):
    done = fresh.run(PROGRAM.format(defect=MUTATIONS[defect]))
    assert done.returncode == 1, done.stdout + done.stderr  # 1: tests ran and failed, without other errors
    assert f"FAILED {MUTATIONS[defect][3]}" in done.stdout
    assert " error" not in done.stdout.rpartition("\n= ")[2].lower()
