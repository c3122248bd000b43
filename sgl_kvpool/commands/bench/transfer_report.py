"""CPU results of `bench transfer` as lines for a terminal and as an image. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgl_kvpool.memory.arrangement import KVArrangement

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "COLUMNS",
    "DIRECTIONS",
    "RATE_LIMIT",
    "conversion_line",
    "draw",
    "engine_line",
    "figure_of",
    "heading",
    "missed",
]

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


def draw(report: dict[str, Any], path: Path) -> None:
    """Write `figure_of` a report, in the form of the JSON, as PNG."""
    figure_of(report).savefig(path, dpi=120, format="png")


def figure_of(report: dict[str, Any]) -> Figure:
    """Bars of both directions beside the copy and the targets; missed ones are marked. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows: Sequence[dict[str, Any]] = report["cpu_engine"]
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colors = {"to_host": "tab:blue", "to_device": "tab:orange"}
    for shift, direction in zip((-0.2, 0.2), DIRECTIONS, strict=True):
        values = [row[f"{direction}_of_copy"] for row in rows]
        bars = axes.bar(
            [place + shift for place in range(len(rows))], values, 0.4, color=colors[direction],
            label=direction.replace("_", " "),
        )  # fmt: skip
        axes.bar_label(bars, [f"{value:.2f}" for value in values], label_type="center", fontsize=7,
                       bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
        for bar, row, value in zip(bars, rows, values, strict=True):
            least = target(row)
            if least is not None and value < least:
                bar.set(edgecolor="red", linewidth=1.5, hatch="///")
    axes.axhline(1, color="black", linewidth=1, label="torch's contiguous copy")
    aims = [(place, least) for place, row in enumerate(rows) if (least := target(row)) is not None]
    axes.hlines(
        [least for _, least in aims],
        [place - 0.45 for place, _ in aims],
        [place + 0.45 for place, _ in aims],
        color="dimgrey", linestyle="--", linewidth=1.5, label="target (token_major: none)",
    )  # fmt: skip
    handles = axes.get_legend_handles_labels()[0]
    if any(bar.get_hatch() for bar in axes.patches):
        handles.append(Patch(facecolor="white", edgecolor="red", hatch="///", label="target missed"))
    labels = [f"{row['layout']}\n{row['arrangement']}" for row in rows]
    axes.set_xticks(range(len(rows)), labels, rotation=45, ha="right", fontsize=8)
    axes.set_ylabel("speed, contiguous copy = 1")
    axes.set_ylim(bottom=0)
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8)
    figure.suptitle(
        f"Pages of {report['layers']} layers, {report['page_size_tokens']} tokens each, between a pool and a "
        f"page_major host tier: engine cpu"
    )
    axes.set_title(_where(report), fontsize=9)
    return figure


def _where(report: dict[str, Any]) -> str:
    """Text with machine, versions and date."""
    machine = report["machine"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {report['threads']} threads, torch {report['torch']}, "
        f"{report['date']}{', --quick' if report.get('quick') else ''}"
    )
