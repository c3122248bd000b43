"""Final report of a run on the terminal: steps, servers, targets, and steps that were not run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from regression.records import Measurement, StepRecord

__all__ = ["print_report", "server_rows"]

_COLUMNS = {
    "log-p to stock": "distance of log-probabilities to stock",
    "to bf16": "distance of log-probabilities to bf16",
    "same top": "same top token as bf16",
    "tokens/s": "throughput",
    "x stock": "throughput, ratio to stock",
    "cold ms": "time to first token, cold",
    "device": "time to first token, device hit",
    "host": "time to first token, host hit",
    "bytes": "bytes per token and layer",
    "pool": "tokens in the pool",
    "GSM8K": "GSM8K",
}


def server_rows(records: Iterable[StepRecord]) -> list[tuple[str, list[str]]]:
    """Name and shown values of each step that started a server."""
    found = []
    for record in records:
        values = {one.metric: one.value for one in record.measurements if one.value is not None}
        if "start of the server" in values:
            shown = [f"{values[m]:.4g}" if m in values else "" for m in _COLUMNS.values()]
            found.append((record.name, shown))
    return found


def print_report(records: Sequence[StepRecord]) -> None:
    """Print the report."""
    print(f"\n{'step':34} {'status':12} {'seconds':>8} {'numbers':>8}")
    for record in records:
        print(f"{record.name:34} {record.status:12} {record.seconds:8.0f} {len(record.measurements):8}")
    rows = server_rows(records)
    if rows:
        print(f"\n{'server':34} " + " ".join(f"{name:>14}" for name in _COLUMNS))
        for name, shown in rows:
            print(f"{name:34} " + " ".join(f"{text:>14}" for text in shown))
    targets = _of_kind(records, "target")
    if targets:
        print("\nspeed targets (a missed target does not fail the run)")
        for one in targets:
            state, _, note = one.note.partition("; ")
            print(f"  {state:14} {one.metric.removeprefix('target: ')}: {note}")
    for title, statuses in (("SKIPPED", ("skipped",)), ("FAILED", ("failed", "timed out", "interrupted"))):
        chosen = [record for record in records if record.status in statuses]
        if chosen:
            print(f"\n{title}: {len(chosen)} of {len(records)} steps")
            for record in chosen:
                print(f"  {record.name}: {record.reason}")


def _of_kind(records: Iterable[StepRecord], kind: str) -> list[Measurement]:
    return [one for record in records for one in record.measurements if one.kind == kind]
