"""`bench attention` without a GPU: its steps and output; its times mean nothing here."""

import ast
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_attention_modules import fmt, modules

from sgl_kvpool.layout import MLAKVCacheLayout

# Measuring


class Fake:
    """A runner whose result a test chooses."""

    def __init__(self, result, reason=None):
        self.result, self.reason = result, reason

    def load(self, device):
        if self.reason:
            raise ImportError(self.reason)

    def refusal(self, workload):
        return "no sparse lists" if workload.kind == "sparse" else None

    def prepare(self, problem):
        ours = modules.peers.Kvpool()
        ours.load(modules.device.CpuDevice())
        prepared = ours.prepare(problem)
        calls = [lambda call=call: self.result(call) for call in prepared.calls]
        return replace(prepared, calls=calls)


@pytest.fixture
def bench():
    """`bench(runner, device)` measures the smallest dense workload."""

    def make(result=lambda call: call(), device=None, **options):
        device = device or modules.device.CpuDevice(rounds=1)
        peaks = modules.limits.Peaks(1e9, 1e9, 0, 0.0)
        return modules.measure.Bench(device, peaks, {"kvpool": Fake(result, **options)})

    return make


@pytest.fixture
def item():
    return modules.cases.Item(modules.cases.Workload("dense", 2, 1, 64, 64), "kvpool", "fp4")


def test_a_measured_row(bench, item):
    row = bench().measure(item)
    assert (row["status"], row["rotating_sets"], row["graph_us"]) == ("measured", 2, None)
    assert row["relative_error"] < 0.01
    seconds = row["us"] * 1e-6
    assert row["rows_per_s"] == pytest.approx(64 / seconds, rel=1e-2)
    assert row["row_gb_per_s"] == pytest.approx(64 * 416 / seconds / 1e9, abs=0.01)
    assert row["of_tightest_limit"] == pytest.approx(
        row["limits_us"][row["tightest_limit"]] / row["us"], rel=1e-2
    )


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_wrong_results_have_no_time(bench, item, value):
    row = bench(lambda call: call().fill_(value)).measure(item)
    assert row["status"] == "wrong"
    assert "relative error" in row["reason"]
    assert "us" not in row


def test_outputs_that_a_call_does_not_write_are_wrong(bench, item):
    def half(call):
        out = call()
        out[:, 1] = float("nan")  # like the poison that outputs are filled with
        return out

    assert bench(half).measure(item)["status"] == "wrong"


def test_runners_that_fail_or_are_skipped(bench, item):
    def fails(call):
        raise AssertionError("unsupported head dim\nand a stack")

    row = bench(fails).measure(item)
    assert (row["status"], row["reason"]) == ("failed", "AssertionError: unsupported head dim")
    missing = bench(reason="No module named 'x'")
    row = missing.measure(item)
    assert (row["status"], row["reason"]) == ("skipped", "ImportError: No module named 'x'")
    sparse = replace(item, workload=replace(item.workload, kind="sparse", rows_per_list=10))
    assert bench().measure(sparse)["reason"] == "no sparse lists"


def test_a_pool_that_does_not_fit(bench, item):
    class Small(modules.device.CpuDevice):
        def free_bytes(self):
            return 1000

    row = bench(device=Small()).measure(item)
    assert row["status"] == "skipped"
    assert row["reason"].startswith("pool of")


def test_times_in_a_graph_are_checked_too(bench, item):
    class Graphs(modules.device.CpuDevice):
        wrong = False

        def graph_us(self, calls):
            return 7.0, (lambda: calls[-1]() * 2) if self.wrong else calls[-1]

    device = Graphs()
    row = bench(device=device).measure(item)
    assert row["graph_us"] == 7.0
    assert row["rows_per_s"] == pytest.approx(64 / 7e-6, rel=1e-4)
    device.wrong = True
    row = bench(device=device).measure(item)
    assert (row["status"], row["reason"][:15]) == ("wrong", "in a CUDA graph")


def test_a_device_that_fails_ends_the_run(bench, item):
    class Broken(modules.device.CpuDevice):
        def synchronize(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def fails(call):
        raise RuntimeError("CUDA error")

    broken = bench(fails, device=Broken())
    rows = modules.measure.run(broken, [item, item], 1.0)
    assert [row["status"] for row in rows] == ["failed", "not run"]
    assert rows[1]["reason"].startswith("the device failed in kvpool, dense")


def test_the_time_is_bounded_and_what_is_left_is_named(capsys):
    chosen = modules.cases.items(modules.cases.CPU_GRID, only=["dense"], peers=[])
    now = [0.0]

    def measure(item):
        now[0] += 25.0
        return {**item.facts, "status": "skipped", "reason": "a test"}

    seen = []
    rows = modules.measure.run(
        SimpleNamespace(measure=measure), chosen, 2.0, clock=lambda: now[0],
        after_workload=lambda rows: seen.append(len(rows)),
    )  # fmt: skip
    # Begun at 0, 25, 50, 75 and 100 seconds.
    assert [row["status"] for row in rows] == ["skipped"] * 5 + ["not run"] * (len(chosen) - 5)
    assert rows[-1]["reason"] == "the 2 minutes were spent"
    assert seen == [5]  # the first workload, once per layout
    assert f"{len(chosen) - 5} of {len(chosen)} measurements not run" in capsys.readouterr().out


@pytest.mark.parametrize("arrangement", ["layer_major", "token_major", "page_major"])
def test_lists_of_the_inputs(arrangement):
    workload = modules.cases.Workload("dense", 2, 3, 128, 128, 4, arrangement, layers=3)
    problem = modules.inputs.make_problem(workload, fmt("fp8"), modules.device.CpuDevice())
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


def test_top_k_lists():
    workload = modules.cases.Workload("sparse", 2, 3, 128, 40)
    problem = modules.inputs.make_problem(workload, fmt("bf16"), modules.device.CpuDevice())
    for kv_indices in problem.kv_indices:
        for ids, pages in zip(kv_indices, problem.page_tables[0], strict=True):
            assert len(ids.unique()) == 40
            assert set((ids // 64).tolist()) <= set(pages.tolist())
    assert not torch.equal(*problem.kv_indices)


# The program


def test_the_whole_program_on_a_cpu(tmp_path, capsys):
    json_path = tmp_path / "new" / "found.json"
    argv = ["--device", "cpu", "--heads", "2", "--json", str(json_path)]
    assert modules.program.main(argv) == 0
    report = json.loads(json_path.read_text())
    assert report["schema"] == 1
    assert report["device_kind"] == "cpu"
    assert "say nothing about a GPU" in report["note"]
    assert report["argv"] == argv
    assert report["versions"]["torch"] == torch.__version__
    assert {target["state"] for target in report["targets"]} == {"not measured"}
    ours = [row for row in report["results"] if row["runner"] == "kvpool"]
    assert {row["status"] for row in ours} == {"measured"}
    assert {row["group"] for row in ours} == {"dense", "sparse", "whole_pool", "mtp", "arrangement"}
    assert {row["layout"] for row in ours} == {layout.value for layout in MLAKVCacheLayout}
    peers = [row for row in report["results"] if row["runner"] != "kvpool"]
    assert {row["runner"] for row in peers} == set(modules.cases.PEERS) == set(report["peers"])
    assert all(row["status"] == "skipped" and row["reason"] for row in peers)
    printed = capsys.readouterr().out
    assert printed.startswith("dry run on a CPU")
    assert "times as fast" not in printed


@pytest.mark.parametrize(
    "argv",
    [
        ["--heads", "0"],
        ["--only", "dens"],
        ["--peers", "vllm"],
        ["--contexts", "1m"],
        ["--heads", "3"],
        ["--check"],
    ],
)
def test_arguments_that_mean_nothing(argv):
    with pytest.raises(SystemExit) as stopped:
        modules.program.main(["--device", "cpu", *argv])
    assert stopped.value.code == 2


#: Arguments for a single workload.
ONE = ["--device", "cpu", "--only", "sparse", "--layouts", "fp4", "--heads", "2", "--peers", "none"]


def test_a_run_that_measured_nothing_fails(capsys):
    assert modules.program.main([*ONE, "--minutes", "0"]) == 1
    assert "no workload of our kernel was measured\n" in capsys.readouterr().out


def test_a_wrong_result_fails_the_run_without_check_too(monkeypatch, capsys):
    assert modules.program.main(ONE) == 0
    check = modules.measure.check

    def off_by_one(problem, out, *more):
        return check(problem, out + 1, *more)

    monkeypatch.setattr(modules.measure, "check", off_by_one)
    assert modules.program.main(ONE) == 1
    assert " wrong: " in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_default_says_so(capsys):
    with pytest.raises(SystemExit):
        modules.program.main([])
    assert "--device cpu" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [layout.value for layout in MLAKVCacheLayout])
def test_a_measurement_on_a_gpu(layout):
    device = modules.device.CudaDevice(seconds_per_timing=0.01)
    peaks = device.peaks()
    assert 1e11 < peaks.copy_bytes_per_s < 2e13
    assert 1e13 < peaks.matmul_flop_per_s < 1e16
    bench = modules.measure.Bench(device, peaks, modules.peers.runners())
    row = bench.measure(
        modules.cases.Item(modules.cases.Workload("dense", 16, 4, 1024, 1024), "kvpool", layout)
    )
    assert row["status"] == "measured", row
    assert "no_graph" not in row
    assert 0 < row["graph_us"] < 10 * row["us"]
    l2 = device.properties.L2_cache_size
    assert row["rotating_sets"] * 4096 * row["row_bytes"] > 4 * l2


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


@pytest.mark.parametrize(
    ("called", "package", "file", "name"),
    [
        ("self.decode", "sglang", "kernels/ops/attention/decode_attention.py", "decode_attention_fwd"),
        ("self.choose_splits[1,]", "sglang", "kernels/ops/attention/metadata.py", "get_num_kv_splits_triton"),
        ("self.wrapper", "flashinfer", "mla/_batch_mla/_wrapper.py", "__init__"),
        ("wrapper.plan", "flashinfer", "mla/_batch_mla/_wrapper.py", "plan"),
        ("wrapper.run", "flashinfer", "mla/_batch_mla/_wrapper.py", "run"),
        (
            "self.module.flash_mla_with_kvcache",
            "flash_mla",
            "flash_mla_interface.py",
            "flash_mla_with_kvcache",
        ),
    ],
)
def test_peers_are_called_with_what_they_take(called, package, file, name):
    positional, keywords, needed = parameters(package, file, name)
    tree = ast.parse(Path(modules.peers.__file__).read_text())
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
