"""Clocks per row of the units of a multiprocessor in each tile of `mla_decode`, which bound its rate."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: A list of objects, one per layout, kernel and number of query heads, FlashMLA's kernels last;
#: ``attention_facts.py`` counts them, and ``docs/attention.md`` describes them.
TILE_COSTS = Path(__file__).with_name("tile_costs.json")
#: Units of a multiprocessor whose clocks per row are in `TILE_COSTS`.
UNITS = ("shared_memory", "issue", "integer", "special", "tensor")


def busiest_unit(costs: Mapping[str, Any]) -> str:
    """The one of `UNITS` with the most clocks per row, in an object of `TILE_COSTS`."""
    return max(UNITS, key=lambda unit: costs[f"{unit}_clk_per_row"])


def busiest_unit_clk(costs: Mapping[str, Any]) -> float:
    """Clocks per row of the busiest unit, in an object of `TILE_COSTS`."""
    return costs[f"{busiest_unit(costs)}_clk_per_row"]
