"""What is refused, and how a command line says so."""

from __future__ import annotations

import sys
from collections.abc import Iterable

__all__ = ["Refusal", "line", "say_alone", "use"]


class Refusal(ValueError):
    """Something that a server is not started with; the text names value, reason and way out."""

    #: Whether a line of its own on stderr takes the place of the traceback, if nobody catches it.
    said_alone = False


def line(text: object) -> str:
    """One line for stderr, whatever breaks a text has."""
    return "sgl-kvpool: " + " ".join(str(text).split())


def use(names: Iterable[str]) -> str:
    """The end of a sentence that says what would be taken."""
    first, *others = names
    return f"use one of: {', '.join([first, *others])}" if others else f"use {first}"


def say_alone(refusal: Refusal) -> None:
    """Make a refusal that nobody catches the last line on stderr, without a traceback; the status stays 1.

    For what a command line requested. It stays an exception on its way, so that SGLang ends what it has
    started, and a program that calls SGLang's parser can catch it.
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
