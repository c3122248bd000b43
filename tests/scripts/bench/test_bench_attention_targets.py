"""What `python -m scripts.bench attention` measures, and which targets it calls met."""

import pytest

from scripts.bench.attention.cases import GPU_GRID, Workload, cases
from scripts.bench.attention.targets import add_ratios, targets
from sgl_kvpool.layout import MLAKVCacheLayout

# Cases


def test_the_default_run_covers_the_grid_and_begins_with_the_target():
    found = [(case["runner"], case["layout"], Workload.of(case)) for case in cases(GPU_GRID)]
    assert len(set(found)) == len(found)
    first = found[0][2]
    assert (first.kind, first.heads, first.batch, first.context) == ("dense", 16, 64, 32768)
    runs_first = [(runner, layout) for runner, layout, work in found if work == first]
    assert {"sglang_triton", "flashinfer", "flashmla"} <= {runner for runner, _ in runs_first}
    assert {layout.value for layout in MLAKVCacheLayout} == {x for name, x in runs_first if name == "kvpool"}
    works = {work for _, _, work in found}
    plain = [work for work in works if work.arrangement == "layer_major" and work.queries_per_list == 1]
    assert {(w.heads, w.batch, w.context) for w in plain if w.kind == "dense"} == {
        (h, b, c * 1024) for h in (8, 16, 64, 128) for b in (1, 16, 64, 128) for c in (1, 8, 32, 128)
    }
    sparse = [work for work in plain if work.kind == "sparse"]
    assert {(w.heads, w.batch) for w in sparse} == {
        (h, b) for h in (8, 16, 64, 128) for b in (1, 16, 64, 128)
    }
    assert {work.rows_per_list for work in sparse} == {2048}
    arranged = {(work.arrangement, work.layers) for work in works if work.layers > 1}
    assert arranged == {("token_major", 61), ("page_major", 61)}
    assert {work.queries_per_list for work in works} == {1, 4}
    (whole,) = (work for work in works if work.kind == "whole_pool")
    assert (whole.pool_tokens, whole.rows) == (1 << 20, 1 << 16)
    # Runners of a workload that read the same pool follow each other: it is made once.
    for a, b, c in zip(found, found[1:], found[2:], strict=False):
        if a[1:] == c[1:]:
            assert b[1] == a[1]
    quick = [Workload.of(case) for case in cases(GPU_GRID, quick=True)]
    assert {work.kind for work in quick} == {"dense", "sparse", "whole_pool"}
    assert len(set(quick)) == 5


# Targets


def measured(runner, layout, us, **but):
    sizes = {"kind": "dense", "heads": 16, "batch": 64, "context": 32768, "rows_per_list": 32768, **but}
    return {
        "job": {"runner": runner, "layout": layout, **sizes},
        "status": "measured",
        "us": 2 * us,
        "graph_us": us,
    }


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
    whole = {"kind": "whole_pool", "batch": 16, "context": 4096, "rows_per_list": 4096}
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
    def of(rows):
        add_ratios(rows)
        return [verdict["state"] for verdict in targets(rows, GPU_GRID)]

    return of


PASSED, MISSED, OPEN = "passed", "missed", "not measured"
#: fp8: 0 with many heads; fp8_block_scale: 1 beside the best peer, 2 with many heads; fp4: 3 to 6 beside the
#: best peer, with many heads, large pool, sparse; fp4_fp8_rope: 7 to 10 as fp4.


def test_targets_met(states):
    assert states(good()) == [PASSED] * 11


def test_targets_without_rows(states):
    assert states([]) == [OPEN] * 11


@pytest.mark.parametrize(
    ("index", "us", "expected"),
    [
        (3, 550, {3: MISSED, 1: MISSED}),  # FlashMLA faster: 1.375x and 1.1x
        (3, 590, {1: MISSED}),
        (4, 500, {3: MISSED, 1: MISSED}),  # any peer may be the best
        (6, 1301, {0: MISSED}),
        (7, 1301, {2: MISSED}),
        (8, 1301, {4: MISSED}),
        (10, 199, {5: MISSED}),
        (12, 49, {6: MISSED}),
        (13, 450, {7: MISSED}),
        (14, 1301, {8: MISSED}),
        (15, 21, {9: MISSED}),
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
        (2, {3: OPEN}),
        (3, {7: OPEN, 3: OPEN, 1: OPEN}),  # beats the others, but the peer made for Hopper did not run
        (5, {0: OPEN, 2: OPEN, 4: OPEN, 8: OPEN}),
        (8, {4: OPEN}),
        (10, {5: OPEN, 9: OPEN}),
        (12, {6: OPEN, 10: OPEN}),
        (13, {7: OPEN}),
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
    found = states(rows)
    assert [found[i] for i in (1, 3, 7)] == [MISSED] * 3
    # The worst of all batches counts, and the target's own batch has to be measured.
    rows = [
        *good(),
        *(measured("kvpool", name, us, heads=128, batch=1) for name, us in (("bf16", 10), ("fp4", 14))),
    ]
    assert states(rows)[4] == MISSED
    rows = [row for row in good() if row["job"]["heads"] != 128]
    rows += [measured("kvpool", name, 10, heads=128, batch=1) for name in ("bf16", "fp4")]
    assert states(rows)[4] == OPEN
    # A wrong result of a peer removes that peer.
    rows = good()
    rows[4] |= {"status": "wrong", "reason": "query 0"}
    assert states(rows) == [PASSED] * 11


def test_ratios():
    rows = [*good(), measured("kvpool", "fp4", 500, arrangement="token_major", layers=61)]
    rows[2]["graph_us"] = None  # its other time counts: 800
    add_ratios(rows)
    assert rows[2]["times_as_fast_as"] == {"kvpool bf16": 0.8, "flashmla": 0.775, "sglang_triton": 1.125}
    assert rows[-1]["time_to_layer_major"] == 0.625
    assert "times_as_fast_as" not in rows[3]
