"""What `python -m scripts.bench attention` measures, the limits it states, and which targets it calls met."""

import json
from dataclasses import replace

import pytest
from bench_attention_modules import fmt, modules

from sgl_kvpool.layout import MLAKVCacheLayout

# Cases


def test_the_default_run_covers_the_grid_and_begins_with_the_target():
    found = modules.cases.items(modules.cases.GPU_GRID)
    assert len(set(found)) == len(found)
    first = found[0].workload
    assert (first.kind, first.heads, first.batch, first.context) == ("dense", 16, 64, 32768)
    runs_first = [(i.runner, i.layout) for i in found if i.workload == first]
    assert {"sglang_triton", "flashinfer", "flashmla"} <= {runner for runner, _ in runs_first}
    assert {layout.value for layout in MLAKVCacheLayout} == {
        x for runner, x in runs_first if runner == "kvpool"
    }
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


def test_filters():
    items = modules.cases.items
    grid = modules.cases.GPU_GRID
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


@pytest.fixture(params=["triton", "gluon"])
def counted(request, monkeypatch):
    """Counts by layout and query heads of a tile, where `decode_kernel_of` chooses this kernel's table."""
    monkeypatch.setattr(modules.limits, "decode_kernel_of", lambda fmt: request.param)
    costs = json.loads(modules.limits.TILE_COSTS.read_text())
    return {
        (found["layout"], found["heads"]): found
        for kernel in ("triton", "gluon", "gluon_wide")[: 1 if request.param == "triton" else 3]
        for found in costs
        if found["kernel"] == kernel
    }


def test_limits_by_hand(counted):
    target = modules.cases.GPU_GRID.workloads()[0]
    work = modules.limits.work_of(target, fmt("fp4"))
    assert work.row_bytes == 64 * 32768 * 416
    assert work.other_bytes == 64 * 32768 * 4 + 1024 * (2 * 576 + 2 * 512 + 4)
    assert work.flop == 2 * 1024 * 32768 * 1088
    # 64 lists of 32768 rows; each row occupies the busiest unit of a multiprocessor for `clk` clocks
    clk = counted["fp4", 16]["shared_memory_clk_per_row"]
    assert work.sm_clk == 64 * 32768 * clk
    peaks = modules.limits.Peaks(4.3e12, 790e12, 132, 1.98e9)
    limits = modules.limits.limits_us(work, peaks, ours=True)
    assert limits["bytes"] == pytest.approx(205.36, abs=0.01)
    assert limits["matrix"] == pytest.approx(92.42, abs=0.01)
    assert limits["multiprocessors"] == pytest.approx(8.0237 * clk, rel=1e-3)

    # Other kernels, and a CPU
    assert modules.limits.limits_us(work, peaks, ours=False).keys() == {"bytes", "matrix"}
    cpu = modules.limits.Peaks(1e9, 1e9, 0, 0.0)
    assert modules.limits.limits_us(work, cpu, ours=True).keys() == {"bytes", "matrix"}


def test_a_layout_whose_tiles_were_not_counted_has_no_third_limit(monkeypatch, tmp_path, capsys):
    costs = json.loads(modules.limits.TILE_COSTS.read_text())
    less = tmp_path / modules.limits.TILE_COSTS.name
    less.write_text(json.dumps([found for found in costs if found["layout"] != "fp4"]))
    monkeypatch.setattr(modules.limits, "TILE_COSTS", less)
    modules.limits._clk_of_one_tile.cache_clear()
    try:
        work = modules.limits.work_of(modules.cases.GPU_GRID.workloads()[0], fmt("fp4"))
        assert work.sm_clk is None
        peaks = modules.limits.Peaks(4.3e12, 790e12, 132, 1.98e9)
        assert modules.limits.limits_us(work, peaks, ours=True).keys() == {"bytes", "matrix"}
        argv = ["--device", "cpu", "--quick", "--heads", "2", "--peers", "none", "--layouts"]
        assert modules.program.main([*argv, "fp4,bf16"]) == 0
        assert "tile_costs.json has no counts for fp4, so" in capsys.readouterr().out
        assert modules.program.main([*argv, "bf16"]) == 0
        assert "tile_costs" not in capsys.readouterr().out
    finally:
        modules.limits._clk_of_one_tile.cache_clear()


@pytest.mark.parametrize(
    ("heads", "queries", "query_heads"), [(8, 1, 8), (5, 3, 16), (128, 1, None), (32, 4, None)]
)
def test_rows_are_decoded_once_per_tile(counted, heads, queries, query_heads):
    query_heads = query_heads or (64 if counted["fp4", 128]["kernel"] == "gluon_wide" else 32)
    tiles = -(-heads * queries // query_heads)
    target = modules.cases.GPU_GRID.workloads()[0]
    several = replace(target, heads=heads, queries_per_list=queries)
    for layout in modules.report.NARROW:
        work = modules.limits.work_of(several, fmt(layout))
        clk = counted[layout, query_heads]["shared_memory_clk_per_row"]
        assert work.sm_clk == pytest.approx(64 * 32768 * tiles * clk)


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
    # The narrowest rows are clearly faster than the targets require.
    narrowest = "kvpool", "fp4_fp8_rope"
    rows += [measured(*narrowest, 350), measured(*narrowest, 1250, heads=128)]
    rows += [measured(*narrowest, 18, **whole), measured(*narrowest, 45, **sparse)]
    return rows


@pytest.fixture
def states():
    def of(rows, on_gpu=True):
        modules.report.add_ratios(rows)
        found = modules.report.targets(rows, on_gpu=on_gpu, target=(16, 64, 32768), many_heads=128)
        return [verdict["state"] for verdict in found]

    return of


PASSED, MISSED, OPEN = "passed", "missed", "not measured"


def test_targets_met(states):
    assert states(good()) == [PASSED] * 11


def test_targets_without_a_gpu_or_without_rows(states):
    assert states([]) == [OPEN] * 11
    assert states(good(), on_gpu=False) == [OPEN] * 11


@pytest.mark.parametrize(
    ("index", "us", "expected"),
    [
        (3, 550, {1: MISSED, 2: MISSED}),  # FlashMLA faster: 1.375x and 1.1x
        (3, 590, {2: MISSED}),
        (4, 500, {1: MISSED, 2: MISSED}),  # any peer may be the best
        (6, 1301, {3: MISSED}),
        (7, 1301, {4: MISSED}),
        (8, 1301, {5: MISSED}),
        (10, 199, {7: MISSED}),
        (12, 49, {9: MISSED}),
        (13, 450, {0: MISSED}),
        (14, 1301, {6: MISSED}),
        (15, 21, {8: MISSED}),
        (16, 51, {10: MISSED}),
    ],
)
def test_a_target_missed(states, index, us, expected):
    rows = good()
    rows[index]["graph_us"] = us
    assert states(rows) == [expected.get(i, PASSED) for i in range(11)]


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (2, {1: OPEN}),
        (3, {0: OPEN, 1: OPEN, 2: OPEN}),  # beats the others, but the peer made for Hopper did not run
        (5, {3: OPEN, 4: OPEN, 5: OPEN, 6: OPEN}),
        (8, {5: OPEN}),
        (10, {7: OPEN, 8: OPEN}),
        (12, {9: OPEN, 10: OPEN}),
        (13, {0: OPEN}),
    ],
)
def test_a_target_not_measured(states, index, expected):
    rows = good()
    rows[index] |= {"status": "skipped", "reason": "ImportError: no such module"}
    assert states(rows) == [expected.get(i, PASSED) for i in range(11)]


def test_targets_of_incomplete_runs(states):
    # A target is missed if one peer is too fast for it, even if other peers did not run.
    rows = good()
    rows[3] |= {"status": "failed", "reason": "no kernel"}
    rows[4]["graph_us"] = 300
    assert states(rows)[:3] == [MISSED] * 3
    # The worst of all batches counts, and the target's own batch has to be measured.
    rows = [
        *good(),
        *(measured("kvpool", name, us, heads=128, batch=1) for name, us in (("bf16", 10), ("fp4", 14))),
    ]
    assert states(rows)[5] == MISSED
    rows = [row for row in good() if row["heads"] != 128]
    rows += [measured("kvpool", name, 10, heads=128, batch=1) for name in ("bf16", "fp4")]
    assert states(rows)[5] == OPEN
    # A wrong result of ours adds a missed target; a wrong result of a peer removes that peer.
    rows = good()
    rows[0] |= {"status": "wrong", "reason": "query 0"}
    assert states(rows)[-1] == MISSED
    assert states(rows, on_gpu=False) == [OPEN] * 11 + [MISSED]
    rows = good()
    rows[4] |= {"status": "wrong", "reason": "query 0"}
    assert states(rows) == [PASSED] * 11


def test_ratios():
    rows = [*good(), measured("kvpool", "fp4", 500, arrangement="token_major")]
    rows[2]["graph_us"] = None  # its other time counts: 800
    modules.report.add_ratios(rows)
    assert rows[2]["times_as_fast_as"] == {"kvpool bf16": 0.8, "flashmla": 0.775, "sglang_triton": 1.125}
    assert rows[-1]["time_to_layer_major"] == 0.625
    assert "times_as_fast_as" not in rows[3]


def test_the_table_of_a_gpu_run(capsys):
    more = {"rows_per_s": 1e9, "row_gb_per_s": 500.0, "of_copy_peak": 0.5, "tflop_per_s": 9.0}
    rows = [
        {**row, **more, "group": row["kind"], "tightest_limit": "bytes", "context_tokens": context}
        for row in good()
        for context in (8192, 32768)
    ]
    modules.report.add_ratios(rows)
    for row in (None, *rows, {**rows[0], "status": "not run", "reason": "no time"}):
        modules.report.print_table(row)
    modules.report.print_ratios(rows)
    printed = capsys.readouterr().out
    assert "1.55x flashmla" in printed
    assert "not run: no time" in printed


@pytest.mark.parametrize(("told", "mhz"), [({"clocks.max.sm": "1755"}, 1755), ({}, 1980)])
def test_clocks_that_are_not_known_are_an_h100s(told, mhz):
    assert modules.device._highest_mhz(told) == mhz
    assert modules.device._highest_mhz({**told, "clocks.max.sm": "[N/A]"}) == 1980
