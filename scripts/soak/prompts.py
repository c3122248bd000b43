"""Prompts of a soak: shared prefixes with tails, from one token to 0.8 of the pool."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

#: Numbers of tokens that a request may generate.
NEW_TOKENS = (1, 4, 12, 32)

#: Size of the windows with which a short text is lengthened. Prompts that begin at the same position of two
#: copies of a window have at most this in common, unless the same window follows both copies.
_WINDOW_TOKENS = 256


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    `number`: Index in the list of all prompts.
    """

    number: int
    token_ids: tuple[int, ...]


def lengthened(text_ids: Sequence[int], tokens: int) -> list[int]:
    """A text of at least `tokens` tokens: the text, then repetitions of its windows in new random orders."""
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
    """Prompts with shared prefixes that together do not fit into the tiers, reproducible from the arguments.

    A few are shorter than a page; about one of eleven takes more than half of the pool, up to 0.8 of it.

    `text_ids`: Tokens of a text from which prompts are cut; a text shorter than two pools is `lengthened`,
      since a subword tokenizer gives few tokens for the package's text.
    `working_set_tokens`: Lower bound of the tokens of all prompts, with shared prefixes counted once.
    ValueError: if the text is empty.
    """
    if not text_ids:
        raise ValueError("the text has no tokens, so no prompts can be cut from it")
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
        # Prefixes end at page boundaries and between them.
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
