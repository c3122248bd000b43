"""What a server of the hybrid model answered, and when two answers are the same."""

import pytest

#: Distance of log-probabilities in bfloat16 of products with other numbers of rows.
LARGEST = 0.25


def tokens(answer):
    return answer["output_ids"]


def logprobs(answer):
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def cached(answer):
    return answer["meta_info"]["cached_tokens"]


def distance(one, other):
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def same(one, other):
    """The same answer, up to a token that was about as probable as another.

    With random weights there are many such tokens, and products with another number of rows round
    differently. After such a token the texts differ.
    """
    for a, b, p, q in zip(tokens(one), tokens(other), logprobs(one), logprobs(other), strict=True):
        assert p == pytest.approx(q, abs=LARGEST)
        if a != b:
            return


def identical(one, other):
    """The same tokens, and log-probabilities that are equal but for the order of sums."""
    assert tokens(one) == tokens(other)
    assert logprobs(one) == pytest.approx(logprobs(other), abs=0.01)


def of_prompt(answer):
    """Log-probabilities of a prompt's tokens but the first."""
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]
