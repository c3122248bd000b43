"""What a benchmark's rows are in a run of all steps: measurements, each with its kind."""

import json
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from scripts.kit.records import Measurement

#: The runner of cases that name none.
OURS = "kvpool"
#: Fields that are measurements: pattern, unit, kind, better. The first match counts, and other numbers are
#: facts that other fields say.
_FIELDS = (
    ("us", "us", "kernel_time", "lower"),
    ("*_submit_us", "us", "kernel_time", "lower"),
    ("gb_per_s", "GB/s", "kernel_time", "higher"),
    ("to_*_gb_per_s", "GB/s", "kernel_time", "higher"),
    ("*_step_ratio", "x", "kernel_ratio", "lower"),
    ("time_to_layer_major", "x", "kernel_ratio", "lower"),
    ("*_of_*cop*", "x", "kernel_ratio", "higher"),
)


def is_ours(case: dict[str, Any]) -> bool:
    """Whether a case measures this package, not a peer."""
    return case.get("runner", OURS) == OURS


def what(case: dict[str, Any]) -> str:
    """A case in words, which identify it."""
    return " ".join(
        f"{name}={','.join(map(str, value.values())) if isinstance(value, dict) else value}"
        for name, value in case.items()
    )


def measurements(folder: Path) -> list[Measurement]:
    """Measurements of a benchmark's results.json, also of a run that was ended early.

    Times and ratios of a CPU depend on other work on the machine: they are facts, which are not compared.

    ValueError, KeyError: if it is not a benchmark's.
    """
    report = json.loads((folder / "results.json").read_text("utf-8"))
    on_cpu, rows = report["device"] == "cpu", report["results"]
    found = [one for row in rows if row["job"].get("part") != "check" for one in _of_row(row, on_cpu)]
    for one in report.get("targets", ()):
        value = {"passed": 1.0, "missed": 0.0}.get(one["state"])
        note = "; ".join(filter(None, (one["state"], one["note"])))
        kind = "fact" if on_cpu else "target"
        found.append(Measurement(f"target: {one['target']}, {one['need']}", value, "", kind, note=note))
    measured = sum(row["status"] == "measured" and is_ours(row["job"]) for row in rows)
    wrong, left = report.get("wrong", ()), report.get("left", 0)
    # Fewer results of a run that was cut off are no regression.
    kind = "fact" if any(row["status"] == "not run" for row in rows) else "count"
    return [
        *found,
        *([Measurement("cases not reached", left, "cases", "fact")] if left else []),
        Measurement("measured results", measured, "results", kind, at_least=None if left else 1),
        Measurement(
            "wrong or failed results", len(wrong), "results", "count", "lower", at_most=0,
            note="; ".join(wrong[:3]),
        ),
    ]  # fmt: skip


def _of_row(row: dict[str, Any], on_cpu: bool) -> Iterator[Measurement]:
    case, name = row["job"], what(row["job"])
    layout = case.get("layout", "") if is_ours(case) else ""
    if row["status"] != "measured":
        reason = f"{row['status']}: {row['reason']}"
        yield Measurement(name, None, "", "kernel_time", note=reason, layout=layout)
        return
    values = {**row, "us": row["graph_us"]} if row.get("graph_us") is not None else row
    for field, value in values.items():
        rule = next((rule for rule in _FIELDS if fnmatch(field, rule[0])), None)
        if isinstance(value, bool):
            yield Measurement(f"{name}: {field}", float(value), "", "fact", layout=layout)
        elif rule is not None and value is not None:
            kind = "fact" if on_cpu else rule[2]
            yield Measurement(f"{name}: {field}", value, rule[1], kind, rule[3], layout=layout)
    for peer, ratio in row.get("times_as_fast_as", {}).items():
        kind = "fact" if on_cpu else "kernel_ratio"
        yield Measurement(f"{name}: times as fast as {peer}", ratio, "x", kind, layout=layout)
