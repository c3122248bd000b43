"""CPU results of `bench transfer` as lines for a terminal. Does not import torch."""

from __future__ import annotations

from typing import Any

from sgl_kvpool.memory.arrangement import KVArrangement

__all__ = ["COLUMNS", "DIRECTIONS", "RATE_LIMIT", "conversion_line", "engine_line", "heading", "missed"]

RATE_LIMIT = 0.7
DIRECTIONS = ("to_host", "to_device")

#: Explanation of the table's columns.
COLUMNS = """\
run bytes: contiguous bytes in the pool, which move together
of a copy: speed of engine `cpu` for scattered pages, divided by that of torch's copy of as many
           contiguous bytes in the same run
target:    least value of `of a copy` in both directions. Single rows (token_major) have no target
of torch:  the same speed, divided by that of torch's copies of the same pages
as LAYOUT: the host has this layout, so rows are encoded and decoded; GB/s count bytes of the pool's rows"""


def target(row: dict[str, Any]) -> float | None:
    """Least share of a contiguous copy's speed; None for rows that move one by one."""
    return None if row["arrangement"] == KVArrangement.TOKEN_MAJOR.value else RATE_LIMIT


def missed(report: dict[str, Any]) -> list[str]:
    """Missed targets, each with the measured value."""
    found = []
    for row in report["cpu_engine"]:
        least = target(row)
        found += [
            f"{row['layout']} {row['arrangement']} {direction.replace('_', ' ')} "
            f"{row[f'{direction}_of_copy']:.2f} (target {least:.2f})"
            for direction in DIRECTIONS
            if least is not None and row[f"{direction}_of_copy"] < least
        ]
    return found


def heading() -> str:
    """Heading of the table of `engine_line`."""
    return (
        f"{'':15} {'':11} {'':>9} {'of a copy':>17} {'':6} {'':6} {'of torch':>17}\n"
        f"{'layout':15} {'arrangement':11} {'run bytes':>9} {'to host':>7} {'to device':>9} {'target':>6} "
        f"{'':6} {'to host':>7} {'to device':>9}"
    )


def engine_line(row: dict[str, Any]) -> str:
    """Line of one pool, with MISSED if it is below its target in a direction."""
    least = target(row)
    shown, verdict = "", ""
    if least is not None:
        slowest = min(row[f"{direction}_of_copy"] for direction in DIRECTIONS)
        shown, verdict = f"{least:.2f}", "ok" if slowest >= least else "MISSED"
    return (
        f"{row['layout']:15} {row['arrangement']:11} {row['run_bytes']:9} {row['to_host_of_copy']:7.2f} "
        f"{row['to_device_of_copy']:9.2f} {shown:>6} {verdict:6} {row['to_host_of_torch']:7.2f} "
        f"{row['to_device_of_torch']:9.2f}"
    )


def conversion_line(row: dict[str, Any]) -> str:
    """Line of one pair of layouts."""
    return (
        f"{row['layout']:15} as {row['host_layout']:15}: to host {row['to_host_gb_per_s']:.2f} GB/s, "
        f"{row['to_host_of_torch']:.1f} of torch; to device {row['to_device_gb_per_s']:.2f} GB/s, "
        f"{row['to_device_of_torch']:.1f} of torch"
    )
