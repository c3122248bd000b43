"""A folder of results: its journal, written after each step, and the run as text and as JSON beside it."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.kit.environment import Machine, driver_facts
from scripts.kit.outputs import replace_file
from scripts.kit.records import SCHEMA, Run, StepRecord, read_run, write_lines
from scripts.kit.runner import Interrupted, Step, run_steps, signals_interrupt
from scripts.servers import report


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
        """Run steps and write their results; returns the exit status."""
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
            status = int(bad or not any(record.status == "ok" for record in records.values()))
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
        """Write the JSON and the text with the results so far."""
        found = json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n"
        replace_file(self.out / f"{self.name}.json", found)
        replace_file(self.out / f"{self.name}.txt", self.text())

    def text(self) -> str:
        """The text of the run."""
        return report.text(self.run_of.facts, self.all_records(), self._failed_tests(), self._tile_table())

    def as_json(self) -> dict[str, Any]:
        """Facts, steps, failed tests, the tile table, and what the benchmarks wrote."""
        what = {step.name: step.what for step in self.steps}
        return {
            "schema": SCHEMA,
            **self.run_of.facts,
            "steps": [{**one.as_line(), "what": what.get(one.name, "")} for one in self.all_records()],
            "failed_tests": self._failed_tests(),
            "tile_table": self._tile_table(),
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

    def _tile_table(self) -> dict[str, Any] | None:
        """Tile table from the rows of all sweeps; None without one."""
        from scripts.bench.tiles.tile_table import choose, split_findings, table_text

        swept = [one for name, one in self._benchmarks().items() if name.startswith("tiles-")]
        rows = [row for one in swept for row in one["results"]]
        if not any(row["status"] == "measured" and row["job"]["part"] == "tile" for row in rows):
            return None
        choice = choose(rows)
        splits = split_findings(rows)
        text = table_text(choice)
        return {"text": text, "reasons": choice.reasons, "wrong": choice.wrong, "splits": splits}


def _json(path: Path) -> Any:
    """JSON that a step has written; None if it is incomplete."""
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError:
        return None
