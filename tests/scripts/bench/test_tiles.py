"""`bench tiles`: what is compared, which table follows from times, and a dry run."""

import itertools
import json
import sys
from argparse import Namespace
from dataclasses import asdict

import pytest

from scripts.bench.__main__ import main
from scripts.bench.attention.cases import Workload
from scripts.bench.tiles import cases, tile_table
from scripts.bench.tiles.benchmark import Tiles
from scripts.bench.tiles.tile_table import choose, split_findings, table_text
from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.attention.decode_config import TileConfig, config_of_tile, decode_config, table
from sgl_kvpool.layout import Encoding, SegmentEncoding

FP4, BF16 = MLAKVCacheLayout.FP4, MLAKVCacheLayout.BF16
SLOW, FAST = (64, 8, 1, 1), (128, 8, 1, 1)


def tile(query_heads, shape):
    rows, warps, stages, programs = shape
    return TileConfig(
        query_heads=query_heads, block_rows=rows, warps=warps, stages=stages, programs_per_sm=programs
    )


def row(us, heads, own, *, layout="fp4", batch=64, part="tile", splits=2, **more):
    job = {
        "part": part, "kind": "dense", "heads": heads, "batch": batch, "context": 32768,
        "rows_per_list": 32768, "layout": layout, "tile": asdict(own), "splits": splits,
        "min_blocks": own.min_blocks,
    }  # fmt: skip
    return {"job": job, "status": "measured", "us": us, "graph_us": us, **more}


def bad(heads, own, status="failed", **more):
    return {**row(1.0, heads, own, **more), "status": status, "reason": "hung: killed after 45 s"}


def chosen(rows, layout=FP4):
    return choose(rows).tiles[layout]


# ----------------------------------------------------------------------------------------- what is compared


@pytest.mark.parametrize("layout", MLAKVCacheLayout)
def test_tiles_are_distinct_and_include_those_of_the_table(layout):
    more = []
    for heads in cases.HEADS:
        found = cases.tiles(layout, heads)
        assert len(set(found)) == len(found)
        wide = {64} if layout.needs_decoding else set()
        wanted = {8: {8, 16}, 16: {16}, 32: {16, 32} | wide, 64: {32} | wide}[heads]
        assert {t.query_heads for t in found} == wanted
        own = {t for name, t in table() if name is layout and t.query_heads in {t.query_heads for t in found}}
        assert own <= set(found)
        for query_heads in wanted - {64}:
            shapes = {
                (t.block_rows, t.warps, t.programs_per_sm) for t in found if t.query_heads == query_heads
            }
            assert {(64, 8, 1), (128, 8, 1), (64, 4, 2)} <= shapes
            assert all(
                t.block_rows * 1152 * max(t.stages - 1, 1) * t.programs_per_sm < 227 << 10 for t in found
            )
        more += [t for t in set(found) - own if t.kernel == "gluon"]
    # Shapes that a GPU might prefer; a block of the Gluon kernel has 16 rows for each warp.
    assert bool(more) == layout.needs_decoding
    assert all(t.block_rows == 16 * t.warps and t.stages == 1 for t in more)


def test_jobs_are_measured_with_the_splits_of_the_rule():
    jobs = [job for job in cases.jobs([16], 132) if job["layout"] == "fp4"]
    assert len({json.dumps(job, sort_keys=True) for job in jobs}) == len(jobs)
    for job in jobs:
        own, work = cases.tile_of(job), Workload.of(job)
        assert work.rows_per_list == (2048 if work.kind == "sparse" else work.context)
        assert job["splits"] == config_of_tile(own, 16, work.batch, work.rows_per_list, 132).splits
        if own in {t for name, t in table() if name is FP4}:
            fmt = FP4.row_format(512, 64)
            assert job["splits"] == decode_config(fmt, 16, 1, work.batch, work.rows_per_list).splits
    assert {job["batch"] for job in jobs} == {1, 16, 64, 128}
    # Jobs of a workload and layout are adjacent: they share their inputs.
    groups = [key for key, _ in itertools.groupby((j["kind"], j["batch"]) for j in jobs)]
    assert len(groups) == len(set(groups)) == 8


def test_a_check_compiles_what_is_measured():
    """Triton compiles anew for sizes that are not multiples of 16, so checks use multiples of 16 too."""
    for heads in cases.HEADS:
        small, large = cases.checks([heads]), cases.jobs([heads], 132)
        assert {(j["layout"], str(j["tile"])) for j in small} == {
            (j["layout"], str(j["tile"])) for j in large
        }
        assert {j["splits"] > 1 for j in small} == {True, False}
        assert all(j["rows_per_list"] % 16 == 0 for j in small + large)


def test_other_splits():
    job = row(1, 16, tile(16, FAST), splits=6)["job"]
    assert [other["splits"] for other in cases.other_splits(job)] == [3, 5, 7, 12]
    assert {other["part"] for other in cases.other_splits(job)} == {"splits"}
    assert [other["splits"] for other in cases.other_splits({**job, "splits": 1})] == [2]
    few = {**job, "splits": 2, "rows_per_list": 300}  # three blocks of 128
    assert [other["splits"] for other in cases.other_splits(few)] == [1, 3]


def test_other_splits_are_all_filled_also_below_the_minimum_of_rows():
    """2048 rows in blocks of 64: 15 splits would fill 11, 17 would fill 16, and 32 of one block are tried."""
    job = {**row(1, 16, tile(16, (64, 4, 1, 2)), splits=16)["job"], "rows_per_list": 2048}
    assert job["min_blocks"] == 2
    others = cases.other_splits(job)
    assert [other["splits"] for other in others] == [8, 11, 32]
    for other in others:
        blocks_per_split = max(-(-32 // other["splits"]), other["min_blocks"])
        assert -(-32 // blocks_per_split) == other["splits"]
    # The rule asks for more splits than its minimum of rows lets it fill.
    assert [other["splits"] for other in cases.other_splits({**job, "splits": 32})] == [8, 11, 32]


# ------------------------------------------------------------------------------------------ which table

#: In the table of Triton's kernel alone.
TRITON = [(FP4, tile(64, (128, 8, 1, 1)))]
#: Stands in for the table of decode_config.py.
TABLE = [
    (BF16, tile(16, (64, 8, 3, 1))),
    *((layout, tile(16, SLOW)) for layout in MLAKVCacheLayout if layout.latent.values is Encoding.E4M3),
    *(
        (layout, tile(query_heads, SLOW))
        for layout in MLAKVCacheLayout
        if layout.latent is FP4.latent
        for query_heads in (16, 32)
    ),
]


@pytest.fixture(autouse=True)
def present(monkeypatch):
    """`present(more)`: the table has these layouts' tiles too."""

    def change(*more):
        monkeypatch.setattr(
            tile_table,
            "table",
            lambda kernel="gluon": iter([*TABLE, *more, *(TRITON if kernel == "triton" else ())]),
        )

    change()
    return change


def test_the_fastest_tile_over_all_workloads():
    slow, fast, other = tile(16, SLOW), tile(16, FAST), tile(16, (64, 4, 1, 2))
    times = {slow: {64: 100, 1: 40}, fast: {64: 70, 1: 45}, other: {64: 90, 1: 30}}
    rows = [row(us, 16, own, batch=batch) for own, some in times.items() for batch, us in some.items()]
    assert chosen(rows)[0] == other  # 0.82 of the time of the table's; `fast` takes 0.89
    assert chosen(rows)[1:] == (tile(32, SLOW),)  # as it was
    (reason,) = choose(rows).reasons
    assert reason == (
        "fp4: 16 heads: triton, 16 query heads, 64 rows, 4 warps, 1 stages, 2 per SM, 0.82 of the time (mean "
        "of 2 workloads) of the table's (triton, 16 query heads, 64 rows, 8 warps, 1 stages, 1 per SM)"
    )


def test_a_tile_that_is_hardly_faster_does_not_replace_the_tables():
    rows = [row(100, 16, tile(16, SLOW)), row(99, 16, tile(16, FAST))]
    assert chosen(rows)[0] == tile(16, SLOW)


@pytest.mark.parametrize("status", ["wrong", "failed"])
def test_a_tile_that_is_wrong_anywhere_is_left_out(status):
    rows = [
        row(100, 16, tile(16, SLOW)),
        row(50, 16, tile(16, FAST)),
        bad(16, tile(16, FAST), status, part="check"),
    ]
    choice = choose(rows)
    assert choice.tiles[FP4][0] == tile(16, SLOW)
    assert choice.wrong[0].startswith(
        f"fp4, triton, 16 query heads, 128 rows, 8 warps, 1 stages, 1 per SM: {status} at dense"
    )
    assert choice.wrong_in_table == []
    rows[0] = bad(16, tile(16, SLOW), status)
    choice = choose([*rows, row(80, 16, tile(16, (64, 4, 1, 2)))])
    assert choice.tiles[FP4][0] == tile(16, (64, 4, 1, 2))
    assert [line[:38] for line in choice.wrong_in_table] == ["fp4, triton, 16 query heads, 64 rows, "]
    choice = choose([row(80, 16, tile(16, SLOW)), bad(64, TRITON[0][1], status)])
    assert [line[:38] for line in choice.wrong_in_table] == ["fp4, triton, 64 query heads, 128 rows,"]


@pytest.mark.parametrize(
    ("us", "is_there", "query_heads"),
    [(96, False, [8, 16, 32]), (98, False, [16, 32]), (98, True, [8, 16, 32]), (101, True, [16, 32])],
)
def test_tiles_of_eight_where_they_are_clearly_faster(present, us, is_there, query_heads):
    """A tile of 8 query heads is added where it saves 3 % of the time, and removed where it is slower."""
    if is_there:
        present((FP4, tile(8, FAST)))
    rows = [row(100, 16, tile(16, SLOW)), row(100, 8, tile(16, SLOW)), row(us, 8, tile(8, FAST))]
    assert [t.query_heads for t in chosen(rows)] == query_heads


@pytest.mark.parametrize(("us", "query_heads"), [(96, [16]), (98, [16, 32])])
def test_no_tiles_of_32_where_two_of_16_are_clearly_faster(us, query_heads):
    rows = [row(60, 16, tile(16, FAST)), row(90, 16, tile(16, SLOW)), row(100, 32, tile(32, FAST))]
    assert [t.query_heads for t in chosen([*rows, row(us, 32, tile(16, FAST))])] == query_heads
    # Two tiles of another shape than the one chosen for 16 heads say nothing.
    assert [t.query_heads for t in chosen([*rows, row(us, 32, tile(16, SLOW))])] == [16, 32]


WIDE = TileConfig(64, 64, 4, 1, 1, "gluon_wide")


@pytest.mark.parametrize(
    ("us", "is_there", "query_heads"),
    [(96, False, [16, 32, 64]), (98, False, [16, 64]), (98, True, [16, 32, 64]), (101, True, [16, 64])],
)
def test_tiles_of_32_where_they_are_clearly_faster_than_half_of_64(present, us, is_there, query_heads):
    """Of `fp8`, whose table has no tile of 32 here."""
    fp8 = MLAKVCacheLayout.FP8_NOPE_FP8_ROPE
    present((fp8, WIDE), *([(fp8, tile(32, SLOW))] if is_there else []))
    rows = [row(100, 32, WIDE, layout="fp8"), row(us, 32, tile(32, SLOW), layout="fp8")]
    assert [t.query_heads for t in chosen(rows, fp8)] == query_heads


@pytest.mark.parametrize(("us", "query_heads"), [(96, [16, 32]), (98, [16, 32, 64])])
def test_no_tiles_of_64_where_two_of_32_are_clearly_faster(present, us, query_heads):
    present((FP4, WIDE))
    rows = [row(100, 64, WIDE), row(us, 64, tile(32, SLOW))]
    assert [t.query_heads for t in chosen(rows)] == query_heads


def test_the_text_is_the_table():
    rows = [row(50, 16, tile(16, FAST)), row(100, 16, tile(16, SLOW))]
    names = {"_E": SegmentEncoding, "SegmentEncoding": SegmentEncoding, "TileConfig": TileConfig}
    exec(table_text(choose(rows)), names)
    assert names["_TABLE"] == {
        SegmentEncoding.BF16: (tile(16, (64, 8, 3, 1)),),
        SegmentEncoding.E4M3_BY_K_SCALE: (tile(16, SLOW),),
        SegmentEncoding.E4M3_IN_TILES: (tile(16, SLOW),),
        SegmentEncoding.E2M1_IN_BLOCKS: (tile(16, FAST), tile(32, SLOW)),
    }


def test_a_tile_that_is_wrong_for_a_layout_of_the_same_latents_is_not_chosen():
    rows = [row(50, 16, tile(16, FAST)), row(100, 16, tile(16, SLOW))]
    assert chosen(rows)[0] == tile(16, FAST)
    rows += [
        bad(16, tile(16, FAST), "wrong", layout="fp4_fp8_rope"),
        row(100, 16, tile(16, SLOW), layout="fp4_fp8_rope"),
    ]
    found = choose(rows)
    assert found.tiles[FP4][0] == found.tiles[MLAKVCacheLayout.FP4_NOPE_FP8_ROPE][0] == tile(16, SLOW)
    assert any(
        line.startswith("fp4, triton, 16 query heads") and "fp4_fp8_rope, with" in line
        for line in found.wrong
    )
    # FP8 rows have tiles of their own.
    others = [row(50, 16, tile(16, FAST), layout="fp8"), row(100, 16, tile(16, SLOW), layout="fp8")]
    tiles = choose([*rows, *others]).tiles[MLAKVCacheLayout.FP8_NOPE_FP8_ROPE]
    assert tiles[0] == tile(16, FAST)


def test_splits_that_are_clearly_faster_are_named():
    own = tile(16, FAST)
    rows = [
        row(100, 16, own),
        row(94, 16, own, part="splits", splits=3),
        row(97, 16, own, part="splits", splits=4),
    ]
    (line,) = split_findings(rows)
    assert line.endswith("3 splits take 0.94 of the time of the rule's 2")
    assert split_findings([rows[0], rows[2]]) == []


# ---------------------------------------------------------------------------------------------- dry run


def test_what_follows_from_a_row():
    """A wrong tile is left out; other splits follow for the fastest tile once all have been tried."""
    bench = Tiles(Namespace(quick=False, device="cuda"))
    group = [job for job in bench.cases({"sm_count": 132}) if job["layout"] == "fp4" and job["heads"] == 16][
        :3
    ]
    bench.planned = group
    rows = [{"job": job, "status": "measured", "us": us} for job, us in zip(group, (3.0, 1.0), strict=False)]
    assert bench.following(rows[1], rows) == []
    rows.append({"job": group[2], "status": "measured", "us": 2.0})
    assert {str(job["tile"]) for job in bench.following(rows[2], rows)} == {str(group[1]["tile"])}
    wrong = {"job": {**group[1], "part": "check"}, "status": "wrong", "reason": "query 0"}
    assert bench.is_ruled_out(group[1], [wrong])
    assert not bench.is_ruled_out(group[0], [wrong])
    assert bench.following(rows[0], [rows[0], rows[2], wrong])  # the tile that is ruled out is not waited for


def test_a_dry_run_is_right_and_goes_on(tmp_path, capsys):
    """Triton's interpreter, a worker process, every tile; then again from a file that lacks a tile."""
    path = tmp_path / "tiles.json"
    argv = ["tiles", "--device", "cpu", "--only", "layout=fp4", "--json", str(path)]
    assert main(argv) == 0
    report = json.loads(path.read_text())
    assert {one["status"] for one in report["results"]} == {"measured"}
    assert {one["job"]["part"] for one in report["results"]} == {"check", "tile", "splits"}
    assert all(one["relative_error"] < 0.01 for one in report["results"])
    assert "_E.E2M1_IN_BLOCKS: (" in capsys.readouterr().out
    jobs = [one["job"] for one in report["results"]]
    last = max(i for i, one in enumerate(jobs) if one["part"] == "tile")
    report["results"] = [
        one for i, one in enumerate(report["results"]) if i < last and one["job"]["part"] != "splits"
    ]
    kept = [one["job"] for one in report["results"]]
    path.write_text(json.dumps(report))
    assert main([*argv, "--continue"]) == 0
    again = json.loads(path.read_text())["results"]
    assert [one["job"] for one in again[: len(kept)]] == kept
    assert jobs[last] in [one["job"] for one in again[len(kept) :]]
    assert not any(one["job"] in kept for one in again[len(kept) :])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["tiles"], "cannot be loaded; --device cpu is a dry run"),
        (["tiles", "--device", "cpu", "--only", "layout=fp3"], "no case passes --only"),
    ],
)
def test_refusals(argv, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*argv])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_nothing_of_sglang_is_imported(tmp_path):
    """On a machine that has torch and triton alone."""
    import subprocess

    (tmp_path / "sglang.py").write_text("raise ImportError('SGLang is not here')")
    modules = [
        *("scripts.bench.tiles.benchmark", "scripts.bench.attention.benchmark"),
        *("scripts.bench.transfer", "scripts.bench.codec"),
        *("sgl_kvpool.attention.decode_launch", "sgl_kvpool.transfer.gpu_engine"),
    ]
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "\n".join(f"import {name}" for name in modules) + "\nassert 'sglang' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
