"""The exception for configurations that are refused, and how a command line prints it."""

from __future__ import annotations

import sys
from collections.abc import Iterable

__all__ = ["Refusal", "line", "say_alone", "use"]


class Refusal(ValueError):
    """A configuration that is refused at start; the text names the value, the reason and the way out."""

    #: Whether one line on stderr replaces the traceback if the exception is not caught.
    said_alone = False


def line(text: object) -> str:
    """The text as one line, for stderr."""
    return "sgl-kvpool: " + " ".join(str(text).split())


def use(names: Iterable[str]) -> str:
    """The last clause of a message: the accepted values."""
    first, *others = names
    return f"use one of: {', '.join([first, *others])}" if others else f"use {first}"


def say_alone(refusal: Refusal) -> None:
    """Print an uncaught refusal as the last line on stderr, without a traceback; the exit status stays 1.

    For refusals of a command line. The refusal propagates as an exception, so that SGLang ends the processes
    it has started and a program that calls SGLang's parser can catch it.
    """
    refusal.said_alone = True
    previous = sys.excepthook
    if getattr(previous, "says_refusals", False):
        return

    def say(kind, error, traceback):
        if getattr(error, "said_alone", False):
            print(line(error), file=sys.stderr)
        else:
            previous(kind, error, traceback)

    say.says_refusals = True  # type: ignore[attr-defined]
    sys.excepthook = say
