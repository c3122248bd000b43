"""The exception for configurations that are refused, how a command line prints it, and a check of numbers."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from operator import index


@dataclass(frozen=True)
class Way:
    """A way out of a refusal: flags of a command line to leave out, and words (--flag=value) to add.

    `text` is its clause of the message; of ways with one text each works.
    """

    text: str
    without: tuple[str, ...] = ()
    add: tuple[str, ...] = ()

    @property
    def flags(self) -> set[str]:
        """Flags that it changes."""
        return {*self.without, *flags_of(self.add)}


class Refusal(ValueError):
    """Refuses a configuration at start; the text names the value, the reason and what to use instead.

    `problem` and the clauses of `ways`, joined by "or", are the two halves of the text. A way that is no
    change of a command line is only a clause.
    """

    #: Whether one line on stderr replaces the traceback if the exception is not caught.
    without_traceback = False

    def __init__(self, problem: str, *ways: Way | str) -> None:
        clauses = dict.fromkeys(way if isinstance(way, str) else way.text for way in ways)
        super().__init__("; ".join([problem, ", or ".join(clauses)] if ways else [problem]))
        self.problem, self.ways = problem, ways


def flags_of(words: Iterable[str]) -> set[str]:
    """Flags of a command line."""
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def leave_out(*flags: str, text: str = "leave it out") -> Way:
    """The way without some flags."""
    return Way(text, without=flags)


def leave_out_one(*flags: str, text: str = "leave out one of the two") -> tuple[Way, ...]:
    """The ways without one of some flags."""
    return tuple(Way(text, without=(flag,)) for flag in flags)


def use_words(*words: str, without: tuple[str, ...] = (), then: str = "") -> Way:
    """The way with other words; `then` ends its clause."""
    leave = f" and leave out {', '.join(without)}" if without else ""
    return Way(f"use {' '.join(words).replace('=', ' ')}{leave}{then}", without, words)


def use_values(flag: str, values: Iterable[str]) -> tuple[Way, ...]:
    """The ways with another value of a flag."""
    values = tuple(values)
    return tuple(Way(use(values), add=(f"{flag}={value}",)) for value in values)


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
