"""Compilation steps in sequence; a step that fails does not stop the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sgl_kvpool.commands.warmup.caches import Cache

__all__ = ["Outcome", "Step", "carry_out"]

#: Lines shown of a compiler's message.
_LINES = 20


@dataclass(frozen=True)
class Step:
    """Code that is compiled at its first use.

    Attributes
    ----------
    name : str
    caches : tuple of Cache
        Caches of the compiled code.
    use : callable
        Uses the code; an exception is reported as the reason of the failure.
    """

    name: str
    caches: tuple[Cache, ...]
    use: Callable[[], object]


@dataclass(frozen=True)
class Outcome:
    """Result of a step.

    Attributes
    ----------
    name : str
    state : str
        "compiled": its caches have new files; "cached": they have not; or "FAILED".
    seconds : float
    reason : str or None
        Reason of a failure.
    """

    name: str
    state: str
    seconds: float
    reason: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.seconds:7.1f} s  {self.state:9}  {self.name}"]
        if self.reason is not None:
            first, *rest = self.reason.strip().splitlines() or ["no message"]
            lines[0] += f": {first}"
            if len(rest) > _LINES:
                rest = ["...", *rest[-_LINES:]]
            lines += [f"    {line}" for line in rest]
        return "\n".join(lines)


def carry_out(steps: Sequence[Step]) -> list[Outcome]:
    """Run all steps in order; prints a line for each."""
    outcomes = []
    for step in steps:
        outcomes.append(_outcome(step))
        print(outcomes[-1], flush=True)
    return outcomes


def _outcome(step: Step) -> Outcome:
    before = [cache.compiled() for cache in step.caches]
    began = time.perf_counter()
    try:
        step.use()
    except Exception as error:  # compilers and loaders raise anything; later steps may still work
        return Outcome(step.name, "FAILED", time.perf_counter() - began, f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - began
    after = [cache.compiled() for cache in step.caches]
    return Outcome(step.name, "cached" if before == after else "compiled", seconds)
