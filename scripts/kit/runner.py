"""Runner of steps in sequence, each a process with a log and a time limit; failures do not stop others."""

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.kit.environment import Machine, on_path
from scripts.kit.processes import Ended, run_command
from scripts.kit.records import Measurement, StepRecord
from sgl_kvpool.commands.processes.progress import progress
from sgl_kvpool.commands.processes.worker import signal_name


class Interrupted(BaseException):
    """Ctrl-C, SIGTERM or SIGHUP. A `BaseException`, so that handlers of failures do not catch it."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass(frozen=True)
class Step:
    """One step of a run.

    `name`, `what`: Name of the step and of its folder, and a description in one line, for --list.
    `command`: "{folder}" in a word is the step's folder.
    `limit_s`: Time limit. Except in first light it is several times the expected duration, so that only a
      step that hangs reaches it.
    `parse`: Function from its folder to its measurements, at least one of which must have a value; it raises
      ValueError, KeyError, TypeError or OSError if it cannot read them. None for a step that measures
      nothing.
    `needs`: See `Machine.missing`.
    `requires`: Steps that must succeed before this one; they are selected with it.
    `peers`: Steps whose results it is compared with; they are selected with it.
    `files`: Text files written into its folder before it starts; "{steps}" in the text is the folder of all
      steps.
    `environment`: Variables added to those of this process.
    `expected_s`: Estimated duration; 0 if unknown.
    """

    name: str
    what: str
    command: tuple[str, ...]
    limit_s: float
    parse: Callable[[Path], list[Measurement]] | None
    needs: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    expected_s: float = 0.0


def in_words(seconds: float) -> str:
    """A duration for a person: "40 s", "12 min", "3 h 20 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Make Ctrl-C, SIGTERM and SIGHUP raise `Interrupted` inside the block, once, so that cleanup finishes.

    An ignored SIGHUP, as under nohup, stays ignored.
    """
    endings = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        endings.append(signal.SIGHUP)

    def handler(number: int, _frame: Any) -> None:
        for one in endings:
            signal.signal(one, signal.SIG_IGN)
        raise Interrupted(number)

    before = {one: signal.signal(one, handler) for one in endings}
    try:
        yield
    finally:
        for one, old in before.items():
            signal.signal(one, old)


def run_steps(
    steps: Sequence[Step],
    machine: Machine,
    out: Path,
    *,
    time_limit_scale: float = 1.0,
    minutes: float | None = None,
    ended: Callable[[StepRecord], None],
    say: Callable[[str], None],
) -> list[StepRecord]:
    """Run steps, each after the steps that it requires; one with unmet needs is skipped.

    `out`: Folder for one folder per step, and `logs`.
    `minutes`: Time limit of all steps together; then the running step is ended and the others are skipped.
    `ended`: Called with each record immediately, so that an interruption does not lose it.
    `say`: Called with text for the terminal, including line breaks.
    Returns: one record per step, also after failures.
    Interrupted: after an interruption, once `ended` has received all records.
    """
    records: list[StepRecord] = []
    deadline = time.monotonic() + (minutes * 60 if minutes is not None else float("inf"))
    interrupted: Interrupted | None = None
    (out / "logs").mkdir(parents=True, exist_ok=True)
    for number, step in enumerate(steps, 1):
        reason = _why_not(step, machine, records)
        about = f", about {in_words(step.expected_s)}" if step.expected_s and reason is None else ""
        what = f"[{number}/{len(steps)}] {step.name}{about}"
        if interrupted is not None:
            reason = f"interrupted by {interrupted}"
        elif reason is None and time.monotonic() >= deadline:
            reason = f"the {minutes:g} minutes were spent"
        if reason is not None:
            record = StepRecord(step.name, "skipped", reason)
        else:
            left_s = deadline - time.monotonic()
            try:
                with progress(what):
                    record = _run(step, out, step.limit_s * time_limit_scale, left_s)
            except Interrupted as caught:
                interrupted = caught
                record = StepRecord(step.name, "interrupted", f"by {caught}")
        records.append(record)
        ended(record)
        tail = f": {record.reason}" if record.reason else ""
        say(f"{what}: {record.seconds:.0f} s {record.status}{tail}\n")
    if interrupted is not None:
        raise interrupted
    return records


def _why_not(step: Step, machine: Machine, records: Sequence[StepRecord]) -> str | None:
    missing = machine.missing(step.needs)
    if missing is not None:
        return missing
    for record in records:
        if record.name in step.requires and record.status != "ok":
            return f"needs {record.name}, which was not ok: {record.reason}"
    return None


def _run(step: Step, out: Path, limit_s: float, left_s: float) -> StepRecord:
    folder = out / "steps" / step.name
    folder.mkdir(parents=True, exist_ok=True)
    log = out / "logs" / f"{step.name}.log"
    for name, text in step.files.items():
        (folder / name).write_text(text.replace("{steps}", str(folder.parent)), encoding="utf-8")
    command = [word.replace("{folder}", str(folder)) for word in step.command]
    environment = {**on_path(), **step.environment}
    began = time.monotonic()
    try:
        ended = run_command(command, log=log, cwd=ROOT, environment=environment, limit_s=min(limit_s, left_s))
    except OSError as error:
        return StepRecord(
            step.name, "failed", f"cannot start {command[0]}: {error}", time.monotonic() - began
        )
    # Measurements are kept also after a failure.
    try:
        measurements, unreadable = tuple(step.parse(folder) if step.parse else ()), ""
        twice = [name for name, count in Counter(one.metric for one in measurements).items() if count > 1]
        if twice:  # comparisons look values up by names
            raise ValueError(f"{twice[0]!r} was measured twice")
        if step.parse and all(one.value is None for one in measurements):
            unreadable = f"nothing was measured{f': {measurements[0].note}' if measurements else ''}"
    except (ValueError, KeyError, TypeError, OSError) as error:
        measurements, unreadable = (), f"its results cannot be read: {type(error).__name__}: {error}"
    cut = f"its limit of {limit_s:.0f} s" if limit_s <= left_s else "the end of --minutes"
    status, reason = _verdict(ended, cut, measurements, unreadable, log)
    return StepRecord(step.name, status, reason, ended.seconds, measurements)


def _verdict(
    ended: Ended, cut: str, measurements: Sequence[Measurement], unreadable: str, log: Path
) -> tuple[str, str]:
    """Status and reason of a step that was started; `cut`: what ends it if it lasts too long."""
    reasons = []
    failing = [one.verdict for one in measurements if one.passed is False]
    if failing:
        more = f"; and {len(failing) - 3} more" if len(failing) > 3 else ""
        reasons.append("; ".join(failing[:3]) + more)
    if ended.timed_out:
        return "timed out", "; ".join([f"ended at {cut}", *reasons])
    if ended.returncode < 0:
        reasons.insert(0, f"killed by {signal_name(-ended.returncode)}")
    elif ended.returncode > 0 and not reasons:
        reasons.append(f"exit status {ended.returncode}: {last_line(log)}")
    elif ended.returncode == 0 and unreadable:
        reasons.append(unreadable)
    if ended.left_behind and ended.returncode == 0:
        reasons.append(f"{ended.left_behind} processes outlived it and were killed")
    return ("failed", "; ".join(reasons)) if reasons else ("ok", "")


def last_line(log: Path) -> str:
    """The last non-empty line of a log."""
    lines = [line.strip() for line in log.read_text(errors="replace")[-8000:].splitlines() if line.strip()]
    return lines[-1][:500] if lines else "its log is empty"
