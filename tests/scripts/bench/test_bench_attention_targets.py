"""What `python -m scripts.bench attention` measures, and which targets it calls met."""

import pytest

from scripts.bench.attention.benchmark import add_ratios, targets
from scripts.bench.attention.cases import GPU_GRID, Workload, cases
from sgl_kvpool.layout import MLAKVCacheLayout


def test_the_run_begins_with_the_target_and_its_peers():
    found = [(case["runner"], case["layout"], Workload.of(case)) for case in cases(GPU_GRID)]
    assert len(set(found)) == len(found)
    first = found[0][2]
    assert (first.kind, first.heads, first.batch, first.context) == ("dense", 16, 64, 32768)
    runs_first = [(runner, layout) for runner, layout, work in found if work == first]
    assert {"sglang_triton", "flashinfer", "flashmla"} <= {runner for runner, _ in runs_first}
    assert {layout.value for layout in MLAKVCacheLayout} == {x for name, x in runs_first if name == "kvpool"}
    quick = [Workload.of(case) for case in cases(GPU_GRID, quick=True)]
    assert {work.kind for work in quick} == {"dense", "sparse", "whole_pool"}


def measured(runner, layout, us, **but):
    sizes = {"kind": "dense", "heads": 16, "batch": 64, "context": 32768, "rows_per_list": 32768, **but}
    job = {"runner": runner, "layout": layout, **sizes}
    return {"job": job, "status": "measured", "us": 2 * us, "graph_us": us}


WHOLE = {"kind": "whole_pool", "batch": 16, "context": 4096, "rows_per_list": 4096}
SPARSE = {"kind": "sparse", "rows_per_list": 2048}


def good():
    """Rows that pass every target of `fp4`: 3 to 6 of all."""
    return [
        measured("kvpool", "bf16", 640),
        measured("kvpool", "fp4", 400),
        measured("flashmla", "bf16", 620),
        measured("sglang_triton", "bf16", 900),
        measured("kvpool", "bf16", 1000, heads=128),
        measured("kvpool", "fp4", 1290, heads=128),
        measured("kvpool", "fp4", 20, **WHOLE),
        measured("sglang_fp4", "bf16", 201, **WHOLE),
        measured("kvpool", "fp4", 50, **SPARSE),
        measured("flashmla_sparse_fp8", "fp8_block_scale", 50, **SPARSE),
    ]


def states(rows):
    """States of the four targets of `fp4`: best peer, many heads, large pool, sparse."""
    add_ratios(rows)
    return [one["state"] for one in targets(rows, GPU_GRID) if one["target"].startswith("fp4,")]


PASSED, MISSED, OPEN = "passed", "missed", "not measured"


def test_targets_met_and_without_rows():
    assert states(good()) == [PASSED] * 4
    assert states([]) == [OPEN] * 4
    assert len(targets([], GPU_GRID)) == 11  # of all layouts


@pytest.mark.parametrize(
    ("index", "change", "expected"),
    [
        (2, {"graph_us": 550}, {0: MISSED}),  # FlashMLA faster: 1.375x
        (3, {"graph_us": 500}, {0: MISSED}),  # any peer may be the best
        (5, {"graph_us": 1301}, {1: MISSED}),
        (7, {"graph_us": 199}, {2: MISSED}),
        (9, {"graph_us": 49}, {3: MISSED}),
        (1, {"status": "skipped"}, {0: OPEN}),
        (2, {"status": "skipped"}, {0: OPEN}),  # beats the others, but the peer made for Hopper did not run
        (4, {"status": "skipped"}, {1: OPEN}),
        (3, {"status": "wrong"}, {}),  # a wrong result of a peer removes that peer
    ],
)
def test_a_target_missed_or_not_measured(index, change, expected):
    rows = good()
    rows[index] |= change
    assert states(rows) == [expected.get(i, PASSED) for i in range(4)]


def test_the_worst_of_all_batches_counts_and_the_targets_own_has_to_be_measured():
    one = [measured("kvpool", name, us, heads=128, batch=1) for name, us in (("bf16", 10), ("fp4", 14))]
    assert states([*good(), *one])[1] == MISSED
    one[1]["graph_us"] = 10
    assert states([row for row in good() if row["job"]["heads"] != 128] + one)[1] == OPEN


def test_ratios():
    rows = [*good(), measured("kvpool", "fp4", 500, arrangement="token_major", layers=61)]
    rows[1]["graph_us"] = None  # its other time counts: 800
    add_ratios(rows)
    assert rows[1]["times_as_fast_as"] == {"kvpool bf16": 0.8, "flashmla": 0.775, "sglang_triton": 1.125}
    assert rows[-1]["time_to_layer_major"] == 0.625
    assert "times_as_fast_as" not in rows[2]
