"""What measured tiles say of the tile table in `decode_config.py`, which a person changes."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.bench.attention.measure import best_us
from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.attention.decode_config import TileConfig, table, tile_config

#: Other splits are reported if they take at most this share of the time of the rule's splits.
BETTER_SPLITS = 0.95
#: Tiles that are listed for a layout and a number of heads.
_MOST = 4


@dataclass
class Findings:
    """One line per tile or workload.

    `fastest`: The fastest right tiles of each layout and number of heads, with their time as a share of the
      present table's tile: a geometric mean over common workloads.
    `wrong`, `wrong_in_table`: Tiles that gave wrong results, failed or hung; and those of them that are in
      the present table of either kernel.
    `splits`: Cases in which other splits are clearly faster than the rule's.
    """

    fastest: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    wrong_in_table: list[str] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)


def tile_of(job: dict[str, Any]) -> TileConfig:
    return TileConfig(**job["tile"])


def _workload(job: dict[str, Any]) -> str:
    return f"{job['kind']}, {job['heads']} heads, batch {job['batch']}, context {job['context']}"


def _ratio(times: dict[str, float], others: dict[str, float]) -> float:
    """Geometric mean over common workloads; infinity without one."""
    both = [math.log(us / others[where]) for where, us in times.items() if where in others]
    return math.exp(sum(both) / len(both)) if both else math.inf


def findings(rows: Sequence[dict[str, Any]]) -> Findings:
    """What rows of `bench tiles` say; a tile that was wrong once is not among the fastest."""
    found = Findings()
    wrong: dict[tuple[MLAKVCacheLayout, TileConfig], str] = {}
    times: dict[Any, dict[TileConfig, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    best_of: dict[str, tuple[int, float]] = {}
    rule: dict[str, tuple[int, float]] = {}
    for row in rows:
        job, tile = row["job"], tile_of(row["job"])
        layout, workload = MLAKVCacheLayout(job["layout"]), _workload(job)
        if row["status"] in ("wrong", "failed"):
            wrong.setdefault((layout, tile), f"{row['status']} at {workload}: {row['reason']}")
        elif row["status"] == "measured" and job["part"] != "check":
            name, timed = f"{layout}, {workload}, {tile}", (job["splits"], best_us(row))
            if job["part"] == "tile":
                times[layout, job["heads"]][tile][workload], rule[name] = timed[1], timed
            else:
                best_of[name] = min(best_of.get(name, timed), timed, key=lambda one: one[1])
    in_table = table("gluon", "triton")
    for (layout, tile), why in wrong.items():
        found.wrong.append(f"{layout}, {tile}: {why}")
        if (layout, tile) in in_table:
            found.wrong_in_table.append(found.wrong[-1])
    for (layout, heads), of_tiles in times.items():
        present = of_tiles.get(tile_config(layout, heads, "gluon"), next(iter(of_tiles.values())))
        right = [
            (_ratio(us, present), str(tile)) for tile, us in of_tiles.items() if (layout, tile) not in wrong
        ]
        found.fastest += [
            f"{layout}, {heads} heads: {ratio:.2f} of the present time: {tile}"
            for ratio, tile in sorted(right)[:_MOST]
        ]
    found.splits += [
        f"{name}: {other} splits take {shortest / us:.2f} of the time of the rule's {splits}"
        for name, (other, shortest) in best_of.items()
        for splits, us in [rule.get(name, (0, 0.0))]
        if shortest <= BETTER_SPLITS * us
    ]
    return found
