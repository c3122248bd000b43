"""A difference that a self-check finds."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Difference", "require_same_bytes"]


class Difference(Exception):
    """A check failed; the text names what was checked and, if bytes or values are wrong, the place of one."""


def require_same_bytes(
    found: torch.Tensor, expected: torch.Tensor, feature: str, place: Callable[..., str]
) -> None:
    """Raise a Difference that names the first byte that differs.

    Parameters
    ----------
    found, expected : Tensor [..., bytes], uint8
        Rows on the CPU; another shape is a difference too.
    feature : str
    place : callable
        Takes the index of a row in `found`, one number per axis but the last; names the row.
    """
    if found.shape != expected.shape:
        raise Difference(f"{feature}: {tuple(found.shape)} bytes were read, expected {tuple(expected.shape)}")
    wrong = (found != expected).nonzero()
    if len(wrong):
        *row, byte = wrong[0].tolist()
        found_byte, expected_byte = int(found[(*row, byte)]), int(expected[(*row, byte)])
        raise Difference(
            f"{feature}: byte {byte} of {place(*row)} is 0x{found_byte:02x}, expected 0x{expected_byte:02x} "
            f"({len(wrong)} bytes differ)"
        )
