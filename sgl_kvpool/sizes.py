"""Check of sizes given by callers: whole numbers of any integer type. A leaf module."""

from __future__ import annotations

from operator import index

__all__ = ["whole_number"]


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
