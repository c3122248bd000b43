"""Arguments that several commands have."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.refusal import shown


def whole(text: str, most: int = (1 << 31) - 1) -> int:
    """Type of an argument: a whole number from 1 to `most`."""
    # Python converts no more than 4300 digits.
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and 1 <= int(text) <= most):
        value = text if len(text) <= 20 else shown(text)
        raise argparse.ArgumentTypeError(f"{value} is not a whole number from 1 to {most}")
    return int(text)


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
