"""A folder of results: its journal, written after each step, and the run as text and as JSON beside it.

The text says what is wrong and what is not known, and has the fastest tiles, targets and numbers.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.bench.tile_table import Findings, findings
from scripts.kit.environment import Machine, driver_facts
from scripts.kit.records import SCHEMA, Run, StepRecord, read_run, write_lines
from scripts.kit.runner import Interrupted, Step, run_steps, signals_interrupt
from sgl_kvpool.folders import replace_file

#: Most lines of failed tests, of faster splits, and of a step's numbers; results.jsonl has all.
_MOST_TESTS, _MOST_SPLITS, _MOST_NUMBERS = 20, 12, 40
_NO_GPU = "without a GPU: no kernel was checked, times mean nothing, tiles must not be taken from them"


class Results:
    """A folder of results, which a later call continues.

    `name`: Name of the text and of the JSON, without suffix.
    `facts`: Facts of the first line of results.
    `steps`: All steps, so that missing steps are reported.
    ValueError: if the folder has results that cannot be continued: of other code or of another GPU, or
      unreadable.
    """

    def __init__(self, out: Path, name: str, facts: dict[str, Any], steps: Sequence[Step]) -> None:
        self.out, self.name, self.steps = out, name, list(steps)
        self.journal = out / "results.jsonl"
        self.run_of = Run(facts)
        out.mkdir(parents=True, exist_ok=True)
        if not self.journal.exists():
            write_lines(self.journal, [self.run_of.first_line()])
            return
        self.run_of = read_run(self.journal)
        for field, meaning in (("sources_sha256", "code"), ("gpu", "GPU")):
            if self.run_of.facts.get(field) != facts[field]:
                raise ValueError(
                    f"{out} has results of another {meaning} ({field} {self.run_of.facts.get(field)}, here "
                    f"{facts[field]}); name another folder with --out"
                )

    def lacks(self, name: str) -> bool:
        """Whether a step is to be run: it has not finished with measurements."""
        record = self.run_of.steps.get(name)
        failed = record is not None and record.status == "failed" and bool(record.measurements)
        return not failed and (record is None or record.status != "ok")

    def run(
        self, steps: Sequence[Step], machine: Machine, *, time_limit_scale: float, minutes: float | None,
        say: Callable[[str], None],
    ) -> int:  # fmt: skip
        began, status, records = time.monotonic(), 0, self.run_of.steps

        def ended(record: StepRecord) -> None:
            if record.status == "skipped" and record.name in records:
                return  # keep the earlier, more complete result
            records[record.name] = record
            write_lines(self.journal, [record.as_line()])
            self.write()

        self.write()
        try:
            with signals_interrupt():
                run_steps(
                    steps, machine, self.out, time_limit_scale=time_limit_scale, minutes=minutes, ended=ended,
                    say=say,
                )  # fmt: skip
        except Interrupted as caught:
            status = 128 + caught.number
        if not status:
            bad = any(record.is_bad for record in records.values())
            wrong = any(record.is_wrong for record in records.values())
            status = 1 if wrong else 3 if bad else int(all(one.status != "ok" for one in records.values()))
        end = {"status": status, "seconds": round(time.monotonic() - began, 1), "gpus": driver_facts()}
        write_lines(self.journal, [{"line": "end", "schema": SCHEMA, **end}])
        self.run_of.facts["gpus_at_end"], self.run_of.is_complete = end["gpus"], True
        self.write()
        return status

    def all_records(self) -> list[StepRecord]:
        """A record for each step, also for those that were not reached."""
        missing = {step.name: StepRecord(step.name, "missing", "it was not reached") for step in self.steps}
        return list({**missing, **self.run_of.steps}.values())

    def write(self) -> None:
        found = json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n"
        replace_file(self.out / f"{self.name}.json", found)
        replace_file(self.out / f"{self.name}.txt", self.text())

    def text(self) -> str:
        records, tiles = self.all_records(), self._tiles()
        wrong = _wrong(records, self._failed_tests(), tiles.wrong)
        lines = [
            *_head(self.run_of.facts, records),
            *_section("WRONG", wrong),
            *_section("NOT KNOWN", _not_known(records)),
            *_section("FASTEST TILES, for the table in sgl_kvpool/attention/decode_config.py", tiles.fastest),
            *_section("FASTER SPLITS than the rule's", tiles.splits[:_MOST_SPLITS]),
            *_section("TARGETS of speed, which do not fail the run", _targets(records)),
            *_section("NUMBERS", _numbers(records)),
        ]
        return "\n".join(lines) + "\n"

    def as_json(self) -> dict[str, Any]:
        """Facts, steps, failed tests, the fastest tiles, and what the benchmarks wrote."""
        what = {step.name: step.what for step in self.steps}
        return {
            "schema": SCHEMA,
            **self.run_of.facts,
            "steps": [{**one.as_line(), "what": what.get(one.name, "")} for one in self.all_records()],
            "failed_tests": self._failed_tests(),
            "tiles": asdict(self._tiles()),
            "benchmarks": self._benchmarks(),
        }

    def _failed_tests(self) -> list[dict[str, Any]]:
        rows = [row for one in self._benchmarks().values() for row in one["results"]]
        bad = [row for row in rows if "test" in row["job"] and row["status"] in ("wrong", "failed")]
        return [{"test": row["job"]["test"], "reason": row["reason"]} for row in bad]

    def _benchmarks(self) -> dict[str, Any]:
        files = sorted((self.out / "steps").glob("*/results.json"))
        found = {file.parent.name: _json(file) for file in files}
        return {name: one for name, one in found.items() if isinstance(one, dict)}

    def _tiles(self) -> Findings:
        swept = [one for name, one in self._benchmarks().items() if name.startswith("tiles-")]
        return findings([row for one in swept for row in one["results"]])


def _json(path: Path) -> Any:
    """JSON that a step has written; None if it is incomplete."""
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError:
        return None


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
        if record.is_wrong:
            yield f"{record.name} {record.status}: {record.reason}"


def _not_known(records: Sequence[StepRecord]) -> Iterator[str]:
    for record in records:
        if record.status not in ("ok", "failed"):
            yield f"{record.name} {record.status}: {record.reason}"
        left = next((one.value for one in record.measurements if one.metric == "cases not reached"), None)
        if left:
            yield f"{record.name}: {left:.0f} cases not reached"
        notes = Counter(one.note for one in record.measurements if one.value is None and one.kind != "target")
        yield from (f"{record.name}: {count} numbers: {note}" for note, count in notes.items())


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
