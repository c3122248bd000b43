"""`bench tiles`: what is compared, which table follows from times, and a dry run."""

import itertools
import json
from argparse import Namespace
from dataclasses import asdict

import pytest

from scripts.bench import tile_table, tiles
from scripts.bench.__main__ import main
from scripts.bench.attention.cases import Workload
from scripts.bench.tile_table import choose, table_text, tile_of
from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.attention.decode_config import TileConfig, config_of_tile, table
from sgl_kvpool.layout import Encoding, SegmentEncoding

FP4, FP8 = MLAKVCacheLayout.FP4, MLAKVCacheLayout.FP8_NOPE_FP8_ROPE
SLOW, FAST, OTHER = (64, 8, 1, 1), (128, 8, 1, 1), (64, 4, 1, 2)
WIDE = TileConfig(64, 64, 4, 1, 1, "gluon_wide")


def tile(query_heads, shape):
    return TileConfig(query_heads, *shape)


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
    for heads in tiles.HEADS:
        found = tiles.tiles(layout, heads)
        assert len(set(found)) == len(found)
        query_heads, served = {t.query_heads for t in found}, table("gluon")
        assert {t for name, t in served if name is layout and t.query_heads in query_heads} <= set(found)
        assert all(t.block_rows == 16 * t.warps for t in found if t.kernel == "gluon")


def test_jobs_are_measured_with_the_splits_of_the_rule():
    jobs = [job for job in tiles.jobs([16], 132) if job["layout"] == "fp4"]
    assert len({json.dumps(job, sort_keys=True) for job in jobs}) == len(jobs)
    for job in jobs:
        own, work = tile_of(job), Workload.of(job)
        assert job["splits"] == config_of_tile(own, 16, work.batch, work.rows_per_list, 132).splits
    # Jobs of a workload and layout are adjacent: they share their inputs.
    groups = [key for key, _ in itertools.groupby((j["kind"], j["batch"]) for j in jobs)]
    assert len(groups) == len(set(groups)) == 8


def test_a_check_compiles_what_is_measured():
    """Triton compiles anew for sizes that are not multiples of 16, so checks use multiples of 16 too."""
    for heads in tiles.HEADS:
        small, large = tiles.checks([heads]), tiles.jobs([heads], 132)
        assert {(j["layout"], str(j["tile"])) for j in small} == {
            (j["layout"], str(j["tile"])) for j in large
        }
        assert {j["splits"] > 1 for j in small} == {True, False}
        assert all(j["rows_per_list"] % 16 == 0 for j in small + large)


@pytest.mark.parametrize(
    ("shape", "splits", "rows", "others"),
    [
        (FAST, 6, 32768, [3, 5, 7, 12]),
        (FAST, 1, 32768, [2]),
        (FAST, 2, 300, [1, 3]),  # three blocks of 128
        (OTHER, 16, 2048, [8, 11, 32]),  # in blocks of 64: 15 splits would fill 11, 17 would fill 16
        (OTHER, 32, 2048, [8, 11, 32]),  # more than the rule's minimum of rows lets it fill
    ],
)
def test_other_splits_are_all_filled(shape, splits, rows, others):
    job = {**row(1, 16, tile(16, shape), splits=splits)["job"], "rows_per_list": rows}
    assert [other["splits"] for other in tiles.other_splits(job)] == others


# ------------------------------------------------------------------------------------------ which table

#: In the table of Triton's kernel alone.
TRITON = [(FP4, tile(64, FAST))]
#: Stands in for the table of decode_config.py.
TABLE = [
    (MLAKVCacheLayout.BF16, tile(16, (64, 8, 3, 1))),
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
        def changed(kernel="gluon"):
            return iter([*TABLE, *more, *(TRITON if kernel == "triton" else ())])

        monkeypatch.setattr(tile_table, "table", changed)

    change()
    return change


def test_the_fastest_tile_over_all_workloads():
    times = {SLOW: {64: 100, 1: 40}, FAST: {64: 70, 1: 45}, OTHER: {64: 90, 1: 30}}
    rows = [row(us, 16, tile(16, s), batch=batch) for s, some in times.items() for batch, us in some.items()]
    assert chosen(rows) == (tile(16, OTHER), tile(32, SLOW))  # 0.82 of the time; `FAST` takes 0.89
    (reason,) = choose(rows).reasons
    assert reason == (
        "fp4: 16 heads: triton, 16 query heads, 64 rows, 4 warps, 1 stages, 2 per SM, 0.82 of the time (mean "
        "of 2 workloads) of the table's (triton, 16 query heads, 64 rows, 8 warps, 1 stages, 1 per SM)"
    )
    rows = [row(100, 16, tile(16, SLOW)), row(99, 16, tile(16, FAST))]
    assert chosen(rows)[0] == tile(16, SLOW)  # another is hardly faster


@pytest.mark.parametrize("status", ["wrong", "failed"])
def test_a_tile_that_is_wrong_anywhere_is_left_out(status):
    slow, fast = row(100, 16, tile(16, SLOW)), row(50, 16, tile(16, FAST))
    choice = choose([slow, fast, bad(16, tile(16, FAST), status, part="check")])
    assert choice.tiles[FP4][0] == tile(16, SLOW)
    assert f"128 rows, 8 warps, 1 stages, 1 per SM: {status} at dense" in choice.wrong[0]
    assert choice.wrong_in_table == []
    choice = choose([bad(16, tile(16, SLOW), status), fast])
    assert choice.tiles[FP4][0] == tile(16, FAST)
    assert [line[:38] for line in choice.wrong_in_table] == ["fp4, triton, 16 query heads, 64 rows, "]
    choice = choose([slow, bad(64, TRITON[0][1], status)])
    assert [line[:38] for line in choice.wrong_in_table] == ["fp4, triton, 64 query heads, 128 rows,"]
    # A layout of the same latents shares the tile.
    other = [row(100, 16, tile(16, SLOW), layout="fp4_fp8_rope")]
    choice = choose([slow, fast, bad(16, tile(16, FAST), status, layout="fp4_fp8_rope"), *other])
    assert choice.tiles[FP4][0] == choice.tiles[MLAKVCacheLayout.FP4_NOPE_FP8_ROPE][0] == tile(16, SLOW)


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


@pytest.mark.parametrize(("us", "query_heads"), [(96, [16, 32, 64]), (98, [16, 64])])
def test_tiles_of_32_beside_64_of_a_layout_without_them(present, us, query_heads):
    present((FP8, WIDE))
    rows = [row(100, 32, WIDE, layout="fp8"), row(us, 32, tile(32, SLOW), layout="fp8")]
    assert [t.query_heads for t in chosen(rows, FP8)] == query_heads


@pytest.mark.parametrize(("us", "kept"), [(96, False), (98, True)])
@pytest.mark.parametrize(("many", "large"), [(32, tile(32, FAST)), (64, WIDE)])
def test_no_tiles_where_two_of_half_as_many_are_clearly_faster(present, many, large, us, kept):
    present((FP4, WIDE))
    half = tile(many // 2, FAST if many == 32 else SLOW)
    rows = [row(60, many // 2, half), row(100, many, large), row(us, many, half)]
    assert (many in {t.query_heads for t in chosen(rows)}) == kept


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


# ---------------------------------------------------------------------------------------------- dry run


def test_what_follows_from_a_row():
    """A wrong tile is left out; other splits follow for the fastest tile once all have been tried."""
    bench = tiles.Tiles(Namespace(quick=False, device="cuda"))
    every = bench.cases({"sm_count": 132})
    group = [job for job in every if job["layout"] == "fp4" and job["heads"] == 16][:3]
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
    tiles = [one for one in report["results"] if one["job"]["part"] != "splits"]
    path.write_text(json.dumps({**report, "results": tiles[:-1]}))
    assert main([*argv, "--continue"]) == 0
    again = json.loads(path.read_text())["results"]
    assert again[: len(tiles) - 1] == tiles[:-1]
    measured = [one["job"] for one in again[len(tiles) - 1 :]]
    assert measured[0] == tiles[-1]["job"]
    assert {job["part"] for job in measured[1:]} == {"splits"}
