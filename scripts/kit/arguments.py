"""Types of command-line arguments: lists separated by commas."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

__all__ = ["names", "numbers"]


def names(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Type of a list of some of the allowed names, which keeps their order."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(filter(None, text.split(",")))
        if not found or set(found) - set(allowed):
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(allowed)}")
        return tuple(name for name in allowed if name in found)

    return parse


def numbers(text: str) -> tuple[int, ...]:
    """Positive numbers; 32k is 32768."""
    try:
        found = tuple(int(n[:-1]) * 1024 if n.endswith("k") else int(n) for n in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive numbers such as 1,16 or 8k,32k")
    return found
