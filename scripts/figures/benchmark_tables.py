#!/usr/bin/env python3
"""Tables of ``docs/benchmarks.md``, from the JSON files under ``docs/benchmarks/``.

python -m scripts.figures.benchmark_tables [--write | --check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scripts import ROOT
from scripts.figures import page_tables
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement

PAGE = ROOT / "docs" / "benchmarks.md"
LAYOUTS = [layout.value for layout in MLAKVCacheLayout]
ARRANGEMENTS = [one.value for one in KVArrangement if one is not KVArrangement.HEAD_MAJOR]
#: Operations of `codec_xeon.json`, and what the page calls them.
CODEC = {
    "gather": "gather rows out of a pool and decode them, of a copy of the same bytes",
    "encode": "encode rows, of the same copy",
    "store": "encode rows and store them in a pool, of the same copy",
}


def _json(name: str) -> Any:
    return json.loads((ROOT / "docs" / "benchmarks" / f"{name}.json").read_text())


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def cpu_table() -> str:
    """Rows, attention and host tier on a CPU, a column per layout, as Markdown."""
    lines = [_line(["", *(f"`{layout}`" for layout in LAYOUTS)]), "|---" * (1 + len(LAYOUTS)) + "|"]

    def add(what: str, by_layout: Mapping[str, Any], cell: Callable[[Any], str]) -> None:
        cells = [cell(by_layout[layout]) if layout in by_layout else "" for layout in LAYOUTS]
        lines.append(_line([what, *cells]))

    codec = _json("codec_xeon")["results"]
    for operation, what in CODEC.items():
        of = {one["layout"]: one["ratio_to_copy"] for one in codec if one["operation"] == operation}
        add(what, of, _percent)
    attention = {one["layout"]: one for one in _json("host_attention_cpu")["results"]}
    small, large = next(iter(attention.values()))["pool_slots"]
    add(
        f"time of one decode layer over the same rows in a pool {large // small} times as large",
        attention,
        lambda one: f"{one['large_over_small']:.2f}x",
    )
    add(
        "the same layer, beside decoding the whole large pool",
        attention,
        lambda one: f"1/{one['whole_over_rows']:.0f}",
    )
    moved = _json("transfer_xeon")["cpu_engine"]
    for arrangement in ARRANGEMENTS:
        of = {one["layout"]: one for one in moved if one["arrangement"] == arrangement}
        add(
            f"engine `cpu`, `{arrangement}` pool, to the host / from it, of a contiguous copy",
            of,
            lambda one: f"{_percent(one['to_host_of_copy'])} / {_percent(one['to_device_of_copy'])}",
        )
    return "\n".join(lines)


def conversions_table() -> str:
    """Transfers to a narrower host layout, from `transfer_xeon.json`, as Markdown."""
    results = _json("transfer_xeon")["conversions"]
    devices, hosts = (
        list(dict.fromkeys(one[field] for one in results)) for field in ("layout", "host_layout")
    )
    of = {}
    for one in results:
        rates = one["to_host_gb_per_s"], one["to_device_gb_per_s"]
        of[one["host_layout"], one["layout"]] = " / ".join(f"{rate:.1f}" for rate in rates)
    lines = [_line(["host \\ device", *(f"`{one}`" for one in devices)]), "|---" * (1 + len(devices)) + "|"]
    lines += [_line([f"`{host}`", *(of.get((host, device), "") for device in devices)]) for host in hosts]
    return "\n".join(lines)


TABLES = {"cpu": cpu_table, "conversions": conversions_table}


if __name__ == "__main__":
    sys.exit(page_tables.main(__doc__, PAGE, TABLES, "scripts.figures.benchmark_tables"))
