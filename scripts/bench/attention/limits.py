"""Lower bounds of the time of attention over rows: three limits, two from peaks measured in the same run.

Work of a call with N lists of M rows, T queries of H heads, R = 512 latent and P = 64 rotary values:

* **bytes**: every row of every list once, 4 bytes per entry of a list, queries in and results out:
  ``N M row_bytes + 4 N M + 2 T H (R + P) + 2 T H R + 4 T H``, at the rate of a torch copy, which counts the
  bytes read and the bytes written.
* **matrix**: scores over R + P values and sums over R, two operations per product and sum:
  ``2 T H M (2 R + P)``, at the rate of a large bf16 product. Padding of tiles is not counted.
* **multiprocessors**, for `mla_decode` only: ``N M`` rows times the clocks per row of the busiest unit of a
  multiprocessor. The clocks are counted in the machine code of each tile (``attention_facts.py``) and
  stored in ``tile_costs.json``, because a machine with a GPU need not have a disassembler. Layouts whose
  tiles were not counted have no such limit.

The clock is the highest that nvidia-smi reports (an H100's if it reports none); at a lower clock no kernel
can reach the third limit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scripts.bench.attention.cases import Workload
from sgl_kvpool.attention.decode_config import decode_kernel_of, tile_config
from sgl_kvpool.layout import RowFormat

__all__ = [
    "TILE_COSTS",
    "UNITS",
    "Peaks",
    "Work",
    "busiest_unit",
    "busiest_unit_clk",
    "limits_us",
    "sm_clk_per_row",
    "uncounted",
    "work_of",
]

#: A list of objects, one per layout, kernel and number of query heads, FlashMLA's kernels last;
#: ``docs/attention.md`` describes them.
TILE_COSTS = Path(__file__).with_name("tile_costs.json")
#: Units of a multiprocessor whose clocks per row are in `TILE_COSTS`.
UNITS = ("shared_memory", "issue", "integer", "special", "tensor")
_ENTRY_BYTES, _BF16_BYTES, _LSE_BYTES = 4, 2, 4


@dataclass(frozen=True)
class Peaks:
    """Peak rates of the device.

    `copy_bytes_per_s`: Bytes read plus bytes written per second by a large copy in the same run.
    `matmul_flop_per_s`: Rate of a large bf16 product in the same run.
    `sm_count`: Multiprocessors; 0 on a CPU, for which the third limit does not exist.
    """

    copy_bytes_per_s: float
    matmul_flop_per_s: float
    sm_count: int
    clock_hz: float


@dataclass(frozen=True)
class Work:
    """Bytes, operations and multiprocessor clocks of one call; see the module's docstring."""

    row_bytes: int
    other_bytes: int
    flop: int
    sm_clk: float | None


def busiest_unit(costs: Mapping[str, Any]) -> str:
    """The one of `UNITS` with the most clocks per row, in an object of `TILE_COSTS`."""
    return max(UNITS, key=lambda unit: costs[f"{unit}_clk_per_row"])


def busiest_unit_clk(costs: Mapping[str, Any]) -> float:
    """Clocks per row of the busiest unit, in an object of `TILE_COSTS`."""
    return costs[f"{busiest_unit(costs)}_clk_per_row"]


@cache
def _clk_of_one_tile() -> dict[tuple[str, str, int], float]:
    """Clocks per row of the busiest unit by layout, kernel and query heads of a tile."""
    costs = json.loads(TILE_COSTS.read_text("utf-8"))
    return {(x["layout"], x["kernel"], x["heads"]): busiest_unit_clk(x) for x in costs}


def uncounted(layouts: Iterable[str]) -> list[str]:
    """Layouts without a line in `TILE_COSTS`."""
    known = {layout for layout, _, _ in _clk_of_one_tile()}
    return [layout for layout in dict.fromkeys(layouts) if layout not in known]


def sm_clk_per_row(fmt: RowFormat, query_heads: int) -> float | None:
    """Multiprocessor clocks of `mla_decode` per row of a list, summed over tiles; None if not counted.

    `query_heads`: Query heads that share the list: the heads of all its queries.
    """
    tile = tile_config(fmt.layout, query_heads, decode_kernel_of(fmt))
    clk = _clk_of_one_tile().get((fmt.layout.value, tile.kernel, tile.query_heads))
    return None if clk is None else -(-query_heads // tile.query_heads) * clk


def work_of(workload: Workload, fmt: RowFormat) -> Work:
    """Work of a workload on rows of a format."""
    rank, rope = fmt.kv_lora_rank, fmt.qk_rope_head_dim
    rows, query_heads = workload.rows, workload.queries * workload.heads
    clk = sm_clk_per_row(fmt, workload.heads * workload.queries_per_list)
    return Work(
        row_bytes=rows * fmt.row_bytes,
        other_bytes=rows * _ENTRY_BYTES + query_heads * (_BF16_BYTES * (2 * rank + rope) + _LSE_BYTES),
        flop=2 * query_heads * workload.rows_per_list * (2 * rank + rope),
        sm_clk=None if clk is None else rows * clk,
    )


def limits_us(work: Work, peaks: Peaks, *, ours: bool) -> dict[str, float]:
    """Least time in microseconds by each of the three limits.

    `ours`: Whether the runner is `mla_decode`. Other runners, CPUs, and layouts whose tiles were not counted
      have no third limit.
    """
    seconds = {
        "bytes": (work.row_bytes + work.other_bytes) / peaks.copy_bytes_per_s,
        "matrix": work.flop / peaks.matmul_flop_per_s,
    }
    clocks = peaks.sm_count * peaks.clock_hz
    if ours and clocks and work.sm_clk is not None:
        seconds["multiprocessors"] = work.sm_clk / clocks
    return {name: value * 1e6 for name, value in seconds.items()}
