"""Prompts of a soak: shared beginnings with tails, from one token to nearly the whole pool."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["NEW_TOKENS", "Prompt", "make_prompts"]

#: Tokens that a request may ask for.
NEW_TOKENS = (1, 4, 12, 32)

#: Tokens that a short text is lengthened by. Prompts that happen to begin at the same place of two copies of
#: an excerpt have no more than this in common.
_WINDOW_TOKENS = 256


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


def lengthened(text_ids: Sequence[int], tokens: int) -> list[int]:
    """A text of at least so many tokens: itself, then its windows over and over, each time shuffled anew.

    Parameters
    ----------
    text_ids : sequence of int
        Not empty.
    tokens : int

    Returns
    -------
    list of int
        The same for the same arguments.
    """
    longer = list(text_ids)
    windows = [longer[at : at + _WINDOW_TOKENS] for at in range(0, len(longer), _WINDOW_TOKENS)]
    rng = random.Random(0)
    while len(longer) < tokens:
        rng.shuffle(windows)
        for window in windows:
            longer += window
    return longer


def make_prompts(
    text_ids: Sequence[int], device_tokens: int, page_size_tokens: int, working_set_tokens: int, seed: int
) -> list[Prompt]:
    """Prompts that together do not fit the tiers, with beginnings in common.

    Parameters
    ----------
    text_ids : sequence of int
        Tokens of some text, which excerpts are taken from; one shorter than two pools is `lengthened`, as a
        tokenizer of words makes few tokens of the text that the package has.
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
        An empty text.
    """
    if not text_ids:
        raise ValueError("a text without tokens, which no prompts can be cut from")
    text_ids = lengthened(text_ids, 2 * device_tokens)
    rng = random.Random(seed)

    def excerpt(length: int) -> tuple[int, ...]:
        start = rng.randrange(len(text_ids) - length)
        return tuple(text_ids[start : start + length])

    made = [
        excerpt(length) for length in (1, 2, page_size_tokens - 1, page_size_tokens, page_size_tokens + 1)
    ]
    total = 0
    while total < working_set_tokens:
        # At page boundaries and off them.
        beginning = excerpt(rng.randrange(1, device_tokens // 4))
        total += len(beginning)
        for _ in range(rng.choice((1, 2, 4))):
            longest = device_tokens // 2 if rng.random() < 0.15 else device_tokens // 8
            tail = excerpt(rng.randrange(1, longest))
            if rng.random() < 0.3:
                made.append(beginning[: rng.randrange(1, len(beginning) + 1)] + tail)
            else:
                made.append(beginning + tail)
            total += len(tail)
        if rng.random() < 0.15:
            made.append(excerpt(rng.randrange(device_tokens // 2, device_tokens * 4 // 5)))
            total += len(made[-1])
    return [Prompt(number, ids) for number, ids in enumerate(made)]
