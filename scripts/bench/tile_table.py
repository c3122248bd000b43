"""Choice of the best measured tiles, and the text of the tile table."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.bench.attention.measure import best_us
from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.attention.decode_config import TileConfig, table
from sgl_kvpool.layout import SegmentEncoding

#: A tile replaces another tile if it takes at most this share of the other's time.
REPLACES = 0.98
#: The table gets a tile of 8 query heads, or two tiles of 16 instead of a tile of 32, if the change reduces
#: the time to this share or less.
ADDS = 0.97
#: Other splits are reported if they take at most this share of the time of the rule's splits.
BETTER_SPLITS = 0.95


@dataclass
class Choice:
    """A table for the layouts that were measured.

    `tiles`: Tiles in the form of `decode_config`.
    `reasons`: The compared times, one line per decision.
    `wrong`, `wrong_in_table`: Tiles that gave wrong results, failed or hung, which are never chosen; and
      those of them that are in the present table of either kernel.
    """

    tiles: dict[MLAKVCacheLayout, tuple[TileConfig, ...]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    wrong_in_table: list[str] = field(default_factory=list)


def tile_of(job: dict[str, Any]) -> TileConfig:
    """The tile of a job."""
    return TileConfig(**job["tile"])


def _where(job: dict[str, Any]) -> tuple:
    return job["kind"], job["batch"], job["context"]


def _workload(job: dict[str, Any]) -> str:
    return f"{job['kind']}, {job['heads']} heads, batch {job['batch']}, context {job['context']}"


def _name(tile: TileConfig) -> str:
    return (
        f"{tile.kernel}, {tile.query_heads} query heads, {tile.block_rows} rows, {tile.warps} warps, "
        f"{tile.stages} stages, {tile.programs_per_sm} per SM"
        + (f", {tile.register_parts} register parts" if tile.register_parts else "")
    )


class _Times:
    """Times of tiles of one layout, by heads and workload."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self.of: dict[int, dict[TileConfig, dict[tuple, float]]] = defaultdict(lambda: defaultdict(dict))
        self.wrong: dict[TileConfig, str] = {}
        for row in rows:
            job, tile = row["job"], tile_of(row["job"])
            if row["status"] in ("wrong", "failed"):
                self.wrong.setdefault(tile, f"{row['status']} at {_workload(job)}: {row['reason']}")
            elif row["status"] == "measured" and job["part"] == "tile":
                self.of[job["heads"]][tile][_where(job)] = best_us(row)

    def best(self, heads: int, query_heads: int, current: TileConfig | None) -> TileConfig | None:
        """The fastest tile of this many query heads; the current tile unless another is clearly faster."""
        found = [t for t in self.of[heads] if t.query_heads == query_heads and t not in self.wrong]
        if not found:
            return None
        first = current if current in found else found[0]
        fastest = min(found, key=lambda tile: self.ratio(heads, tile, first) or math.inf)
        ratio = self.ratio(heads, fastest, first)
        return fastest if ratio is not None and ratio <= REPLACES else first

    def ratio(self, heads: int, tile: TileConfig, other: TileConfig) -> float | None:
        """Time of a tile divided by that of another: geometric mean over their common workloads."""
        times, others = self.of[heads][tile], self.of[heads][other]
        both = [math.log(times[where] / others[where]) for where in times if where in others]
        return math.exp(sum(both) / len(both)) if both else None


def choose(rows: Sequence[dict[str, Any]]) -> Choice:
    """The tile table that follows from measured rows.

    Tiles of a number of query heads are judged with that number of heads. Tiles of 8 enter the table if 8
    heads are clearly faster with them than with tiles of 16, and leave it if they are slower; so do tiles of
    32 against tiles of 64. Tiles of 32 or 64 leave it if two of half as many are clearly faster. Entries
    without measurements stay. Layouts that encode latents alike share their tiles: a tile that is wrong for
    one of them is not chosen.
    """
    by_layout = {
        layout: _Times(own)
        for layout in MLAKVCacheLayout
        if (own := [row for row in rows if row["job"]["layout"] == layout.value])
    }
    wrong = [(layout, dict(times.wrong)) for layout, times in by_layout.items()]
    choice = Choice()
    for layout, times in by_layout.items():
        for other, of_other in wrong:
            if other is not layout and other.latent is layout.latent:
                for tile, why in of_other.items():
                    times.wrong.setdefault(tile, f"{other}, with the same tiles: {why}")
        _choose_for(layout, times, choice)
    return choice


def _choose_for(layout: MLAKVCacheLayout, times: _Times, choice: Choice) -> None:
    current = {tile.query_heads: tile for name, tile in table("gluon") if name is layout}
    for tile, why in times.wrong.items():
        line = f"{layout}, {_name(tile)}: {why}"
        choice.wrong.append(line)
        if any((layout, tile) in table(kernel) for kernel in ("gluon", "triton")):
            choice.wrong_in_table.append(line)
    chosen = {query_heads: tile for query_heads, tile in current.items() if tile not in times.wrong}

    def say(text: str) -> None:
        choice.reasons.append(f"{layout}: {text}")

    for heads in (16, 32, 64):
        old, best = current.get(heads), times.best(heads, heads, current.get(heads))
        if old is None or best is None:
            continue
        chosen[heads] = best
        if old == best:
            say(f"{heads} heads: {_name(best)}, as in the table")
        elif old in times.wrong or times.ratio(heads, best, old) is None:
            say(f"{heads} heads: {_name(best)}; the table's ({_name(old)}) is wrong or was not measured")
        else:
            say(f"{heads} heads: {_name(best)}, {_ratio(times, heads, best, old)} the table's ({_name(old)})")
    for few, many in ((8, 16), (32, 64)):
        small, usual = times.best(few, few, chosen.get(few)), chosen.get(many)
        if usual is not None and small is not None and (ratio := times.ratio(few, small, usual)) is not None:
            chosen[few] = small
            verdict = ""
            if ratio > (1.0 if few in current else ADDS):
                del chosen[few]
                verdict = f": the table gets no tile of {few}"
            say(f"{few} heads: {_name(small)}, {_ratio(times, few, small, usual)} a tile of {many}{verdict}")
    for few, many in ((16, 32), (32, 64)):
        usual, large = chosen.get(few), chosen.get(many)
        if usual is not None and large is not None and (ratio := times.ratio(many, usual, large)) is not None:
            verdict = ""
            if ratio <= ADDS:
                del chosen[many]
                verdict = f": the table gets no tile of {many}"
            both = _ratio(times, many, usual, large)
            say(f"{many} heads, two tiles of {few}: {both} a tile of {many}{verdict}")
    choice.tiles[layout] = tuple(chosen[query_heads] for query_heads in sorted(chosen))


def _ratio(times: _Times, heads: int, tile: TileConfig, other: TileConfig) -> str:
    common = times.of[heads][tile].keys() & times.of[heads][other].keys()
    return f"{times.ratio(heads, tile, other):.2f} of the time (mean of {len(common)} workloads) of"


def table_text(choice: Choice) -> str:
    """The table as Python source for decode_config.py; encodings that were not measured keep theirs.

    If several layouts encode latents alike, the first measured layout decides.
    """
    present: dict[MLAKVCacheLayout, list[TileConfig]] = defaultdict(list)
    for layout, tile in table("gluon"):
        present[layout].append(tile)
    found: dict[SegmentEncoding, Sequence[TileConfig]] = {}
    for layout in (*choice.tiles, *MLAKVCacheLayout):
        found.setdefault(layout.latent, choice.tiles.get(layout) or present[layout])
    lines = ["_TABLE: dict[SegmentEncoding, tuple[TileConfig, ...]] = {"]
    for latent in dict.fromkeys(layout.latent for layout in MLAKVCacheLayout):
        lines.append(f"    _E.{latent.name}: (")
        lines += [f"        {tile!r}," for tile in found[latent]]
        lines.append("    ),")
    return "\n".join([*lines, "}"])


def split_findings(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each case in which other splits are clearly faster than the rule's."""
    base: dict[str, tuple[int, float]] = {}
    best: dict[str, tuple[int, float]] = {}
    for row in rows:
        job = row["job"]
        if row["status"] != "measured" or job["part"] == "check":
            continue
        name = f"{job['layout']}, {_workload(job)}, {_name(tile_of(job))}"
        found = job["splits"], best_us(row)
        if job["part"] == "tile":
            base[name] = found
        elif name not in best or found[1] < best[name][1]:
            best[name] = found
    return [
        f"{name}: {best[name][0]} splits take {best[name][1] / us:.2f} of the time of the rule's {splits}"
        for name, (splits, us) in base.items()
        if name in best and best[name][1] <= BETTER_SPLITS * us
    ]
