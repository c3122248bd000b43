"""Subclasses of SGLang's pools, host pools and attention backends for rows of this package's layouts."""

from typing import TypeVar

_Method = TypeVar("_Method")
_MARK = "_overrides_sglang"


def overrides(method: _Method) -> _Method:
    """Mark a method that SGLang calls on its own class too; that class must have it.

    The marked methods of a hook group's classes are hook points of the group. A base class alone would not
    tell: a method that SGLang has renamed overrides nothing.
    """
    setattr(method, _MARK, True)
    return method


def is_override(member: object) -> bool:
    return hasattr(member.fget if isinstance(member, property) else member, _MARK)
