"""Things to compile, one after the other; one that fails does not keep the others from being compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sgl_kvpool.commands.warmup.caches import Cache

__all__ = ["Outcome", "Step", "carry_out"]

#: Lines of a compiler's message that are shown.
_LINES = 20


@dataclass(frozen=True)
class Step:
    """Something that is compiled when it is first used.

    Attributes
    ----------
    name : str
    caches : tuple of Cache
        Where it is kept.
    use : callable
        Uses it; whatever it raises is the reason why it cannot be had.
    """

    name: str
    caches: tuple[Cache, ...]
    use: Callable[[], object]


@dataclass(frozen=True)
class Outcome:
    """What became of a step.

    Attributes
    ----------
    name : str
    state : str
        "compiled": files are new in its caches. "was there": none are. "FAILED".
    seconds : float
    reason : str or None
        Of a failure.
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
    """Use everything once, in order; prints a line for each."""
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
    except Exception as error:  # compilers and loaders fail in any way; what comes after may still work
        return Outcome(step.name, "FAILED", time.perf_counter() - began, f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - began
    after = [cache.compiled() for cache in step.caches]
    return Outcome(step.name, "was there" if before == after else "compiled", seconds)
