"""The exception for configurations that are refused, how a command line prints it, and a check of numbers."""

import sys
from collections.abc import Iterable
from operator import index


class Refusal(ValueError):
    """Refuses a configuration at start; the text names the value, the reason and what to use instead."""

    #: Whether one line on stderr replaces the traceback if the exception is not caught.
    without_traceback = False


def line(text: object) -> str:
    """The text as one line, for stderr; names of files in it need not be UTF-8."""
    return "sgl-kvpool: " + " ".join(str(text).encode(errors="backslashreplace").decode().split())


def shown(value: object) -> str:
    """The repr of a user's value, as at most 80 characters of one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def use(names: Iterable[str]) -> str:
    """The last clause of a message: the accepted values."""
    first, *others = names
    return f"use one of: {', '.join([first, *others])}" if others else f"use {first}"


def print_without_traceback(refusal: Refusal) -> None:
    """Print an uncaught refusal as the last line on stderr, without a traceback; the exit status stays 1.

    For refusals of a command line. The refusal propagates as an exception, so that SGLang ends the processes
    it has started and a program that calls SGLang's parser can catch it.
    """
    refusal.without_traceback = True
    previous = sys.excepthook
    if getattr(previous, "prints_refusals", False):
        return

    def say(kind, error, traceback):
        if getattr(error, "without_traceback", False):
            print(line(error), file=sys.stderr)
        else:
            previous(kind, error, traceback)

    say.prints_refusals = True  # type: ignore[attr-defined]
    sys.excepthook = say


def whole_number(name: str, value: object, at_least: int = 1) -> int:
    """`value` as int, from any integer type but bool; otherwise a ValueError that names it."""
    kind = "a positive integer" if at_least == 1 else f"an integer of at least {at_least}"
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name}={value!r} is not {kind}") from None
    if number < at_least or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not {kind}")
    return number
