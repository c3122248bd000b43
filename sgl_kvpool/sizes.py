"""Sizes that callers give: whole numbers of any integer type, and nothing else. A leaf module."""

from __future__ import annotations

from operator import index

__all__ = ["whole_number"]


def whole_number(name: str, value: object, at_least: int = 1) -> int:
    """`value` as int, from any integer type but bool; ValueError that names it otherwise."""
    kind = "a positive integer" if at_least == 1 else f"an integer of at least {at_least}"
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name}={value!r} is not {kind}") from None
    if number < at_least or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not {kind}")
    return number
