"""Arguments that several commands have."""

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.refusal import shown

#: SGLang's arguments whose values are secrets, and fields of inline JSON and parts of URLs that are.
SECRETS = ("--api-key", "--admin-api-key", "--ssl-keyfile-password", "--watermark-config")
_FIELD = re.compile(
    r'(?i)("\w*(?:secret\w*|pass(?:w|phrase)\w*|credential\w*|(?:access|api|private)_?key|token|authorization)"'
    r'\s*:\s*)(?:"(?:[^"\\]|\\.)*"|\[[^]]*\]|[^\s",}]+)'
)
_PASSWORD = re.compile(r"(://[^/@\s:]*:)[^/@\s]+(?=@)")


def whole(text: str, most: int = (1 << 31) - 1) -> int:
    """Type of an argument: a whole number from 1 to `most`."""
    # Python converts no more than 4300 digits.
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and 1 <= int(text) <= most):
        value = text if len(text) <= 20 else shown(text)
        raise argparse.ArgumentTypeError(f"{value} is not a whole number from 1 to {most}")
    return int(text)


def number(text: str, what: str, limit: float, least: float | None = None) -> float:
    """A number of at most `limit` and at least `least` (else above 0); `what` names it in the error."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; give {what}") from None
    if not (value > 0 if least is None else least <= value) or value > limit:  # also refuses NaN
        above = "above 0" if least is None else f"of {least:g} or more"
        raise argparse.ArgumentTypeError(f"{text} is not {what}; give a number {above}, at most {limit:g}")
    return value


@contextmanager
def naming(argument: str, path: object) -> Iterator[None]:
    """Raise ValueError with the argument's name if what it names cannot be opened or decoded in the block."""
    try:
        yield
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{argument} {shown(str(path))}: {reason}; name another") from None


def add_layouts(parser: argparse._ActionsContainer, which: str) -> None:
    """Add --layouts, a list without repetition in the given order; `which` says which are meant."""
    parser.add_argument("--layouts", type=_layouts, metavar="NAME[,NAME...]", help=f"which layouts{which}")


def _layouts(text: str) -> list[MLAKVCacheLayout]:
    try:
        return list(dict.fromkeys(MLAKVCacheLayout(name.strip()) for name in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_server_arguments(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Add what follows `--`; `more` ends its help."""
    parser.add_argument(
        "server_arguments",
        nargs="*",
        metavar="-- ARGUMENT",
        help=f"after --: further arguments of sglang serve, for every layout{more}",
    )


def given(words: Sequence[str], flags: Iterable[str]) -> str | None:
    """The first name in server arguments, or a file after --config, that SGLang's parser takes for a flag."""
    names = [word.partition("=")[0] for word in words]
    for before, word in pairwise(words):
        names += _names_in(Path(word)) if before == "--config" else []  # SGLang reads no other form
    return next((x for x in names if len(x) > 2 and any(flag.startswith(x) for flag in flags)), None)


def _names_in(file: Path) -> list[str]:
    """Names of arguments that a server's YAML file sets; ValueError if the file has no arguments."""
    import yaml  # installed with SGLang; without --config this process needs neither

    try:
        with naming("--config", file), file.open(encoding="utf-8") as text:
            found = yaml.safe_load(text)  # of a string, an error would show the line, perhaps with a secret
    except yaml.YAMLError as error:
        raise ValueError(f"--config {file} is not YAML: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--config {file} contains no arguments: it is a {type(found).__name__}")
    return ["--" + str(name).replace("_", "-") for name, value in found.items() if value is not False]


def without_secrets(words: Sequence[str]) -> list[str]:
    """Server arguments with SECRET in place of secrets."""
    hidden = []
    for before, word in pairwise(["", *words]):
        name, equals, _ = word.partition("=")
        after, own = ("=" not in x and x != "--ssl-keyfile" and given([x], SECRETS) for x in (before, name))
        if after or (own and equals):
            word = "SECRET" if after else f"{name}=SECRET"
        hidden.append(_PASSWORD.sub(r"\1SECRET", _FIELD.sub(r'\1"SECRET"', word)))
    return hidden
