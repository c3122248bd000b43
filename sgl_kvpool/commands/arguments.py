"""Arguments that several commands have."""

import argparse

from sgl_kvpool.layout import MLAKVCacheLayout


def whole(text: str, most: int = (1 << 31) - 1) -> int:
    """Type of an argument: a whole number from 1 to `most`."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 to {most}")
    return int(text)


def add_layouts(parser: argparse.ArgumentParser, which: str) -> None:
    """Add --layouts, a list without repetition in the given order; `which` says which are meant."""
    parser.add_argument("--layouts", type=_layouts, metavar="NAME[,NAME...]", help=f"which layouts{which}")


def _layouts(text: str) -> list[MLAKVCacheLayout]:
    try:
        return list(dict.fromkeys(MLAKVCacheLayout.parse(name.strip()) for name in text.split(",")))
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
