"""One entry of the lists of what sgl-kvpool touches of SGLang."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Seam"]


@dataclass(frozen=True)
class Seam:
    """One thing of SGLang that sgl-kvpool uses.

    Attributes
    ----------
    target : str
        Dotted path.
    parameters : tuple of str
        Names the callable must take, in this order though not without others between; empty for what is
        not called by us with arguments.
    hooked : bool
        True if we wrap it, so that it must be found wrapped afterwards.
    members : tuple of str
        Names a collection must contain.
    added : tuple of str
        Names that we put into a collection, so that it must contain them afterwards.
    """

    target: str
    parameters: tuple[str, ...] = ()
    hooked: bool = True
    members: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
