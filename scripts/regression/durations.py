"""How long steps take: shown before a run, so that nobody takes a time limit for it.

Those of a GPU are estimates: no GPU has run a step yet. Those of a CPU were seen on one with two cores. A run
with --compare shows what the older run's steps took instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch

from regression.records import Run
from regression.runner import Step, in_words

__all__ = ["in_all", "with_durations"]

#: Seconds by pattern of names; the first that fits. A server starts in 60 to 90 s, and answers for two
#: minutes; one of a checkpoint loads it first, and answers GSM8K and retrieval.
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
    """Steps with what each is expected to take.

    Parameters
    ----------
    steps : sequence of Step
        One that has an `expected_s` keeps it.
    on_gpu : bool
    old : Run, optional
        Steps that were ok there take as long as there.
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
    """A line about how long these steps take together; empty if there are none."""
    if not steps:
        return ""
    seconds = sum(step.expected_s for step in steps)
    whence = "as in the older run" if old is not None else "estimated" if on_gpu else "as on two cores"
    return f"{len(steps)} steps, about {in_words(seconds)} in all ({whence}); --minutes ends a run earlier"
