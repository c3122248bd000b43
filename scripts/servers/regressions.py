"""Comparison of two runs: metrics that became worse by more than the margin of their kind."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from scripts.kit.records import KINDS, Measurement, Run


@dataclass
class Comparison:
    """Result of a comparison.

    `regressions`, `improvements`: One line each.
    `remarks`: What limits the comparison as a whole, one line each.
    `not_compared`: Number of metrics that were not compared, by reason.
    """

    regressions: list[str] = field(default_factory=list)
    improvements: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    not_compared: Counter = field(default_factory=Counter)
    compared: int = 0

    @property
    def status(self) -> int:
        """Exit status: 1 for a regression, 2 if no metric could be compared."""
        if self.regressions:
            return 1
        return 0 if self.compared else 2

    def lines(self) -> list[str]:
        found = [f"REGRESSION  {line}" for line in self.regressions]
        found += [f"better      {line}" for line in self.improvements]
        found += self.remarks
        found += [f"not compared: {count} metrics: {reason}" for reason, count in self.not_compared.items()]
        if not self.compared and not self.regressions:
            found.append("no metric could be compared")
        found.append(
            f"{self.compared} metrics compared, {len(self.regressions)} regressions, "
            f"{len(self.improvements)} better beyond their margins"
        )
        return found


def compare(old: Run, new: Run) -> Comparison:
    """Compare a run with an older one.

    `old`, `new`: Runs of the same schema version, which `read_run` has checked.
    Returns: result; a missing metric is a regression, unless its step was skipped, or its step or layout was
      not requested.
    """
    found = Comparison()
    speeds = _why_no_speeds(old.facts, new.facts)
    layouts = new.facts.get("options", {}).get("layouts")
    if not old.is_complete:
        found.remarks.append("the older run did not finish; metrics that it lacks are ignored")
    for name, step in old.steps.items():
        count = len(step.measurements)
        now = new.steps.get(name)
        if now is None or now.status == "skipped":
            if count:
                why = "not among the steps of the newer run" if now is None else f"skipped: {now.reason}"
                found.not_compared[f"{name}: {why}"] += count
            continue
        if step.status == "ok" and now.is_bad:
            found.regressions.append(f"{name}: was ok, {now.status}: {now.reason}")
        values = {one.metric: one for one in now.measurements}
        for before in step.measurements:
            _one(found, name, before, values.get(before.metric), speeds, layouts)
    for name, step in new.steps.items():
        known = {one.metric for one in old.steps[name].measurements} if name in old.steps else set()
        fresh = sum(one.metric not in known for one in step.measurements)
        if fresh:
            found.not_compared[f"{name}: new"] += fresh
    return found


def _one(
    found: Comparison, step: str, before: Measurement, now: Measurement | None, speeds: str, layouts: Any
) -> None:
    kind = KINDS[before.kind]
    what = f"{step}: {before.metric}"
    if before.kind == "fact" or before.value is None:
        return
    if kind.is_speed and speeds:
        found.not_compared[speeds] += 1
        return
    if now is None:
        if layouts and before.layout and before.layout not in layouts:
            found.not_compared[f"layout {before.layout} was not requested"] += 1
            return
        found.regressions.append(f"{what}: was {before.value:.6g} {before.unit}, is missing")
        return
    if now.value is None:
        # The benchmark's time ran out, or a peer does not load: reported, but not a regression.
        if now.note.startswith(("not run", "skipped", "not measured")):
            found.not_compared[f"{step}: {now.note}"[:160]] += 1
        else:
            found.regressions.append(
                f"{what}: was {before.value:.6g} {before.unit}, not measured: {now.note}"
            )
        return
    found.compared += 1
    gain = now.value - before.value
    if before.better == "lower":
        gain = -gain
    margin = max(kind.absolute, kind.relative * abs(before.value))
    if abs(gain) <= margin:
        return
    change = f" ({now.value / before.value - 1:+.1%})" if before.value else ""
    line = f"{what}: {before.value:.6g} to {now.value:.6g} {before.unit}{change}; margin {margin:.3g}"
    (found.improvements if gain > 0 else found.regressions).append(line)


def _why_no_speeds(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Reason why speeds of two runs cannot be compared, or an empty text."""
    if old.get("gpu") is None or new.get("gpu") is None:
        if old.get("gpu") == new.get("gpu"):
            return "speeds on a CPU, which depend on other work on the machine"
        return f"speeds of {old.get('gpu') or 'a CPU'} and {new.get('gpu') or 'a CPU'}"
    if old["gpu"] != new["gpu"]:
        return f"speeds of another GPU: {old['gpu']}, now {new['gpu']}"
    return ""
