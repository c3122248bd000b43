"""How fast an attention over rows could be: three limits, from peaks measured in the same run.

What a call has to do, with N lists of M rows, T queries of H heads, R = 512 latent and P = 64 rotary values:

* **bytes**: every row of every list once, 4 bytes per entry of a list, queries in and results out:
  ``N M row_bytes + 4 N M + 2 T H (R + P) + 2 T H R + 4 T H``, at the rate of a torch copy, whose bytes are
  those read and those written.
* **matrix**: scores over R + P values and sums over R, two operations per product and sum:
  ``2 T H M (2 R + P)``, at the rate of a large bf16 product. Padding of tiles is not counted.
* **decode and shared memory**, the slower of two units. A program holds at most 64 (query, head) pairs, so
  rows are decoded ``tiles = ceil(H queries_per_list / 64)`` times:

  * decoding: ``N M tiles sum(values * operations per value)`` simple operations, of which a multiprocessor
    does 128 per clock. Per value, estimated and not measured: e2m1 with a ue5m3 scale 6, e4m3 1 (one
    conversion of two values costs as much as two simple operations), bf16 0;
  * shared memory: a row is written once as 16-bit values, 2 (R + P) bytes, and read for the scores,
    2 (R + P), and for the values, 2 R: ``N M tiles (6 R + 4 P)`` bytes, of which a multiprocessor moves 128
    per clock.

The clock is the highest that the device reports. So each limit is a bound that nobody has to reach.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvpool.bench.attention.cases import Workload
from sgl_kvpool.layout import Encoding, RowFormat

__all__ = ["Peaks", "Work", "limits_us", "work_of"]

#: Most (query, head) pairs that one program attends.
LARGEST_TILE_PAIRS = 64
#: Simple operations to make one stored value an operand of a matrix instruction.
DECODE_OPERATIONS = {Encoding.E2M1: 6.0, Encoding.E4M3: 1.0, Encoding.BF16: 0.0}
#: Of a multiprocessor, per clock: simple operations, and bytes of shared memory.
OPERATIONS_PER_CLOCK, SHARED_BYTES_PER_CLOCK = 128, 128
_ENTRY_BYTES, _BF16_BYTES, _LSE_BYTES = 4, 2, 4


@dataclass(frozen=True)
class Peaks:
    """What the device does at best.

    Attributes
    ----------
    copy_bytes_per_s : float
        Read plus written, of a large copy in the same run.
    matmul_flop_per_s : float
        Of a large bf16 product in the same run.
    sm_count : int
        0 on a CPU, which has no limit of the third kind here.
    clock_hz : float
    """

    copy_bytes_per_s: float
    matmul_flop_per_s: float
    sm_count: int
    clock_hz: float


@dataclass(frozen=True)
class Work:
    """Amounts of one call; see the module."""

    row_bytes: int
    other_bytes: int
    flop: int
    decode_operations: float
    shared_bytes: int


def work_of(workload: Workload, fmt: RowFormat) -> Work:
    """What a workload has to do on rows of a format."""
    rank, rope = fmt.kv_lora_rank, fmt.qk_rope_head_dim
    rows, pairs = workload.rows, workload.queries * workload.heads
    tiles = -(-workload.heads * workload.queries_per_list // LARGEST_TILE_PAIRS)
    per_row = rank * DECODE_OPERATIONS[fmt.nope.encoding]
    if fmt.rope is not None:
        per_row += rope * DECODE_OPERATIONS[fmt.rope.encoding]
    return Work(
        row_bytes=rows * fmt.row_bytes,
        other_bytes=rows * _ENTRY_BYTES + pairs * (_BF16_BYTES * (2 * rank + rope) + _LSE_BYTES),
        flop=2 * pairs * workload.rows_per_list * (2 * rank + rope),
        decode_operations=rows * tiles * per_row,
        shared_bytes=rows * tiles * (6 * rank + 4 * rope),
    )


def limits_us(work: Work, peaks: Peaks) -> dict[str, float]:
    """Least microseconds that each of the three allows; the third is missing on a CPU."""
    seconds = {
        "bytes": (work.row_bytes + work.other_bytes) / peaks.copy_bytes_per_s,
        "matrix": work.flop / peaks.matmul_flop_per_s,
    }
    clocks = peaks.sm_count * peaks.clock_hz
    if clocks:
        seconds["decode_and_shared_memory"] = max(
            work.decode_operations / (clocks * OPERATIONS_PER_CLOCK),
            work.shared_bytes / (clocks * SHARED_BYTES_PER_CLOCK),
        )
    return {name: value * 1e6 for name, value in seconds.items()}
