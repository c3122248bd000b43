"""scripts/bench_attention.py without a GPU: its numbers mean nothing here, its way does."""

import ast
import importlib
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sgl_kvpool import MLAKVCacheLayout

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NAMES = ("cases", "device", "inputs", "limits", "measure", "peers", "report")


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(SCRIPTS))
    modules = {name: importlib.import_module(f"attention_{name}") for name in NAMES}
    yield SimpleNamespace(**modules, main=importlib.import_module("bench_attention").main)
    sys.path.remove(str(SCRIPTS))


def fmt(layout):
    return MLAKVCacheLayout(layout).row_format(512, 64)


# Cases


def test_the_default_run_covers_the_grid_and_begins_with_the_target(scripts):
    found = scripts.cases.items(scripts.cases.GPU_GRID)
    assert len(set(found)) == len(found)
    first = found[0].workload
    assert (first.kind, first.heads, first.batch, first.context) == ("dense", 16, 64, 32768)
    runs_first = [(i.runner, i.layout) for i in found if i.workload == first]
    assert {"sglang_triton", "flashinfer", "flashmla"} <= {runner for runner, _ in runs_first}
    assert {"bf16", "fp8", "fp8_block_scale", "fp4"} == {x for runner, x in runs_first if runner == "kvpool"}
    dense = {(w.heads, w.batch, w.context) for w in (i.workload for i in found) if w.group == "dense"}
    assert dense == {
        (h, b, c * 1024) for h in (8, 16, 64, 128) for b in (1, 16, 64, 128) for c in (1, 8, 32, 128)
    }
    sparse = {(w.heads, w.batch) for w in (i.workload for i in found) if w.group == "sparse"}
    assert sparse == {(h, b) for h in (8, 16, 64, 128) for b in (1, 16, 64, 128)}
    assert {i.workload.rows_per_list for i in found if i.workload.kind == "sparse"} == {2048}
    arranged = {
        (i.workload.arrangement, i.workload.layers) for i in found if i.workload.group == "arrangement"
    }
    assert arranged == {("token_major", 61), ("page_major", 61)}
    assert {i.workload.queries_per_list for i in found if i.workload.group == "mtp"} == {4}
    whole = next(i.workload for i in found if i.workload.kind == "whole_pool")
    assert (whole.pool_tokens, whole.rows) == (1 << 20, 1 << 16)
    # Runners of a workload that read the same pool follow each other: it is made once.
    for a, b, c in zip(found, found[1:], found[2:], strict=False):
        if a.workload == c.workload and a.layout == c.layout:
            assert b.layout == a.layout


def test_filters(scripts):
    items = scripts.cases.items
    grid = scripts.cases.GPU_GRID
    some = items(grid, layouts=["fp4"], heads=[8], batches=[1, 16], contexts=[1024], peers=[])
    assert {(i.runner, i.layout) for i in some} == {("kvpool", "fp4")}
    assert {(i.workload.heads, i.workload.batch, i.workload.context) for i in some} == {
        (8, 1, 1024),
        (8, 16, 1024),
    }
    assert {i.workload.group for i in items(grid, only=["sparse", "mtp"])} == {"sparse", "mtp"}
    # Peers keep the layout that they read, whatever is asked of ours.
    sparse = items(grid, only=["sparse"], layouts=["fp4"])
    assert ("flashmla_sparse_fp8", "fp8_block_scale") in {(i.runner, i.layout) for i in sparse}
    quick = items(grid, quick=True)
    assert {i.workload.group for i in quick} == {"dense", "sparse", "whole_pool"}
    assert len({i.workload for i in quick}) == 5


# Limits


def test_limits_by_hand(scripts):
    target = scripts.cases.GPU_GRID.workloads()[0]
    work = scripts.limits.work_of(target, fmt("fp4"))
    assert work.row_bytes == 64 * 32768 * 416
    assert work.other_bytes == 64 * 32768 * 4 + 1024 * (2 * 576 + 2 * 512 + 4)
    assert work.flop == 2 * 1024 * 32768 * 1088
    assert work.decode_operations == 64 * 32768 * 512 * 6
    assert work.shared_bytes == 64 * 32768 * 3328
    peaks = scripts.limits.Peaks(4.3e12, 790e12, 132, 1.98e9)
    limits = scripts.limits.limits_us(work, peaks)
    assert limits["bytes"] == pytest.approx(205.36, abs=0.01)
    assert limits["matrix"] == pytest.approx(92.42, abs=0.01)
    # 6 979 321 856 bytes through shared memory at 33.45 TB/s; decoding alone would take 192.6.
    assert limits["decode_and_shared_memory"] == pytest.approx(208.62, abs=0.01)

    # fp8's rope is encoded too; 128 heads are two tiles, and so are 32 heads of four queries.
    rows = 64 * 32768
    many = scripts.limits.work_of(replace(target, heads=128), fmt("fp8"))
    assert (many.decode_operations, many.shared_bytes) == (2 * rows * 576, 2 * rows * 3328)
    few = scripts.limits.work_of(replace(target, heads=32, queries_per_list=4), fmt("bf16"))
    assert (few.decode_operations, few.shared_bytes) == (0, 2 * rows * 3328)
    assert few.flop == 2 * 64 * 4 * 32 * 32768 * 1088
    assert "decode_and_shared_memory" not in scripts.limits.limits_us(
        work, scripts.limits.Peaks(1e9, 1e9, 0, 0.0)
    )


# Targets


def measured(runner, layout, us, **but):
    return {
        "runner": runner, "layout": layout, "kind": "dense", "heads": 16, "batch": 64,
        "context_tokens": 32768, "rows_per_list": 32768, "queries_per_list": 1,
        "arrangement": "layer_major", "status": "measured",
        "us": 2 * us, "graph_us": us, "of_tightest_limit": 0.5, **but,
    }  # fmt: skip


def good():
    """Rows that pass every target."""
    rows = [
        measured("kvpool", name, us) for name, us in (("bf16", 640), ("fp8_block_scale", 500), ("fp4", 400))
    ]
    rows += [measured("flashmla", "bf16", 620), measured("sglang_triton", "bf16", 900)]
    rows += [
        measured("kvpool", name, us, heads=128)
        for name, us in (("bf16", 1000), ("fp8", 1100), ("fp8_block_scale", 1200), ("fp4", 1290))
    ]
    whole = {"kind": "whole_pool", "batch": 16, "context_tokens": 4096, "rows_per_list": 4096}
    rows += [measured("kvpool", "fp4", 20, **whole), measured("sglang_fp4", "bf16", 201, **whole)]
    sparse = {"kind": "sparse", "rows_per_list": 2048}
    rows += [
        measured("kvpool", "fp4", 50, **sparse),
        measured("flashmla_sparse_fp8", "fp8_block_scale", 50, **sparse),
    ]
    return rows


@pytest.fixture
def states(scripts):
    def of(rows, on_gpu=True):
        scripts.report.add_ratios(rows)
        found = scripts.report.targets(rows, on_gpu=on_gpu, target=(16, 64, 32768), many_heads=128)
        return [verdict["state"] for verdict in found]

    return of


PASSED, MISSED, OPEN = "passed", "missed", "not measured"


def test_targets_met(states):
    assert states(good()) == [PASSED] * 7


def test_targets_without_a_gpu_or_without_rows(states):
    assert states([]) == [OPEN] * 7
    assert states(good(), on_gpu=False) == [OPEN] * 7


@pytest.mark.parametrize(
    ("index", "us", "expected"),
    [
        (3, 550, {0: MISSED, 1: MISSED}),  # FlashMLA faster: 1.375x and 1.1x
        (3, 590, {1: MISSED}),
        (4, 500, {0: MISSED, 1: MISSED}),  # any peer may be the best
        (6, 1301, {2: MISSED}),
        (7, 1301, {3: MISSED}),
        (8, 1301, {4: MISSED}),
        (10, 199, {5: MISSED}),
        (12, 49, {6: MISSED}),
    ],
)
def test_a_target_missed(states, index, us, expected):
    rows = good()
    rows[index]["graph_us"] = us
    assert states(rows) == [expected.get(i, PASSED) for i in range(7)]


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (2, {0: OPEN}),
        (3, {0: OPEN, 1: OPEN}),  # beats the others, but the peer made for Hopper did not run
        (5, {2: OPEN, 3: OPEN, 4: OPEN}),
        (8, {4: OPEN}),
        (10, {5: OPEN}),
        (12, {6: OPEN}),
    ],
)
def test_a_target_not_measured(states, index, expected):
    rows = good()
    rows[index] |= {"status": "skipped", "reason": "ImportError: no such module"}
    assert states(rows) == [expected.get(i, PASSED) for i in range(7)]


def test_targets_of_incomplete_runs(states):
    # Worse than one peer is missed, whoever else did not run.
    rows = good()
    rows[3] |= {"status": "failed", "reason": "no kernel"}
    rows[4]["graph_us"] = 300
    assert states(rows)[:2] == [MISSED, MISSED]
    # The worst of all batches counts, and the one of the target has to be there.
    rows = [
        *good(),
        *(measured("kvpool", name, us, heads=128, batch=1) for name, us in (("bf16", 10), ("fp4", 14))),
    ]
    assert states(rows)[4] == MISSED
    rows = [row for row in good() if row["heads"] != 128]
    rows += [measured("kvpool", name, 10, heads=128, batch=1) for name in ("bf16", "fp4")]
    assert states(rows)[4] == OPEN
    # A wrong result of ours is a target missed; one of a peer is a peer less.
    rows = good()
    rows[0] |= {"status": "wrong", "reason": "query 0"}
    assert states(rows)[-1] == MISSED
    rows = good()
    rows[4] |= {"status": "wrong", "reason": "query 0"}
    assert states(rows) == [PASSED] * 7


def test_ratios(scripts):
    rows = [*good(), measured("kvpool", "fp4", 500, arrangement="token_major")]
    rows[2]["graph_us"] = None  # its other time counts: 800
    scripts.report.add_ratios(rows)
    assert rows[2]["times_as_fast_as"] == {"kvpool bf16": 0.8, "flashmla": 0.775, "sglang_triton": 1.125}
    assert rows[-1]["time_to_layer_major"] == 0.625
    assert "times_as_fast_as" not in rows[3]


# Measuring


class Fake:
    """A runner whose result a test chooses."""

    def __init__(self, scripts, result, reason=None):
        self.scripts, self.result, self.reason = scripts, result, reason

    def load(self, device):
        if self.reason:
            raise ImportError(self.reason)

    def refusal(self, workload):
        return "no sparse lists" if workload.kind == "sparse" else None

    def prepare(self, problem):
        ours = self.scripts.peers.Kvpool()
        ours.load(self.scripts.device.CpuDevice())
        prepared = ours.prepare(problem)
        calls = [lambda call=call: self.result(call) for call in prepared.calls]
        return replace(prepared, calls=calls)


@pytest.fixture
def bench(scripts):
    """`bench(runner, device)` measures the smallest dense workload."""

    def make(result=lambda call: call(), device=None, **options):
        device = device or scripts.device.CpuDevice(rounds=1)
        peaks = scripts.limits.Peaks(1e9, 1e9, 0, 0.0)
        return scripts.measure.Bench(device, peaks, {"kvpool": Fake(scripts, result, **options)})

    return make


@pytest.fixture
def item(scripts):
    return scripts.cases.Item(scripts.cases.Workload("dense", 2, 1, 64, 64), "kvpool", "fp4")


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


def test_what_a_call_does_not_write_is_not_a_number(bench, item):
    def half(call):
        out = call()
        out[:, 1] = float("nan")  # as the poison that was there
        return out

    assert bench(half).measure(item)["status"] == "wrong"


def test_runners_that_cannot(bench, item):
    def fails(call):
        raise AssertionError("unsupported head dim\nand a stack")

    row = bench(fails).measure(item)
    assert (row["status"], row["reason"]) == ("failed", "AssertionError: unsupported head dim")
    missing = bench(reason="No module named 'x'")
    row = missing.measure(item)
    assert (row["status"], row["reason"]) == ("skipped", "ImportError: No module named 'x'")
    sparse = replace(item, workload=replace(item.workload, kind="sparse", rows_per_list=10))
    assert bench().measure(sparse)["reason"] == "no sparse lists"


def test_a_pool_that_does_not_fit(bench, item, scripts):
    class Small(scripts.device.CpuDevice):
        def free_bytes(self):
            return 1000

    row = bench(device=Small()).measure(item)
    assert row["status"] == "skipped"
    assert row["reason"].startswith("pool of")


def test_times_in_a_graph_are_checked_too(bench, item, scripts):
    class Graphs(scripts.device.CpuDevice):
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


def test_a_device_that_fails_ends_the_run(bench, item, scripts):
    class Broken(scripts.device.CpuDevice):
        def synchronize(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def fails(call):
        raise RuntimeError("CUDA error")

    broken = bench(fails, device=Broken())
    rows = scripts.measure.run(broken, [item, item], 1.0)
    assert [row["status"] for row in rows] == ["failed", "not run"]
    assert rows[1]["reason"].startswith("the device failed in kvpool, dense")


def test_the_time_is_bounded_and_what_is_left_is_named(scripts, capsys):
    chosen = scripts.cases.items(scripts.cases.CPU_GRID, only=["dense"], peers=[])
    now = [0.0]

    def measure(item):
        now[0] += 25.0
        return {**item.facts, "status": "skipped", "reason": "a test"}

    seen = []
    rows = scripts.measure.run(
        SimpleNamespace(measure=measure), chosen, 2.0, clock=lambda: now[0],
        after_workload=lambda rows: seen.append(len(rows)),
    )  # fmt: skip
    # Begun at 0, 25, 50, 75 and 100 seconds.
    assert [row["status"] for row in rows] == ["skipped"] * 5 + ["not run"] * (len(chosen) - 5)
    assert rows[-1]["reason"] == "the 2 minutes were spent"
    assert seen == [4]
    assert f"{len(chosen) - 5} of {len(chosen)} measurements not run" in capsys.readouterr().out


@pytest.mark.parametrize("arrangement", ["layer_major", "token_major", "page_major"])
def test_lists_of_the_inputs(scripts, arrangement):
    workload = scripts.cases.Workload("dense", 2, 3, 128, 128, 4, arrangement, layers=3)
    problem = scripts.inputs.make_problem(workload, fmt("fp8"), scripts.device.CpuDevice())
    slots = problem.row_ids.view(-1, 64)
    assert (slots[:, 0] % 64 == 0).all()
    assert (slots.diff(dim=1) == 1).all()  # tokens of a page in order
    pages = slots[:, 0] // 64
    assert pages.tolist() == problem.page_tables.flatten().tolist()
    assert pages.min() == 1  # page 0 is reserved
    assert len(pages.unique()) == len(pages) == 2 * 3 * 2
    assert pages.tolist() != sorted(pages.tolist())
    assert problem.row_counts.tolist() == [125, 126, 127, 128] * 3
    assert (problem.page is not None) == (arrangement == "page_major")
    assert problem.pool.stride(0) == 576 * (3 if arrangement == "token_major" else 1)


def test_top_k_lists(scripts):
    workload = scripts.cases.Workload("sparse", 2, 3, 128, 40)
    problem = scripts.inputs.make_problem(workload, fmt("bf16"), scripts.device.CpuDevice())
    for row_ids in problem.row_ids:
        for ids, pages in zip(row_ids, problem.page_tables[0], strict=True):
            assert len(ids.unique()) == 40
            assert set((ids // 64).tolist()) <= set(pages.tolist())
    assert not torch.equal(*problem.row_ids)


# The program


def test_the_whole_program_on_a_cpu(scripts, tmp_path, capsys):
    json_path, plot = tmp_path / "new" / "found.json", tmp_path / "found.png"
    argv = ["--device", "cpu", "--check", "--heads", "2", "--json", str(json_path), "--plot", str(plot)]
    assert scripts.main(argv) == 0
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
    assert {row["layout"] for row in ours} == {"bf16", "fp8", "fp8_block_scale", "fp4"}
    peers = [row for row in report["results"] if row["runner"] != "kvpool"]
    assert {row["runner"] for row in peers} == set(scripts.cases.PEERS) == set(report["peers"])
    assert all(row["status"] == "skipped" and row["reason"] for row in peers)
    assert plot.stat().st_size == 0 or plot.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert printed.startswith("dry run on a CPU")
    assert "times as fast" not in printed


@pytest.mark.parametrize(
    "argv",
    [["--heads", "0"], ["--only", "dens"], ["--peers", "vllm"], ["--contexts", "1m"], ["--heads", "3"]],
)
def test_arguments_that_mean_nothing(scripts, argv):
    with pytest.raises(SystemExit) as stopped:
        scripts.main(["--device", "cpu", *argv])
    assert stopped.value.code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_default_says_so(scripts, capsys):
    with pytest.raises(SystemExit):
        scripts.main([])
    assert "--device cpu" in capsys.readouterr().err


def test_the_table_and_the_plot_of_a_gpu_run(scripts, tmp_path, capsys):
    more = {"rows_per_s": 1e9, "row_gb_per_s": 500.0, "of_copy_peak": 0.5, "tflop_per_s": 9.0}
    rows = [
        {**row, **more, "group": row["kind"], "tightest_limit": "bytes", "context_tokens": context}
        for row in good()
        for context in (8192, 32768)
    ]
    scripts.report.add_ratios(rows)
    for row in (None, *rows, {**rows[0], "status": "not run", "reason": "no time"}):
        scripts.report.print_table(row)
    scripts.report.print_ratios(rows)
    printed = capsys.readouterr().out
    assert "1.55x flashmla" in printed
    assert "not run: no time" in printed
    pytest.importorskip("matplotlib")
    assert scripts.report.draw(rows, tmp_path / "found.png", "a test")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bf16", "fp8", "fp8_block_scale", "fp4"])
def test_a_gpu(scripts, layout):
    device = scripts.device.CudaDevice(seconds_per_timing=0.01)
    peaks = device.peaks()
    assert 1e11 < peaks.copy_bytes_per_s < 2e13
    assert 1e13 < peaks.matmul_flop_per_s < 1e16
    bench = scripts.measure.Bench(device, peaks, scripts.peers.runners())
    row = bench.measure(
        scripts.cases.Item(scripts.cases.Workload("dense", 16, 4, 1024, 1024), "kvpool", layout)
    )
    assert row["status"] == "measured", row
    assert "no_graph" not in row
    assert 0 < row["graph_us"] < 10 * row["us"]
    l2 = device.properties.L2_cache_size
    assert row["rotating_sets"] * 4096 * row["row_bytes"] > 4 * l2


# Peers: nothing of theirs runs here, but what they are given has to be what they take.


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
    tree = ast.parse((SCRIPTS / "attention_peers.py").read_text())
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
