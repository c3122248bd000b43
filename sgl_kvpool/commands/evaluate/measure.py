"""Scores of a running server on a model's windows of text, and comparisons of two servers.

Scoring is teacher-forced: every server predicts each token of the same text from those before it, so a
difference at one position does not change the next. Imports neither torch nor SGLang.
"""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_kvpool.commands.processes.local_server import LocalServer
from sgl_kvpool.commands.processes.server import Server

#: Prose of Python 3.11.7's language reference, then of its library's docstrings, each paragraph once; its
#: licence is ``demo/byte_mla_python/LICENSE-held-out.txt``.
ENGLISH = Path(__file__).with_name("english.txt")
#: Windows in one request: enough to fill a prefill batch.
WINDOWS_PER_REQUEST = 4
#: Most probable tokens that are compared at each position.
BEST = 20
#: Tokens of an answer whose drafts are counted, but at most a quarter of a window.
_DRAFTED_TOKENS = 64
#: Probability that is zero but for rounding.
_NOTHING = 1e-9

#: Tokens with their log-probabilities, the most probable one first.
Best = list[tuple[int, float]]


@dataclass(frozen=True)
class Scores:
    """Predictions for W windows of T tokens; the first token of a window is not predicted."""

    #: Natural logarithm of the probability given to the token that follows.
    log_probabilities: list[list[float]]
    top_tokens: list[list[int]]
    #: The `BEST` most probable tokens with their log-probabilities, the most probable one first; empty where
    #: they were not asked for.
    best: list[list[Best]] = field(default_factory=list)

    @property
    def perplexity(self) -> float:
        """Perplexity per token: exp of the mean negative log-probability."""
        return math.exp(-statistics.fmean(value for window in self.log_probabilities for value in window))

    def __add__(self, other: Scores) -> Scores:
        return Scores(
            self.log_probabilities + other.log_probabilities,
            self.top_tokens + other.top_tokens,
            self.best + other.best,
        )


@dataclass(frozen=True)
class Greedy:
    """Text that a server generated greedily.

    `smallest_margin` is the least difference between the log-probabilities of the best two tokens at any
    step. If it is close to the rounding of bfloat16 logits, about 0.03, another processor may generate
    another text.
    """

    token_ids: list[int]
    smallest_margin: float


@dataclass(frozen=True)
class Difference:
    """Difference between scores and reference scores on the same text."""

    #: Perplexity divided by the reference's, minus 1.
    perplexity_change: float
    #: Standard error of `perplexity_change`, from the windows' paired differences; NaN for a single window.
    standard_error: float
    same_top_token: float
    #: Mean of `divergence` over all positions in nats, and its standard error over windows; None without the
    #: most probable tokens of both.
    divergence: float | None = None
    divergence_error: float | None = None


@dataclass(frozen=True)
class HostHit:
    """A hit in the host tier beside a hit on the device, for the same prompt.

    `same_tokens`: both hits had the same length, and the same tokens were generated after them.
    """

    prompt_tokens: int
    host_tokens: int
    generated_tokens: int
    same_tokens: bool


def compare_hits(device: Mapping[str, Any], host: Mapping[str, Any]) -> HostHit:
    """Compare a hit in the host tier with a hit on the device for the same prompt, both answers of `ask`."""
    found = [
        [(answer["details"] or {}).get(place, 0) for place in ("device", "host")] for answer in (device, host)
    ]
    same = found[0] == found[1][::-1] and found[1][1] > 0 and device["ids"] == host["ids"]
    return HostHit(host["prompt_tokens"], found[1][1], len(host["ids"]), same)


def ask(server: LocalServer, prompt: str | Sequence[int], new_tokens: int = 8) -> dict[str, Any]:
    """Generate tokens after a text, or after token ids, greedily.

    Returns `ids` and `logprobs` of the tokens, logarithms to 6 digits; `prompt_tokens`; `cached`, how many of
    them were found in a cache, and `details`, SGLang's `cached_tokens_details` by place.
    """
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    # The plain /generate, which a router serves too.
    answer = server.post("/generate", **given, sampling_params=sampling, return_logprob=True)
    meta = answer["meta_info"]
    return {
        "ids": answer["output_ids"],
        "logprobs": [round(entry[0], 6) for entry in meta["output_token_logprobs"]],
        "prompt_tokens": meta["prompt_tokens"],
        "cached": meta["cached_tokens"],
        "details": meta.get("cached_tokens_details"),
    }


def score(server: Server, windows: Sequence[list[int]], prefix_tokens: int = 0) -> Scores:
    """Request the log-probabilities of windows from a server.

    They depend on stored rows if the server runs with ``KVPOOL_PREFILL_READS_ROWS=1``, or if `prefix_tokens`,
    a multiple of the page size, is given: the first tokens of a window are then a request of their own, whose
    rows the others attend, and the others alone are scored.

    ValueError if the server found another prefix, scored other tokens, or a log-probability is not finite.
    """
    rank = 0 if prefix_tokens else None  # ranks of DP attention have a cache each
    fields = {"sampling_params": {"temperature": 0, "max_new_tokens": 1}, "routed_dp_rank": rank}
    found = Scores([], [])
    for start in range(0, len(windows), WINDOWS_PER_REQUEST):
        sent = list(windows[start : start + WINDOWS_PER_REQUEST])
        if prefix_tokens:
            server.generate(input_ids=[ids[:prefix_tokens] for ids in sent], **fields)
        answers = server.generate(
            input_ids=sent,
            return_logprob=True,
            logprob_start_len=prefix_tokens,
            top_logprobs_num=BEST,
            **fields,
        )
        for ids, answer in zip(sent, answers, strict=True):
            if (stored := answer["meta_info"]["cached_tokens"]) != prefix_tokens:
                raise ValueError(
                    f"the server found {stored} of {prefix_tokens} stored tokens before those to be scored; "
                    f"leave out --disable-radix-cache, or give a pool that keeps {len(sent)} windows"
                )
            # [log-probability, token id, text] per token; the first token has no log-probability.
            tokens = answer["meta_info"]["input_token_logprobs"][1:]
            best = [
                [(token, value) for value, token, *_ in entries]
                for entries in answer["meta_info"]["input_top_logprobs"][1:]
            ]
            if [token[1] for token in tokens] != ids[prefix_tokens + 1 :] or len(best) != len(tokens):
                raise ValueError("the server scored other tokens than it was sent")
            values = [token[0] for token in tokens] + [value for entries in best for _, value in entries]
            if not all(isinstance(value, float) and math.isfinite(value) for value in values):
                raise ValueError("the server returned log-probabilities that are not finite numbers")
            found += Scores([[token[0] for token in tokens]], [[entries[0][0] for entries in best]], [best])
    return found


def accepted_drafts(server: Server, windows: Sequence[list[int]]) -> list[float]:
    """Drafts accepted per step of each window's answer; empty if the server reports no step.

    The last tokens of a window give way to a greedy answer of as many, so that what fits a window fits both.
    """
    count = min(_DRAFTED_TOKENS, len(windows[0]) // 4)
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    found = []
    for start in range(0, len(windows), WINDOWS_PER_REQUEST):
        asked = [ids[:-count] for ids in windows[start : start + WINDOWS_PER_REQUEST]]
        for answer in server.generate(input_ids=asked, sampling_params=sampling):
            said = answer["meta_info"]
            if steps := said.get("spec_verify_ct"):  # an answer without drafts lacks both
                found.append(said["spec_num_correct_drafts"] / steps)
    return found


def divergence(ours: Best, reference: Best) -> float:
    """KL divergence from a reference over its most probable tokens, with all others as one; nats.

    A token that is missing in `ours` counts as the least probable one there, which is the most it can be: the
    result is then too small rather than too large.
    """
    known, least = dict(ours), ours[-1][1]
    total, rest, our_rest = 0.0, 1.0, 1.0
    for token, value in reference:
        our_value = known.get(token, least)
        total += math.exp(value) * (value - our_value)
        rest -= math.exp(value)
        our_rest -= math.exp(our_value)
    if rest > _NOTHING:
        total += rest * math.log(rest / max(our_rest, _NOTHING))
    return total


def compare_scores(scores: Scores, reference: Scores) -> Difference:
    """Difference between scores and reference scores; ValueError if the lengths of their windows differ."""
    lengths = [list(map(len, one.log_probabilities)) for one in (scores, reference)]
    if lengths[0] != lengths[1]:
        raise ValueError(f"windows of other lengths: {lengths[0]} tokens against {lengths[1]}")
    changes = [
        statistics.fmean(theirs) - statistics.fmean(ours)
        for ours, theirs in zip(scores.log_probabilities, reference.log_probabilities, strict=True)
    ]
    ratio = scores.perplexity / reference.perplexity
    spread = standard_error(changes)
    same = [
        ours == theirs
        for mine, other in zip(scores.top_tokens, reference.top_tokens, strict=True)
        for ours, theirs in zip(mine, other, strict=True)
    ]
    return Difference(ratio - 1, ratio * spread, statistics.fmean(same), *_divergences(scores, reference))


def _divergences(scores: Scores, reference: Scores) -> tuple[float, float] | tuple[()]:
    """Mean of the positions' divergences, and its standard error over windows."""
    if not scores.best or not reference.best:
        return ()
    means = [
        statistics.fmean(map(divergence, ours, theirs))
        for ours, theirs in zip(scores.best, reference.best, strict=True)
    ]
    return statistics.fmean(means), standard_error(means)


def standard_error(values: Sequence[float]) -> float:
    """Standard error of a mean; NaN for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


#: A line of the text in which a number is hidden.
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"


def passkey_prompt(characters: int, depth: float, seed: int) -> tuple[str, str]:
    """A text of about `characters` characters with a number hidden at a depth from 0 to 1, and the number."""
    key = str(random.Random(seed).randrange(10_000, 100_000))
    lines = [FILLER] * max(2, characters // len(FILLER))
    lines.insert(round(depth * len(lines)), f"The pass key is {key}. Remember it. {key} is the pass key.\n")
    head = "There is a pass key hidden in a lot of irrelevant text. Find it and memorize it.\n"
    return head + "".join(lines) + "What is the pass key? The pass key is", key


def find_passkeys(server: Server, characters: int, depths: Sequence[float]) -> list[bool]:
    """Whether numbers, hidden at several depths of a text of `characters` characters, begin the answers."""
    found = []
    for number, depth in enumerate(depths):
        text, key = passkey_prompt(characters, depth, seed=characters + number)
        sampling = {"temperature": 0, "max_new_tokens": 12}
        answered = server.generate(text=text, sampling_params=sampling)["text"]
        found.append(re.findall(r"\d+", answered)[:1] == [key])
    return found


def answer(server: Server, question: str, new_tokens: int) -> str:
    """A chat model's greedy answer, through the chat template."""
    answered = server.post(
        "/v1/chat/completions",
        model="default",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=new_tokens,
    )
    return answered["choices"][0]["message"]["content"].strip()


def generate_greedily(server: Server, prompts: Sequence[str], new_tokens: int) -> list[Greedy]:
    """Generate greedily after each prompt, also past an end of text."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    answers = server.generate(
        text=list(prompts), sampling_params=sampling, return_logprob=True, top_logprobs_num=2
    )
    found = []
    for _, answer in zip(prompts, answers, strict=True):
        best_two = answer["meta_info"]["output_top_logprobs"]
        found.append(Greedy(answer["output_ids"], min(best[0] - second[0] for best, second in best_two)))
    return found
