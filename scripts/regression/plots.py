"""PNG plots of a run, if matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from regression.records import StepRecord

__all__ = ["draw"]

#: File, title, metrics of servers, unit.
_OF_SERVERS = (
    (
        "accuracy.png",
        "mean distance of log-probabilities",
        ("distance of log-probabilities to stock", "distance of log-probabilities to bf16"),
        "nats",
    ),
    (
        "first_token.png",
        "time to first token",
        tuple(f"time to first token, {name}" for name in ("cold", "device hit", "host hit")),
        "ms",
    ),
    ("throughput.png", "generated tokens per second", ("throughput",), "tokens/s"),
)
_MOST_BARS = 60


def draw(records: Sequence[StepRecord], out: Path, title: str) -> list[Path] | None:
    """Draw all plots that have data; returns the files, or None without matplotlib.

    Parameters
    ----------
    records : sequence of StepRecord
    out : Path
        Folder of the plots.
    title : str
        Machine and commit, above every plot.
    """
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    drawn = []
    for name, what, metrics, unit in _OF_SERVERS:
        bars: dict[str, dict[str, float]] = {}
        for metric in metrics:
            for record in records:
                for one in record.measurements:
                    if one.metric == metric and one.value is not None:
                        label = metric.rpartition(", ")[2] if ", " in metric else metric.rpartition(" to ")[2]
                        bars.setdefault(record.name, {})[label] = one.value
        if bars:
            drawn.append(_bars(out / name, f"{what}\n{title}", bars, unit))
    ratios = {
        f"{record.name}: {one.metric}": {"ratio": one.value}
        for record in records
        for one in record.measurements
        if one.kind == "kernel_ratio" and one.value is not None and "times as fast" in one.metric
    }
    if ratios:
        most = dict(list(ratios.items())[:_MOST_BARS])
        drawn.append(_bars(out / "attention.png", f"mla_decode, times as fast as a peer\n{title}", most, "x"))
    return drawn


def _bars(path: Path, title: str, bars: dict[str, dict[str, float]], unit: str) -> Path:
    """Horizontal bars, one group per name."""
    from matplotlib import pyplot

    labels = list(dict.fromkeys(label for values in bars.values() for label in values))
    height = 0.8 / len(labels)
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.3 * len(bars) * max(1, len(labels) / 2)))
    for number, label in enumerate(labels):
        places = [at for at, values in enumerate(bars.values()) if label in values]
        lengths = [values[label] for values in bars.values() if label in values]
        axes.barh([at + number * height for at in places], lengths, height, label=label)
    axes.set_yticks([at + 0.4 - height / 2 for at in range(len(bars))], list(bars), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(title, fontsize=8)
    if len(labels) > 1:
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
