"""first_light.txt: a page with the content of first_light.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["page"]

#: Largest number of failed tests on the page; first_light.json has all.
_MOST_TESTS = 20
_MOST_SPLITS = 12
_REHEARSAL = (
    "A rehearsal without a GPU: its times say nothing about a GPU, and its tile table must not be committed."
)


def page(report: dict[str, Any]) -> str:
    """Page with correct, wrong and unknown results, and the tile table to commit."""
    lines = [
        *_head(report),
        *_section("RIGHT", _right(report)),
        *_section("WRONG", _wrong(report)),
        *_section("NOT KNOWN", _not_known(report)),
        *_table(report),
        *_section("mla_decode", _attention(report)),
        *_section("AN SM, per clock", _rates(report)),
        *_section("CODEC AND TRANSFERS", _others(report)),
    ]
    return "\n".join(lines) + "\n"


def _section(title: str, found: Iterator[str]) -> list[str]:
    lines = [f"  {line}".rstrip() for line in found]
    return ["", title, *lines] if lines else []


def _head(report: dict[str, Any]) -> list[str]:
    versions = report.get("versions", {})
    gpus = report.get("gpus") or [{}]
    now, then = gpus[0], (report.get("gpus_at_end") or gpus)[0]
    counts: dict[str, int] = {}
    for step in report["steps"]:
        counts[step["status"]] = counts.get(step["status"], 0) + 1
    clocks = [str(one.get("sm_clock_mhz", "?")) for one in (now, then)]
    commit = report.get("commit") or "unknown"
    return [
        f"First light: {report.get('gpu') or 'no GPU'}, driver {now.get('driver', 'unknown')}, "
        f"torch {versions.get('torch')}, triton {versions.get('triton')}",
        f"commit {commit}{' with uncommitted changes' if report.get('dirty') else ''}, sources "
        f"{str(report.get('sources_sha256'))[:12]}, {report.get('date')}",
        f"SM clock {' and at the end '.join(clocks)} MHz, highest {now.get('sm_clock_max_mhz', '?')} MHz, "
        f"power limit {now.get('power_limit_w', '?')} W",
        "steps: " + ", ".join(f"{count} {status}" for status, count in counts.items()),
        *([] if report.get("gpu") else [_REHEARSAL]),
    ]


def _measured(step: dict[str, Any], metric: str) -> float | None:
    return next((one["value"] for one in step["measurements"] if one["metric"] == metric), None)


def _right(report: dict[str, Any]) -> Iterator[str]:
    for step in report["steps"]:
        passed = _measured(step, "tests passed")
        if passed:
            yield f"{step['name']}: {passed:.0f} tests passed, {_measured(step, 'tests skipped'):.0f} skipped"
    for name, one in _benchmarks(report, "tiles-"):
        right = [row for row in one["results"] if row["status"] == "measured"]
        if right:
            tiles = {(row["job"]["layout"], str(row["job"]["tile"])) for row in right}
            yield f"{name}: {len(right)} results of {len(tiles)} tiles agree with float64"
    for name, one in _benchmarks(report, "attention"):
        right = [row for row in one["results"] if row["status"] == "measured"]
        own = sum(row["runner"] == "kvpool" for row in right)
        yield f"{name}: {own} results of mla_decode and {len(right) - own} of peers agree with float64"


def _wrong(report: dict[str, Any]) -> Iterator[str]:
    tests = report["failed_tests"]
    if tests:
        yield f"{len(tests)} tests failed:"
        yield from (f"  {line['test']}: {line['reason']}" for line in tests[:_MOST_TESTS])
        if len(tests) > _MOST_TESTS:
            yield f"  and {len(tests) - _MOST_TESTS} more"
    if report["tile_table"]:
        yield from (f"tile: {line}" for line in report["tile_table"]["wrong"])
    for name, one in _benchmarks(report, "attention"):
        for row in one["results"]:
            if row["status"] in ("wrong", "failed"):
                yield f"{name}: {row['runner']} {_workload(row)}: {row['status']}: {row['reason']}"
    for name, one in _benchmarks(report, "rates"):
        for row in one["results"]:
            if row["status"] != "measured":
                yield f"{name}: {row['job']}: {row['reason']}"
    for step in report["steps"]:
        if step["status"] == "failed":
            yield f"{step['name']} failed: {step['reason']}"


def _not_known(report: dict[str, Any]) -> Iterator[str]:
    for step in report["steps"]:
        left = _measured(step, "tests not run")
        if step["status"] not in ("ok", "failed"):
            more = f"; {left:.0f} tests not run" if left else ""
            yield f"{step['name']} {step['status']}: {step['reason']}{more}"
        elif left:
            yield f"{step['name']}: {left:.0f} tests not run"
    for name, one in _benchmarks(report, "attention"):
        absent = [f"{peer} ({why})" for peer, why in one["peers"].items() if why != "loaded"]
        if absent:
            yield f"{name}: missing peers: {'; '.join(absent)}"


def _table(report: dict[str, Any]) -> Iterator[str]:
    """Lines of the tile table, not indented so that it can be pasted."""
    table = report["tile_table"]
    if not table:
        return
    yield from ("", "TILE TABLE TO COMMIT, in sgl_kvpool/attention/decode_config.py", "")
    yield from table["text"].splitlines()
    yield ""
    yield from (f"  {line}" for line in table["reasons"])
    if table["splits"]:
        yield (
            f"  splits: {len(table['splits'])} workloads where other splits than the rule's are "
            "clearly faster"
        )
        yield from (f"    {line}" for line in table["splits"][:_MOST_SPLITS])


def _workload(row: dict[str, Any]) -> str:
    return (
        f"{row['layout']}, {row['kind']}, {row['heads']} heads, batch {row['batch']}, "
        f"context {row['context_tokens']}"
    )


def _attention(report: dict[str, Any]) -> Iterator[str]:
    for _, one in _benchmarks(report, "attention"):
        for row in one["results"]:
            if row["runner"] == "kvpool" and row["status"] == "measured":
                us = row["us"] if row["graph_us"] is None else row["graph_us"]
                peers = "".join(f"; {x:.2f}x {peer}" for peer, x in row.get("times_as_fast_as", {}).items())
                yield f"{_workload(row)}: {us:.1f} us, {row['rows_per_s'] / 1e9:.2f} G rows/s{peers}"
        for target in one["targets"]:
            found = "" if target["found"] is None else f", {target['found']}x"
            yield f"target {target['state']}: {target['target']}, {target['need']}{found}"


def _rates(report: dict[str, Any]) -> Iterator[str]:
    for _, one in _benchmarks(report, "rates"):
        rows = [row for row in one["results"] if row["status"] == "measured"]
        for row in rows:
            for field, value in row.items():
                if field.endswith("_per_clock_and_sm"):
                    yield f"{row['name']}: {value:g} {field.removesuffix('_per_clock_and_sm')}"
            if row["job"]["what"] == "subnormals":
                said = [f"{kind}: {'yes' if x else 'no'}" for kind, x in row.items() if isinstance(x, bool)]
                yield f"{row['name']}? {', '.join(said)}"
            if row["job"]["what"] == "peaks":
                peaks = row["copy_gb_per_s"], row["matmul_tflop_per_s"]
                yield "a copy: {:.0f} GB/s, bf16 products: {:.0f} TFLOP/s".format(*peaks)
        products = [row for row in rows if row["job"]["what"] == "products" and row["job"]["sums"] == 1]
        for name in dict.fromkeys(row["name"] for row in products):
            by_groups = [
                f"{row['clocks_per_product_of_the_sm']:g} with {row['job']['warp_groups']}"
                for row in products
                if row["name"] == name
            ]
            yield f"{name}: clocks per product of the SM {', '.join(by_groups)} warp groups"
        yield from _gathers([row for row in rows if row["job"]["what"] == "gather"])


def _gathers(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines with the fastest number of programs for each row size, order and method."""
    best: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        key = tuple(row["job"][name] for name in ("row_bytes", "order", "how"))
        if key not in best or row["gb_per_s"] > best[key]["gb_per_s"]:
            best[key] = row
    yield from (f"{row['name']}: {row['gb_per_s']:.0f} GB/s" for row in best.values())


def _others(report: dict[str, Any]) -> Iterator[str]:
    for name, one in _benchmarks(report, "codec"):
        for row in one["results"]:
            if row["device"] != "cuda":
                continue
            met = {None: "", True: ", target met", False: f", target of {row['target']} missed"}[
                row["passed"]
            ]
            yield f"{name}: {row['operation']} {row['layout']}: {row['ratio_to_copy']:.2f} of a copy{met}"
    for name, one in _benchmarks(report, "transfer"):
        rows = one.get("engines", [])
        most = max((row["pages"] for row in rows), default=0)
        for row in rows:
            if row["pages"] == most and row["scattered"] and row["arrangement"] == "layer_major":
                what = f"{row['engine']} {row['layout']} to {row['host_layout']}, {most} scattered pages"
                rates = row["to_host_of_pinned_copy"], row["to_device_of_pinned_copy"]
                yield "{}: {}: {:.2f} of a pinned copy's rate out, {:.2f} back".format(name, what, *rates)


def _benchmarks(report: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, one in report["benchmarks"].items():
        if name.startswith(prefix):
            yield name, one
