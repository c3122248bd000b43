"""Text of a run, from its records: what is wrong, what is not known, servers, targets and numbers."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from scripts.kit.records import StepRecord

#: Most lines of failed tests, of faster splits, and of a step's numbers; results.jsonl has all.
_MOST_TESTS, _MOST_SPLITS, _MOST_NUMBERS = 20, 12, 40
_NO_GPU = "without a GPU: no kernel was checked, times mean nothing, a tile table must not be committed"


def text(
    facts: dict[str, Any],
    records: Sequence[StepRecord],
    failed_tests: Sequence[dict[str, Any]],
    tile_table: dict[str, Any] | None,
) -> str:
    """The text, which ends with a line break.

    `facts`: Facts of the first line of results; "gpus_at_end" after the run.
    `records`: All steps; those that were not reached have the status "missing".
    `failed_tests`: "test" and "reason" of each.
    `tile_table`: "text", "reasons", "wrong" and "splits" of the tile table to commit.
    """
    table = tile_table or {"wrong": (), "splits": ()}
    lines = [
        *_head(facts, records),
        *_section("WRONG", _wrong(records, failed_tests, table["wrong"])),
        *_section("NOT KNOWN", _not_known(records)),
        *(_table(tile_table) if tile_table else ()),
        *_section("TARGETS of speed, which do not fail the run", _targets(records)),
        *_section("NUMBERS", _numbers(records)),
    ]
    return "\n".join(lines) + "\n"


def _section(title: str, found: Iterable[str]) -> list[str]:
    lines = [f"  {line}".rstrip() for line in found]
    return ["", title, *lines] if lines else []


def _head(facts: dict[str, Any], records: Sequence[StepRecord]) -> Iterator[str]:
    versions = facts.get("versions", {})
    gpus = facts.get("gpus") or [{}]
    now, then = gpus[0], (facts.get("gpus_at_end") or gpus)[0]
    yield (
        f"{facts.get('gpu') or 'no GPU'}, driver {now.get('driver', 'unknown')}, "
        f"torch {versions.get('torch')}, triton {versions.get('triton')}, {facts.get('date')}"
    )
    yield f"commit {facts.get('commit') or 'unknown'}, sources {str(facts.get('sources_sha256'))[:12]}"
    if facts.get("gpu") is None:
        yield _NO_GPU
    else:
        clocks = [str(one.get("sm_clock_mhz", "?")) for one in (now, then)]
        yield (
            f"SM clock {' and at the end '.join(clocks)} MHz, highest "
            f"{now.get('sm_clock_max_mhz', '?')} MHz, power limit {now.get('power_limit_w', '?')} W"
        )
    counts = Counter(record.status for record in records)
    yield f"{len(records)} steps: " + ", ".join(f"{count} {status}" for status, count in counts.items())


def _wrong(
    records: Sequence[StepRecord], tests: Sequence[dict[str, Any]], tiles: Sequence[str]
) -> Iterator[str]:
    yield from (f"{line['test']}: {line['reason']}" for line in tests[:_MOST_TESTS])
    if len(tests) > _MOST_TESTS:
        yield f"and {len(tests) - _MOST_TESTS} more tests"
    yield from (f"tile: {line}" for line in tiles)
    for record in records:
        if record.status == "failed":
            yield f"{record.name} failed: {record.reason}"


def _not_known(records: Sequence[StepRecord]) -> Iterator[str]:
    for record in records:
        if record.status not in ("ok", "failed"):
            yield f"{record.name} {record.status}: {record.reason}"
        left = next((one.value for one in record.measurements if one.metric == "cases not reached"), None)
        if left:
            yield f"{record.name}: {left:.0f} cases not reached"
        notes = Counter(one.note for one in record.measurements if one.value is None and one.kind != "target")
        yield from (f"{record.name}: {count} numbers: {note}" for note, count in notes.items())


def _table(table: dict[str, Any]) -> Iterator[str]:
    """Lines of the tile table, not indented so that it can be pasted."""
    yield from ("", "TILE TABLE TO COMMIT, in sgl_kvpool/attention/decode_config.py", "")
    yield from (*table["text"].splitlines(), "")
    yield from (f"  {line}" for line in table["reasons"])
    if table["splits"]:
        yield f"  splits: {len(table['splits'])} workloads where others than the rule's are clearly faster"
        yield from (f"    {line}" for line in table["splits"][:_MOST_SPLITS])


def _targets(records: Sequence[StepRecord]) -> Iterator[str]:
    for one in (one for record in records for one in record.measurements if one.kind == "target"):
        state, _, note = one.note.partition("; ")
        yield f"{state:14} {one.metric.removeprefix('target: ')}: {note}"


def _numbers(records: Sequence[StepRecord]) -> Iterator[str]:
    """What every step has measured; of sweeps of tiles the last lines alone."""
    for record in records:
        shown = [one.verdict for one in record.measurements if one.value is not None and one.kind != "target"]
        most = 3 if record.name.startswith("tiles-") else _MOST_NUMBERS
        yield f"{record.name}, {record.seconds:.0f} s"
        yield from (f"  {line}" for line in shown[-most:])
        if len(shown) > most:
            yield f"  and {len(shown) - most} more in results.jsonl"
