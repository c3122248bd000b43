"""A folder of results: its journal results.jsonl, written after each step, and the text of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.kit.environment import Machine, driver_facts
from scripts.kit.records import SCHEMA, Run, StepRecord, header, resume, write_lines
from scripts.kit.runner import Interrupted, Step, run_steps, signals_interrupt
from scripts.servers import report

__all__ = ["Results"]


class Results:
    """A folder of results.

    `facts`: Facts of the first line of results.
    `steps`: All steps, so that missing steps are reported.
    ValueError: if the folder has results that cannot be continued: of other code or of another GPU, or
      unreadable.
    """

    #: Whether results in the folder are continued; otherwise they are refused.
    continues = False

    def __init__(self, out: Path, facts: dict[str, Any], steps: Sequence[Step]) -> None:
        self.out, self.facts, self.steps = out, facts, list(steps)
        self.journal = out / "results.jsonl"
        self.records: dict[str, StepRecord] = {}
        out.mkdir(parents=True, exist_ok=True)
        if not self.journal.exists():
            write_lines(self.journal, [header(facts)])
            return
        if not self.continues:
            raise ValueError(f"{self.journal} exists already; name another folder with --out")
        run = resume(self.journal)
        for name, meaning in (("sources_sha256", "code"), ("gpu", "GPU")):
            if run.facts.get(name) != facts[name]:
                raise ValueError(
                    f"{out} has results of another {meaning} ({name} {run.facts.get(name)}, here "
                    f"{facts[name]}); name another folder with --out"
                )
        self.facts = {**run.facts, "argv": facts["argv"]}
        self.records = dict(run.steps)

    def lacks(self, name: str) -> bool:
        """Whether a step is to be run: it has not finished with measurements."""
        record = self.records.get(name)
        done = record is not None and (
            record.status == "ok" or (record.status == "failed" and bool(record.measurements))
        )
        return not done

    def run(
        self, steps: Sequence[Step], machine: Machine, *, time_limit_scale: float, minutes: float | None,
        say: Callable[[str], None],
    ) -> int:  # fmt: skip
        """Run steps and write their results; returns the exit status."""
        began, status = time.monotonic(), 0

        def ended(record: StepRecord) -> None:
            if record.status == "skipped" and record.name in self.records:
                return  # keep the earlier, more complete result
            self.records[record.name] = record
            write_lines(self.journal, record.lines())
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
        records = self.records.values()
        if not status:
            bad = any(record.is_bad for record in records)
            status = int(bad or not any(record.status == "ok" for record in records))
        end = {"status": status, "seconds": round(time.monotonic() - began, 1), "gpus": driver_facts()}
        write_lines(self.journal, [{"line": "end", "schema": SCHEMA, **end}])
        self.facts = {**self.facts, "gpus_at_end": end["gpus"]}
        self.write()
        return status

    def all_records(self) -> list[StepRecord]:
        """A record for each step, also for those that were not reached."""
        missing = {step.name: StepRecord(step.name, "missing", "it was not reached") for step in self.steps}
        return list({**missing, **self.records}.values())

    def write(self) -> None:
        """Write files beside the journal; none here."""

    def text(self) -> str:
        """The text of the run."""
        return report.text(self.facts, self.all_records())

    @property
    def as_run(self) -> Run:
        """The results as a `Run`, for a comparison."""
        return Run(self.facts, self.records, True)
