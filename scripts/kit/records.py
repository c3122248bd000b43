"""Measurements, their kinds, and the lines of results.jsonl."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

#: Schema version of results.jsonl. Increase it when a field or the meaning of a metric changes.
SCHEMA = 2


@dataclass(frozen=True)
class Kind:
    """Comparison rule for a metric's values in two runs.

    `relative`, `absolute`: Margin: a value may be worse by the larger of `relative` times the old value and
      `absolute`.
    `is_speed`: Whether it is compared only between runs on GPUs of the same name.
    """

    relative: float
    absolute: float
    is_speed: bool = False


KINDS = {
    # Medians of many launches; the peer is measured in the same run.
    "kernel_ratio": Kind(0.05, 0, is_speed=True),
    # Clocks and temperature differ from run to run.
    "kernel_time": Kind(0.10, 0, is_speed=True),
    # Few requests; the peer is another server of the same run.
    "server_ratio": Kind(0.10, 0, is_speed=True),
    # Few requests; Python's scheduling is in the time.
    "server_time": Kind(0.20, 0, is_speed=True),
    # Log-probabilities; other kernels round differently.
    "distance": Kind(0.20, 0.005),
    # Shares of positions; a tie can fall to either side.
    "agreement": Kind(0, 0.02),
    # Fewer passing tests or more differing bytes are a regression.
    "count": Kind(0, 0),
    # Bytes and tokens; the free memory of a GPU differs a little.
    "size": Kind(0.005, 0),
    # 1 if a target is met, 0 if it is missed.
    "target": Kind(0, 0, is_speed=True),
    # Reported, never compared.
    "fact": Kind(math.inf, math.inf),
}


@dataclass(frozen=True)
class Measurement:
    """One number of a step.

    `metric`: Name; together with the step's name it is the key of a comparison.
    `value`: Value; None if it could not be measured, with the reason in `note`.
    `kind`: Key of `KINDS`.
    `better`: "higher" or "lower".
    `at_least`, `at_most`: Limits; a value outside of them fails the step.
    `layout`: Layout that was measured, if there is one.
    ValueError: if the kind is unknown, the value is not finite, or value and note are missing.
    """

    metric: str
    value: float | None
    unit: str
    kind: str
    better: str = "higher"
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""
    layout: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.metric}: kind {self.kind!r}, expected one of {', '.join(KINDS)}")
        if self.value is None and not self.note:
            raise ValueError(f"{self.metric}: no value, and no note with the reason")
        for name in ("value", "at_least", "at_most"):
            number = getattr(self, name)
            if number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                raise ValueError(f"{self.metric}: {name} is {number!r}, expected a finite number")

    @property
    def passed(self) -> bool | None:
        """Whether its limits hold; None without limits or without a value."""
        if self.value is None or (self.at_least is None and self.at_most is None):
            return None
        low = self.at_least is None or self.value >= self.at_least
        return low and (self.at_most is None or self.value <= self.at_most)

    @property
    def verdict(self) -> str:
        shown = "not measured" if self.value is None else f"{self.value:.6g} {self.unit}".strip()
        limits = [
            f"{word} {limit:g}"
            for word, limit in (("at least", self.at_least), ("at most", self.at_most))
            if limit is not None
        ]
        note = f" ({self.note})" if self.note else ""
        return f"{self.metric}: {shown}" + (f", limit {' and '.join(limits)}" if limits else "") + note

    @classmethod
    def from_json(cls, found: Any) -> Measurement:
        """Measurement from a line's object; ValueError for other objects."""
        if not isinstance(found, dict):
            raise ValueError(f"a measurement is {type(found).__name__}, expected an object")
        known = {one.name for one in fields(cls)}
        missing = {"metric", "value", "unit", "kind"} - found.keys()
        if missing:
            raise ValueError(f"a measurement without {', '.join(sorted(missing))}: {str(found)[:200]}")
        return cls(**{name: value for name, value in found.items() if name in known})


@dataclass(frozen=True)
class StepRecord:
    """Result of a step.

    `status`: "ok", "failed", "timed out", "interrupted" or "skipped".
    `reason`: Reason if the status is not "ok".
    `measurements`: Measurements, also of a step that failed later.
    """

    name: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    measurements: tuple[Measurement, ...] = ()

    @property
    def is_bad(self) -> bool:
        return self.status not in ("ok", "skipped")

    @property
    def is_wrong(self) -> bool:
        """Whether it failed; a step that timed out is wrong only by what it had measured."""
        return self.status == "failed" or any(one.passed is False for one in self.measurements)

    def as_line(self) -> dict[str, Any]:
        return {"line": "step", "schema": SCHEMA, **asdict(self), "seconds": round(self.seconds, 1)}

    @classmethod
    def from_line(cls, line: dict[str, Any]) -> StepRecord:
        measured = tuple(Measurement.from_json(one) for one in line["measurements"])
        return cls(line["name"], line["status"], line["reason"], line["seconds"], measured)


@dataclass
class Run:
    """Content of a results.jsonl.

    `facts`: Facts of its first line: machine, versions, commit, options.
    `is_complete`: Whether its last line is "end".
    """

    facts: dict[str, Any]
    steps: dict[str, StepRecord] = field(default_factory=dict)
    is_complete: bool = False

    def first_line(self) -> dict[str, Any]:
        return {"line": "run", "schema": SCHEMA, **self.facts}


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Append lines in one write, so that a program that is killed has written all of them or none.

    An incomplete last line, for instance from a full disk, is removed first.
    """
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    with path.open("a+b", buffering=0) as output:
        end = output.seek(0, os.SEEK_END)
        if end and os.pread(output.fileno(), 1, end - 1) != b"\n":
            output.truncate(path.read_bytes().rfind(b"\n") + 1)
        output.write(text.encode())


def read_lines(path: Path) -> list[Any]:
    """Objects of a file of `write_lines`, without an incomplete last line.

    ValueError: if another line is not JSON.
    """
    found = []
    for number, text in enumerate(path.read_text("utf-8").splitlines(keepends=True), 1):
        if not text.endswith("\n"):
            break
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
    return found


def read_run(path: Path) -> Run:
    """Read a results.jsonl; of a step with several lines the last counts.

    ValueError: if the file is not a results.jsonl, or has another schema version.
    """
    lines = read_lines(path)
    if not lines or not isinstance(lines[0], dict) or lines[0].get("line") != "run":
        raise ValueError(f'{path} does not begin with a line of {{"line": "run"}}; give a results.jsonl')
    schemas = {line.get("schema") for line in lines}
    if schemas != {SCHEMA}:
        raise ValueError(
            f"{path} has schema {', '.join(map(str, schemas))}, this program reads {SCHEMA}: run the "
            "regression again at the old commit with this program, or compare with the program of that commit"
        )
    facts = {name: value for name, value in lines[0].items() if name not in ("line", "schema")}
    steps = {line["name"]: StepRecord.from_line(line) for line in lines if line["line"] == "step"}
    return Run(facts, steps, lines[-1]["line"] == "end")
