"""`bench attention` without a GPU: checked measurements, inputs and the calls of peers."""

import ast
import importlib.util
import inspect
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts.bench.attention.benchmark import Attention
from scripts.bench.attention.cases import CPU_GRID, Workload, cases
from scripts.bench.attention.inputs import make_problem
from scripts.bench.attention.peers import Kvpool, Runner, runners
from scripts.bench.device import CpuDevice
from scripts.bench.sweep import result_of
from sgl_kvpool import MLAKVCacheLayout

CASE = {"runner": "kvpool", "layout": "fp4", **Workload("dense", 2, 1, 64, 64).as_case()}


class Fake(Runner):
    """A runner whose result a test chooses."""

    needs_cuda = False

    def __init__(self, result, reason=None):
        self.result, self.reason = result, reason

    def load(self, device):
        if self.reason:
            raise ImportError(self.reason)

    def refusal(self, workload):
        return "no sparse lists" if workload.kind == "sparse" else None

    def prepare(self, problem):
        ours = Kvpool()
        ours.load(CpuDevice())
        prepared = ours.prepare(problem)
        return replace(prepared, calls=[lambda call=call: self.result(call) for call in prepared.calls])


def started():
    bench = Attention(Namespace(quick=False, device="cpu"))
    bench.start()
    return bench


def measured(result=lambda call: call(), device=None, case=CASE, runner="kvpool", **options):
    """The row of the smallest dense workload."""
    bench = started()
    bench.device = device or CpuDevice(rounds=1)
    bench.runners[runner] = Fake(result, **options)
    return result_of(bench, case)


def test_a_measured_row():
    row = measured()
    assert (row["status"], row["rotating_sets"], "graph_us" in row) == ("measured", 2, False)
    assert row["relative_error"] < 0.01
    seconds = row["us"] * 1e-6
    assert row["rows_per_s"] == pytest.approx(64 / seconds, rel=1e-2)
    assert row["row_gb_per_s"] == pytest.approx(64 * 416 / seconds / 1e9, abs=0.01)


#: The second result has a head that is not written, and keeps the poison that outputs are filled with.
@pytest.mark.parametrize(
    "damage", [lambda out: out.fill_(0.0), lambda out: out.index_fill_(1, torch.tensor(1), float("nan"))]
)
def test_wrong_results_have_no_time(damage):
    row = measured(lambda call: damage(call()))
    assert row["status"] == "wrong"
    assert "relative error" in row["reason"]
    assert "us" not in row


def test_runners_that_fail_or_are_skipped():
    def fails(call):
        raise AssertionError("unsupported head dim\nand a stack")

    assert measured(fails) == {"status": "failed", "reason": "AssertionError: unsupported head dim"}
    found = measured(reason="No module named 'x'")
    assert found == {"status": "skipped", "reason": "ImportError: No module named 'x'"}
    sparse = measured(case={**CASE, "kind": "sparse", "rows_per_list": 10})
    assert sparse["reason"] == "no sparse lists"
    for peer in runners().keys() - {"kvpool"}:
        assert measured(case={**CASE, "runner": peer})["reason"] == "needs a CUDA device"


def test_times_in_a_graph_are_checked_too():
    class Graphs(CpuDevice):
        wrong = False

        def graph_us(self, calls):
            return 7.0, (lambda: calls[-1]() * 2) if self.wrong else calls[-1]

    device = Graphs()
    row = measured(device=device)
    assert row["graph_us"] == 7.0
    assert row["rows_per_s"] == pytest.approx(64 / 7e-6, rel=1e-4)
    device.wrong = True
    row = measured(device=device)
    assert (row["status"], row["reason"][:15]) == ("wrong", "in a CUDA graph")


@pytest.mark.parametrize(
    ("error", "runner", "status"),
    [
        (RuntimeError("operation not permitted when stream is capturing"), "kvpool", "wrong"),
        (RuntimeError("operation not permitted when stream is capturing"), "flashmla", "measured"),
        (torch.OutOfMemoryError("graph"), "kvpool", "measured"),
    ],
)
def test_our_kernel_is_wrong_if_it_cannot_be_captured(error, runner, status):
    class Graphs(CpuDevice):
        def graph_us(self, calls):
            raise error

    row = measured(device=Graphs(), case={**CASE, "runner": runner}, runner=runner)
    assert row["status"] == status
    assert str(error) in row["no_graph" if status == "measured" else "reason"]


def test_our_kernel_is_right_on_every_workload_and_layout():
    bench = started()
    ours = [case for case in cases(CPU_GRID) if case["runner"] == "kvpool"]
    assert {case["layout"] for case in ours} == {layout.value for layout in MLAKVCacheLayout}
    assert {case["kind"] for case in ours} == {"dense", "sparse", "whole_pool"}
    assert {case.get("arrangement") for case in ours} == {None, "token_major", "page_major"}
    assert {case.get("queries_per_list") for case in ours} == {None, 4}
    assert [result_of(bench, case)["status"] for case in ours] == ["measured"] * len(ours)


@pytest.mark.parametrize("arrangement", ["layer_major", "token_major", "page_major"])
def test_lists_of_the_inputs(arrangement):
    workload = Workload("dense", 2, 3, 128, 128, 4, arrangement, layers=3)
    problem = make_problem(workload, MLAKVCacheLayout("fp8").row_format(512, 64), CpuDevice())
    slots = problem.kv_indices.view(-1, 64)
    assert (slots[:, 0] % 64 == 0).all()
    assert (slots.diff(dim=1) == 1).all()  # tokens of a page in order
    pages = slots[:, 0] // 64
    assert pages.tolist() == problem.page_tables.flatten().tolist()
    assert pages.min() == 1  # page 0 is reserved
    assert len(pages.unique()) == len(pages) == 2 * 3 * 2
    assert pages.tolist() != sorted(pages.tolist())
    assert problem.kv_lens.tolist() == [125, 126, 127, 128] * 3
    assert (problem.page is not None) == (arrangement == "page_major")
    assert problem.pool.stride(0) == 576 * (3 if arrangement == "token_major" else 1)


# Peers do not run here, but their arguments have to match their signatures.


def parameters(package, file, name):
    """Parameter names of a function in the source of an installed package; the last definition counts."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text())
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name]
    arguments = found[-1].args
    positional = [a.arg for a in arguments.args if a.arg != "self"]
    needed = positional[: len(positional) - len(arguments.defaults)]
    return positional, [a.arg for a in arguments.kwonlyargs], needed


FLASHMLA = "flash_mla_with_kvcache"


@pytest.mark.parametrize(
    ("called", "package", "file", "name"),
    [
        ("self.decode", "sglang", "kernels/ops/attention/decode_attention.py", "decode_attention_fwd"),
        ("self.choose_splits[1,]", "sglang", "kernels/ops/attention/metadata.py", "get_num_kv_splits_triton"),
        ("self.wrapper", "flashinfer", "mla/_batch_mla/_wrapper.py", "__init__"),
        ("wrapper.plan", "flashinfer", "mla/_batch_mla/_wrapper.py", "plan"),
        ("wrapper.run", "flashinfer", "mla/_batch_mla/_wrapper.py", "run"),
        (f"self.module.{FLASHMLA}", "flash_mla", "flash_mla_interface.py", FLASHMLA),
    ],
)
def test_peers_are_called_with_what_they_take(called, package, file, name):
    positional, keywords, needed = parameters(package, file, name)
    tree = ast.parse(Path(inspect.getfile(Kvpool)).read_text())
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    calls = [n for n in calls if ast.unparse(n.func).replace("(1,)", "1,").replace(" ", "") == called]
    assert calls
    for call in calls:
        given = [keyword.arg for keyword in call.keywords]
        by_place = positional[: len(call.args)]
        assert len(by_place) == len(call.args)
        assert not set(given) & set(by_place)
        assert set(given) <= {*positional, *keywords}
        assert set(needed) <= {*by_place, *given}
