"""`bench tiles`: what is compared, which tiles are fastest, and a dry run."""

import itertools
import json
import re
from argparse import Namespace
from dataclasses import asdict

import pytest

from scripts.bench import tile_table, tiles
from scripts.bench.__main__ import main
from scripts.bench.attention.cases import Workload
from scripts.bench.tile_table import findings, tile_of
from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.attention.decode_config import TileConfig, config_of_tile, table

FP4 = MLAKVCacheLayout.FP4
SLOW, FAST, OTHER = (64, 8, 1, 1), (128, 8, 1, 1), (64, 4, 1, 2)


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
        checked, measured = ({(j["layout"], str(j["tile"])) for j in some} for some in (small, large))
        assert checked == measured
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


# ------------------------------------------------------------------------------------------ which is fastest


@pytest.fixture
def present(monkeypatch):
    """A table whose tile of 16 heads is `SLOW`, and one of 64 heads for Triton's kernel alone."""
    both = [(FP4, tile(16, SLOW)), (FP4, tile(64, FAST))]
    monkeypatch.setattr(tile_table, "table", lambda *kernels: both)
    monkeypatch.setattr(tile_table, "tile_config", lambda layout, heads, kernel: tile(16, SLOW))


def test_the_fastest_tile_over_all_workloads(present):
    times = {SLOW: {64: 100, 1: 40}, FAST: {64: 70, 1: 45}, OTHER: {64: 90, 1: 30}}
    rows = [row(us, 16, tile(16, s), batch=batch) for s, some in times.items() for batch, us in some.items()]
    rows += [row(80, 16, tile(16, SLOW), part="splits", splits=4), row(9, 16, tile(16, FAST), part="check")]
    found = findings(rows)
    ranked = [("0.82", OTHER), ("0.89", FAST), ("1.00", SLOW)]
    assert found.fastest == [f"fp4, 16 heads: {x} of the present time: {tile(16, own)}" for x, own in ranked]
    (splits,) = found.splits
    assert splits.endswith(f"{tile(16, SLOW)}: 4 splits take 0.80 of the time of the rule's 2")


@pytest.mark.parametrize("status", ["wrong", "failed"])
def test_a_tile_that_is_wrong_anywhere_is_left_out(present, status):
    slow, fast = row(100, 16, tile(16, SLOW)), row(50, 16, tile(16, FAST))
    found = findings([slow, fast, bad(16, tile(16, FAST), status, part="check")])
    assert found.fastest == [f"fp4, 16 heads: 1.00 of the present time: {tile(16, SLOW)}"]
    assert found.wrong[0].startswith(f"fp4, {tile(16, FAST)}: {status} at dense, 16 heads, batch 64, ")
    assert found.wrong_in_table == []
    for own in (tile(16, SLOW), tile(64, FAST)):
        assert len(findings([fast, bad(16, own, status)]).wrong_in_table) == 1


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
    said = r"^fp4, 2 heads: \d+\.\d\d of the present time: TileConfig\(query_heads=\d+, "
    assert re.search(said, capsys.readouterr().out, re.M)
    tiles = [one for one in report["results"] if one["job"]["part"] != "splits"]
    path.write_text(json.dumps({**report, "results": tiles[:-1]}))
    assert main([*argv, "--continue"]) == 0
    again = json.loads(path.read_text())["results"]
    assert again[: len(tiles) - 1] == tiles[:-1]
    measured = [one["job"] for one in again[len(tiles) - 1 :]]
    assert measured[0] == tiles[-1]["job"]
    assert {job["part"] for job in measured[1:]} == {"splits"}
