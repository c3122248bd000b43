"""Expected durations of steps, shown by --list and before each step.

GPU durations are estimates: no GPU has run a step yet. CPU durations were measured on two cores. A run with
--compare shows the durations of the older run instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch

from regression.records import Run
from regression.runner import Step, in_words

__all__ = ["in_all", "with_durations"]

#: Seconds by pattern of names; the first match counts. A server starts in 60 to 90 s and gets requests for
#: two minutes; a server of a checkpoint also loads it, and answers GSM8K and retrieval.
_ON_GPU = {
    "tests-*_server": 3600,
    "tests-server": 3600,
    "tests-cuda_backend": 240,
    "tests-dsa_rows": 60,
    "tests-*": 100,
    "canonical": 30,
    "codec-quick": 30,
    "codec": 60,
    "attention-quick": 150,
    "attention": 750,
    "transfer-quick": 90,
    "transfer": 420,
    "arrangements*": 60,
    "model-*": 30,
    "*-model-*": 3000,
    "serve-*": 200,
    "tp2-*": 200,
    "memory-*": 100,
}
_ON_CPU = {
    "tests-canonical": 30,
    "canonical": 15,
    "codec-quick": 15,
    "attention-quick": 45,
    "transfer-quick": 100,
    "arrangements-quick": 40,
    "serve-demo-*": 80,
    "*-model-*": 3000,
}


def with_durations(steps: Sequence[Step], *, on_gpu: bool, old: Run | None = None) -> list[Step]:
    """Steps with their expected durations.

    Parameters
    ----------
    steps : sequence of Step
        Steps; an `expected_s` that is set overrides the table.
    on_gpu : bool
    old : Run, optional
        Older run, whose durations are used for steps that were ok.
    """
    table = _ON_GPU if on_gpu else _ON_CPU
    found = []
    for step in steps:
        seconds = step.expected_s or next((s for name, s in table.items() if fnmatch(step.name, name)), 0)
        before = old.steps.get(step.name) if old is not None else None
        if before is not None and before.status == "ok":
            seconds = before.seconds
        found.append(replace(step, expected_s=float(seconds)))
    return found


def in_all(steps: Sequence[Step], *, on_gpu: bool, old: Run | None = None) -> str:
    """Text with the total duration of steps; empty without steps."""
    if not steps:
        return ""
    seconds = sum(step.expected_s for step in steps)
    basis = "as in the older run" if old is not None else "estimate" if on_gpu else "on two cores"
    return f"{len(steps)} steps, about {in_words(seconds)} in all ({basis}); --minutes ends a run earlier"
