"""Measurements from what steps have written: a benchmark's JSON, pytest's junit file, lines of tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from scripts.kit.records import Measurement, read_lines

__all__ = ["Parser", "benchmark", "isolated_tests", "junit", "lines", "tiles"]

Parser = Callable[[Path], list[Measurement]]

#: Lists of rows in the benchmarks' files.
_LISTS = ("results", "engines", "sglang", "cpu_engine", "conversions")
#: Fields that identify a row, of itself or of its "job".
_IDENTITY = (
    *("runner", "engine", "peer", "operation", "name", "device", "layout", "host_layout", "arrangement"),
    *("scattered", "pages", "tokens", "kind", "heads", "batch", "context", "context_tokens", "tile"),
    *("splits", "queries_per_list", "sums", "warp_groups"),
)
#: Fields that are measurements: pattern, unit, kind, better. The first match counts.
_FIELDS = (
    ("us", "us", "kernel_time", "lower"),
    ("*_submit_us", "us", "kernel_time", "lower"),
    ("clocks_*", "clocks", "kernel_time", "lower"),
    ("*gb_per_s", "GB/s", "kernel_time", "higher"),
    ("*_per_clock_and_sm", "", "kernel_time", "higher"),
    ("*tflop_per_s", "TFLOP/s", "kernel_time", "higher"),
    ("*_model_step_ratio", "x", "kernel_ratio", "lower"),
    ("time_to_layer_major", "x", "kernel_ratio", "lower"),
    ("*_of_*cop*", "x", "kernel_ratio", "higher"),
    ("*_of_torch", "x", "kernel_ratio", "higher"),
    ("ratio_to_copy", "x", "kernel_ratio", "higher"),
)
#: Rates that the row's other fields say.
_OF_OTHERS = ("*_link_gb_per_s", "row_gb_per_s")


def benchmark(folder: Path, *, wrong_at_most: int | None = 0) -> list[Measurement]:
    """Measurements of a benchmark's results.json, also of an interrupted run.

    Times and ratios of a CPU depend on other work on the machine: they are facts, which are not compared.

    ValueError: if nothing was measured.
    """
    report = _load(folder)
    rows = [row for name in _LISTS for row in report.get(name, ())]
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"no rows in {', '.join(_LISTS)}: nothing was measured")
    found: list[Measurement] = []
    wrong: list[str] = []
    measured = 0
    for row in rows:
        device = row.get("device", report.get("device_kind", report.get("device")))
        on_cpu = device == "cpu" or "cpu_engine" in report
        fields = {**row.get("job", {}), **row}
        if fields.get("part") == "check":
            continue
        what = " ".join(f"{name}={_short_text(fields[name])}" for name in _IDENTITY if name in fields)
        ours = "peer" not in row and row.get("runner", "kvpool") == "kvpool"
        layout = fields.get("layout", "") if ours else ""
        status = row.get("status", "not measured" if "failed" in row else "measured")
        if status != "measured":
            reason = f"{status}: {row.get('reason', row.get('failed'))}"
            found.append(Measurement(what, None, "", "kernel_time", note=reason, layout=layout))
            wrong += [f"{what}: {reason}"] if ours and status in ("wrong", "failed") else []
            continue
        measured += ours
        found += _of_row(what, row, layout, on_cpu)
    note = "; ".join(wrong[:3])
    # Fewer results of a run that was cut off are no regression.
    kind = "fact" if any(row.get("status") == "not run" for row in rows) else "count"
    return [
        *found,
        *_targets(report),
        Measurement("measured results", measured, "results", kind, at_least=1),
        Measurement(
            "wrong or failed results", len(wrong), "results", "count", "lower",
            at_most=wrong_at_most, note=note,
        ),
    ]  # fmt: skip


def _of_row(what: str, row: dict[str, Any], layout: str, on_cpu: bool) -> Iterator[Measurement]:
    """Measurements of one row."""
    values = {**row, "us": row["graph_us"]} if row.get("graph_us") is not None else row
    for name, value in values.items():
        rule = next((rule for rule in _FIELDS if fnmatch(name, rule[0])), None)
        if isinstance(value, bool) and name not in (*_IDENTITY, "gate", "passed"):
            yield Measurement(f"{what}: {name}", float(value), "", "fact", layout=layout)
        elif rule is not None and value is not None and not any(fnmatch(name, one) for one in _OF_OTHERS):
            kind = "fact" if on_cpu else rule[2]
            yield Measurement(f"{what}: {name}", value, rule[1], kind, rule[3], layout=layout)
    for peer, ratio in row.get("times_as_fast_as", {}).items():
        kind = "fact" if on_cpu else "kernel_ratio"
        yield Measurement(f"{what}: times as fast as {peer}", ratio, "x", kind, layout=layout)
    if row.get("target") is not None:
        state, kind = ("passed" if row["passed"] else "missed"), "fact" if on_cpu else "target"
        name = f"target: {what}: {row['target']} of the speed of a copy"
        yield Measurement(name, float(row["passed"]), "", kind, note=state, layout=layout)


def _targets(report: dict[str, Any]) -> Iterator[Measurement]:
    """Measurements of the targets that a report judges as a whole."""
    for one in report.get("targets", ()):
        value = {"passed": 1.0, "missed": 0.0}.get(one["state"])
        note = "; ".join(filter(None, (one["state"], one["note"])))
        yield Measurement(f"target: {one['target']}, {one['need']}", value, "", "target", note=note)
    if report.get("ended"):
        missed = report["missed_targets"]
        note = "; ".join(["missed", *missed] if missed else ["passed"])
        yield Measurement(
            "targets of transfers that are missed", len(missed), "targets", "target", "lower", note=note
        )


def tiles(folder: Path) -> list[Measurement]:
    """Measurements of `bench tiles`; a wrong tile fails the step if the tile table has it."""
    from scripts.bench.tiles.tile_table import choose

    wrong = choose(_load(folder)["results"]).wrong_in_table
    return [
        *benchmark(folder, wrong_at_most=None),
        Measurement(
            "tiles of the table that are wrong or fail", len(wrong), "tiles", "count", "lower", at_most=0,
            note="; ".join(wrong[:3]),
        ),
    ]  # fmt: skip


def _load(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "results.json").read_text("utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"results.json contains {type(found).__name__}, expected an object")
    return found


def _short_text(value: Any) -> str:
    return ",".join(map(str, value.values())) if isinstance(value, dict) else str(value)


def junit(folder: Path) -> list[Measurement]:
    """Measurements of pytest's --junitxml: tests passed (at least 1), failed (at most 0) and skipped."""
    try:
        root = ElementTree.parse(folder / "junit.xml").getroot()
    except ElementTree.ParseError as error:
        raise ValueError(f"junit.xml: {error}") from None
    tests = []
    for case in root.iter("testcase"):
        kinds = {child.tag: child.get("message", "") for child in case}
        state = (
            "failed" if {"failure", "error"} & set(kinds) else "skipped" if "skipped" in kinds else "passed"
        )
        tests.append((state, case.get("name", "?"), kinds.get("skipped", "")))
    return _counts(tests)


def _counts(tests: Sequence[tuple[str, str, str]]) -> list[Measurement]:
    """Measurements of tests, each an outcome, a name and the reason why it was skipped."""
    count = {state: sum(one[0] == state for one in tests) for state in ("passed", "failed", "skipped")}
    failing = [name for state, name, _ in tests if state == "failed"]
    note = "; ".join(failing[:5]) + (f"; and {len(failing) - 5} more" if len(failing) > 5 else "")
    why = "; ".join(sorted({reason for state, _, reason in tests if state == "skipped"})[:3])
    return [
        Measurement("tests passed", count["passed"], "tests", "count", at_least=1),
        Measurement("tests failed", count["failed"], "tests", "count", "lower", at_most=0, note=note),
        Measurement("tests skipped", count["skipped"], "tests", "count", "lower", note=why),
    ]


def isolated_tests(folder: Path) -> list[Measurement]:
    """Measurements of `kit.isolated_tests`, also of an interrupted run."""
    found = read_lines(folder / "tests.jsonl")
    tests = {line["test"]: line for line in found if "test" in line}
    collected = [line["collected"] for line in found if "collected" in line]
    left = max(0, collected[-1] - sum("::" in name for name in tests))
    named = [
        (one["outcome"], f"{_short(name)}: {one['reason']}", one["reason"]) for name, one in tests.items()
    ]
    return [*_counts(named), Measurement("tests not run", left, "tests", "count", "lower", at_most=0)]


def _short(test: str) -> str:
    """Name of a test without the folder of its file."""
    file, _, name = test.partition("::")
    return f"{Path(file).stem.removeprefix('test_')}: {name}" if name else file


def lines(folder: Path) -> list[Measurement]:
    """Measurements in measurements.jsonl, which programs of this package write; empty lines are ignored."""
    text = (folder / "measurements.jsonl").read_text("utf-8")
    return [Measurement.from_json(_object(line)) for line in text.splitlines() if line.strip()]


def _object(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{line[:80]!r} is not JSON: {error}") from None
