"""Expected durations of steps, shown by --list and before each step.

GPU durations are estimates: no GPU has run a step yet. CPU durations were measured on two cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch

from scripts.kit.runner import Step, in_words

__all__ = ["in_all", "with_durations"]

#: Seconds by pattern of names; the first match counts. A server starts in 60 to 90 s and gets requests for
#: two minutes; a server of a checkpoint also loads it, and answers GSM8K and retrieval.
_ON_GPU = {
    "tests-*_server": 3600,
    "tests-server": 3600,
    "tests-cuda_backend": 240,
    "tests-dsa_rows": 60,
    "tests-*": 100,
    "codec-quick": 30,
    "codec": 60,
    "attention-quick": 150,
    "attention": 750,
    "transfer-quick": 90,
    "transfer": 420,
    "model-*": 30,
    "*-model-*": 3000,
    "serve-*": 200,
    "tp2-*": 200,
    "memory-*": 100,
}
_ON_CPU = {
    "tests-canonical": 30,
    "codec-quick": 15,
    "attention-quick": 45,
    "transfer-quick": 100,
    "serve-demo-*": 80,
    "*-model-*": 3000,
}


def with_durations(steps: Sequence[Step], *, on_gpu: bool) -> list[Step]:
    """Steps with their expected durations; an `expected_s` that is set overrides the table."""
    table = _ON_GPU if on_gpu else _ON_CPU

    def expected_s(step: Step) -> float:
        return step.expected_s or next((s for name, s in table.items() if fnmatch(step.name, name)), 0.0)

    return [replace(step, expected_s=float(expected_s(step))) for step in steps]


def in_all(steps: Sequence[Step], *, on_gpu: bool) -> str:
    """Text with the total duration of steps; empty without steps."""
    if not steps:
        return ""
    seconds, basis = sum(step.expected_s for step in steps), "estimate" if on_gpu else "on two cores"
    return f"{len(steps)} steps, about {in_words(seconds)} in all ({basis}); --minutes ends a run earlier"
