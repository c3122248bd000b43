"""Prompts of a soak: shared beginnings with tails, from one token to nearly the whole pool."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["NEW_TOKENS", "Prompt", "make_prompts"]

#: Tokens that a request may ask for.
NEW_TOKENS = (1, 4, 12, 32)


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes
    ----------
    number : int
        Place in the list of all.
    token_ids : tuple of int
    """

    number: int
    token_ids: tuple[int, ...]


def make_prompts(
    text_ids: Sequence[int], device_tokens: int, page_size_tokens: int, working_set_tokens: int, seed: int
) -> list[Prompt]:
    """Prompts that together do not fit the tiers, with beginnings in common.

    Parameters
    ----------
    text_ids : sequence of int
        Tokens of some text, which pieces are taken from.
    device_tokens, page_size_tokens : int
        Of the pool.
    working_set_tokens : int
        Lower bound of the tokens of all prompts, beginnings in common counted once.
    seed : int

    Returns
    -------
    list of Prompt
        The same for the same arguments. A few are shorter than a page; one of eight takes more than half of
        the pool, up to 0.8 of it.

    Raises
    ------
    ValueError
        A text too short to cut pieces from.
    """
    if len(text_ids) < 2 * device_tokens:
        raise ValueError(
            f"a text of {len(text_ids)} tokens; a pool of {device_tokens} needs twice as many to cut from"
        )
    rng = random.Random(seed)

    def piece(length: int) -> tuple[int, ...]:
        start = rng.randrange(len(text_ids) - length)
        return tuple(text_ids[start : start + length])

    made = [piece(length) for length in (1, 2, page_size_tokens - 1, page_size_tokens, page_size_tokens + 1)]
    total = 0
    while total < working_set_tokens:
        # At page boundaries and off them.
        beginning = piece(rng.randrange(1, device_tokens // 4))
        total += len(beginning)
        for _ in range(rng.choice((1, 2, 4))):
            longest = device_tokens // 2 if rng.random() < 0.15 else device_tokens // 8
            tail = piece(rng.randrange(1, longest))
            if rng.random() < 0.3:
                made.append(beginning[: rng.randrange(1, len(beginning) + 1)] + tail)
            else:
                made.append(beginning + tail)
            total += len(tail)
        if rng.random() < 0.15:
            made.append(piece(rng.randrange(device_tokens // 2, device_tokens * 4 // 5)))
            total += len(made[-1])
    return [Prompt(number, ids) for number, ids in enumerate(made)]
