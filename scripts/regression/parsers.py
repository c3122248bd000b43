"""Conversion of the benchmarks' JSON files and pytest's junit files into measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from regression.records import Measurement, read_lines

__all__ = [
    "arrangements",
    "attention",
    "codec",
    "isolated_tests",
    "junit",
    "lines",
    "rates",
    "tiles",
    "transfer",
]

#: Fields of rows that identify the workload.
_WORKLOAD = ("kind", "heads", "batch", "context_tokens", "queries_per_list", "arrangement")


def _load(folder: Path, name: str = "results.json") -> dict[str, Any]:
    found = json.loads((folder / name).read_text("utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{name} contains {type(found).__name__}, expected an object")
    return found


def _rows(report: dict[str, Any], name: str) -> list[dict[str, Any]]:
    rows = report[name]
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{name!r} is empty: nothing was measured")
    return rows


def codec(folder: Path) -> list[Measurement]:
    """Measurements of bench_codec.py."""
    found = []
    for row in _rows(_load(folder), "results"):
        what = f"{row['device']} {row['operation']} {row['layout']}, {row['tokens']} rows"
        # CPU speeds depend on other work on the machine: they are shown, not compared.
        on_cpu = row["device"] == "cpu"
        ratio, rate, target = ("fact",) * 3 if on_cpu else ("kernel_ratio", "kernel_time", "target")
        layout = row["layout"]
        found += [
            Measurement(f"{what}: speed to a copy", row["ratio_to_copy"], "x", ratio, layout=layout),
            Measurement(what, row["gb_per_s"], "GB/s", rate, layout=layout),
        ]
        if row["target"] is not None:
            name = f"target: {what}: {row['target']} of the speed of a copy"
            state = "passed" if row["passed"] else "missed"
            found.append(Measurement(name, float(row["passed"]), "", target, note=state, layout=layout))
    return found


def attention(folder: Path) -> list[Measurement]:
    """Measurements of bench_attention.py: ratios to peers and times; our wrong results fail the step."""
    report = _load(folder)
    dry = report["device_kind"] != "cuda"
    found, wrong = [], 0
    for row in _rows(report, "results"):
        words = [f"{name}={row[name]}" for name in _WORKLOAD if name in row]
        what = f"{row['runner']} {row['layout']} {' '.join(words)}"
        ours = row["runner"] == "kvpool"
        layout = row["layout"] if ours else ""
        if row["status"] != "measured":
            wrong += ours and row["status"] in ("wrong", "failed")
            note = f"{row['status']}: {row['reason']}"
            found.append(Measurement(what, None, "us", "kernel_time", "lower", note=note, layout=layout))
            continue
        us = row["us"] if row["graph_us"] is None else row["graph_us"]
        kind = "fact" if dry else "kernel_time"
        found.append(Measurement(what, us, "us", kind, "lower", layout=layout))
        if dry:
            continue
        for peer, ratio in row.get("times_as_fast_as", {}).items():
            found.append(_ratio(f"{what}: times as fast as {peer}", ratio, layout=layout))
        if row.get("time_to_layer_major") is not None:
            ratio = row["time_to_layer_major"]
            found.append(_ratio(f"{what}: time to layer_major", ratio, "lower", layout=layout))
    found.append(
        Measurement("wrong or failed results of mla_decode", wrong, "results", "count", "lower", at_most=0)
    )
    for target in report["targets"]:
        states = {"passed": 1.0, "missed": 0.0}
        found.append(
            Measurement(
                f"target: {target['target']}, {target['need']}",
                states.get(target["state"]),
                "",
                "target",
                note="; ".join(filter(None, (target["state"], target["note"]))),
            )
        )
    return found


def rates(folder: Path) -> list[Measurement]:
    """Measurements of `bench rates`, also of an interrupted run."""
    found, failed = [], []
    for row in _rows(_load(folder), "results"):
        if row["status"] != "measured":
            failed.append(f"{row['job']}: {row['reason']}")
            continue
        more = "".join(
            f", {name} {row['job'][name]}" for name in ("sums", "warp_groups") if name in row["job"]
        )
        what = f"{row.get('name', row['job']['what'])}{more}"
        for name, value in row.items():
            if name in ("job", "status", "name"):
                continue
            metric = f"{what}: {name}"
            if isinstance(value, bool):
                found.append(Measurement(metric, float(value), "", "fact"))
            else:
                better = "lower" if name == "us" or name.startswith("clocks") else "higher"
                found.append(Measurement(metric, value, "", "kernel_time", better))
    note = "; ".join(failed[:3])
    failures = Measurement(
        "measurements that failed", len(failed), "", "count", "lower", at_most=0, note=note
    )
    return [*found, failures]


def tiles(folder: Path) -> list[Measurement]:
    """Measurements of `bench tiles`, also of an interrupted run. A wrong tile of the table fails the step."""
    from sgl_kvpool.commands.bench.tiles.tile_table import choose

    report = _load(folder)
    rows = _rows(report, "results")
    on_cpu = report["device"] == "cpu"
    found = []
    for row in rows:
        job = row["job"]
        if row["status"] != "measured" or job["part"] == "check":
            continue
        tile = ", ".join(f"{name} {value}" for name, value in job["tile"].items())
        what = (
            f"{job['layout']} {job['kind']}, {job['heads']} heads, batch {job['batch']}, context "
            f"{job['context']}; {tile}; {job['splits']} splits"
        )
        us = row["us"] if row.get("graph_us") is None else row["graph_us"]
        kind = "fact" if on_cpu else "kernel_time"
        found.append(Measurement(what, us, "us", kind, "lower", layout=job["layout"]))
    choice = choose(rows)
    for name, wrong, most in (
        ("tiles of the table that are wrong or fail", choice.wrong_in_table, 0),
        (
            "other tiles that are wrong or fail",
            [x for x in choice.wrong if x not in choice.wrong_in_table],
            None,
        ),
    ):
        note = "; ".join(wrong[:3])
        found.append(Measurement(name, len(wrong), "tiles", "count", "lower", at_most=most, note=note))
    return found


def transfer(folder: Path) -> list[Measurement]:
    """Measurements of bench_transfer.py, on a CPU or a GPU."""
    report = _load(folder)
    if "engines" in report:
        return _transfer_gpu(report)
    found = []
    for row in _rows(report, "cpu_engine"):
        what = f"cpu engine {row['layout']} {row['arrangement']}, {row['pages']} pages"
        for direction in ("to_host", "to_device"):
            for peer in ("copy", "torch"):
                name = f"{what}, {direction}: speed to {peer}"
                found.append(_ratio(name, row[f"{direction}_of_{peer}"], layout=row["layout"]))
    for row in report["conversions"]:
        what = f"cpu engine {row['layout']} as {row['host_layout']}"
        for direction in ("to_host", "to_device"):
            name = f"{what}, {direction}: speed to torch"
            found.append(_ratio(name, row[f"{direction}_of_torch"], layout=row["layout"]))
    return found


def _transfer_gpu(report: dict[str, Any]) -> list[Measurement]:
    # Results are written after each shape: an interrupted benchmark has the first shapes, without SGLang's
    # results.
    found = []
    for row in [*_rows(report, "engines"), *report.get("sglang", [])]:
        if "failed" in row:
            note = f"not measured: {row['failed']}"
            found.append(Measurement(row["peer"], None, "x", "kernel_ratio", note=note))
            continue
        ours = "engine" in row
        order = "scattered" if row.get("scattered", True) else "in order"
        pair = f"{row['engine']} {row['layout']}/{row['host_layout']} {row['arrangement']}" if ours else ""
        what = f"{pair or row['peer']} {order}, {row['pages']} pages"
        layout = row["layout"] if ours else ""
        for name, value in row.items():
            if name.endswith(("_of_pinned_copy", "_of_pinned_copies")):
                found.append(_ratio(f"{what}: {name}", value, layout=layout))
            elif name.endswith("_model_step_ratio"):
                found.append(_ratio(f"{what}: {name}", value, "lower", layout=layout))
            elif name.endswith("_submit_us"):
                found.append(
                    Measurement(f"{what}: {name}", value, "us", "kernel_time", "lower", layout=layout)
                )
    if not report.get("ended"):
        return found
    missed = report["missed_targets"]
    found.append(
        Measurement(
            "targets of transfers that are missed",
            len(missed),
            "targets",
            "target",
            "lower",
            note="; ".join(["missed", *missed] if missed else ["passed"]),
        )
    )
    return found


def arrangements(folder: Path) -> list[Measurement]:
    """Measurements of bench_arrangements.py."""
    found = []
    for row in _rows(_load(folder), "results"):
        layout = row["layout"]
        for kind in ("decode", "pages"):
            sizes = f"{row['decoded_rows']} rows" if kind == "decode" else f"{row['moved_pages']} pages"
            for name, times in row[kind].items():
                what = f"{kind} {layout} {name}, {sizes}"
                found.append(Measurement(what, times["us"], "us", "kernel_time", "lower", layout=layout))
                if name != "layer_major":
                    ratio = times["to_layer_major"]
                    found.append(_ratio(f"{what}: time to layer_major", ratio, "lower", layout=layout))
    return found


def _ratio(
    name: str, value: float, better: str = "higher", *, layout: str = "", note: str = ""
) -> Measurement:
    return Measurement(name, value, "x", "kernel_ratio", better, layout=layout, note=note)


def junit(folder: Path) -> list[Measurement]:
    """Measurements of pytest's --junitxml: tests passed (at least 1), failed (at most 0) and skipped."""
    try:
        root = ElementTree.parse(folder / "junit.xml").getroot()
    except ElementTree.ParseError as error:
        raise ValueError(f"junit.xml: {error}") from None
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failing, reasons = [], []
    for case in root.iter("testcase"):
        kinds = {child.tag for child in case}
        state = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[state] += 1
        if state == "failed":
            failing.append(case.get("name", "?"))
        if state == "skipped":
            reasons += [child.get("message", "") for child in case if child.tag == "skipped"]
    return _counts(counts, failing, reasons)


def _counts(counts: dict[str, int], failing: list[str], reasons: list[str]) -> list[Measurement]:
    note = "; ".join(failing[:5]) + (f"; and {len(failing) - 5} more" if len(failing) > 5 else "")
    why = "; ".join(sorted(set(reasons))[:3])
    return [
        Measurement("tests passed", counts["passed"], "tests", "count", at_least=1),
        Measurement("tests failed", counts["failed"], "tests", "count", "lower", at_most=0, note=note),
        Measurement("tests skipped", counts["skipped"], "tests", "count", "lower", note=why),
    ]


def isolated_tests(folder: Path) -> list[Measurement]:
    """Measurements of `regression.isolated_tests`, also of an interrupted run."""
    found = read_lines(folder / "tests.jsonl")
    tests = {line["test"]: line for line in found if "test" in line}
    collected = [line["collected"] for line in found if "collected" in line]
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for line in tests.values():
        counts[line["outcome"]] += 1
    failing = [
        f"{_short(name)}: {line['reason']}" for name, line in tests.items() if line["outcome"] == "failed"
    ]
    reasons = [line["reason"] for line in tests.values() if line["outcome"] == "skipped"]
    left = max(0, collected[-1] - sum("::" in name for name in tests))
    return [
        *_counts(counts, failing, reasons),
        Measurement("tests not run", left, "tests", "count", "lower", at_most=0),
    ]


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


Parser = Callable[[Path], list[Measurement]]
