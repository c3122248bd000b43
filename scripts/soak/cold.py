"""Outputs of a server without caches, and their comparison with a soak's outputs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from scripts.soak.clients import Outcome
from scripts.soak.prompts import Prompt
from sgl_kvpool.commands.processes.server import Server


@dataclass
class ColdRun:
    """Answers of a running server without any cache, one request at a time.

    `greedy`: Greedy tokens after a prompt by its number, with their log-probabilities.
    """

    server: Server
    prompts: Sequence[Prompt]
    greedy: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    _scored: dict[tuple[int, tuple[int, ...]], list[tuple[float, float]]] = field(default_factory=dict)

    def run(self, longest: dict[int, int]) -> None:
        """Generate greedily for prompts; `longest` has the number of tokens by prompt number."""
        for number, new_tokens in sorted(longest.items()):
            answer = self.server.generate(
                input_ids=self.prompts[number].token_ids,
                sampling_params={"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
                return_logprob=True,
            )
            scored = answer["meta_info"]["output_token_logprobs"]
            self.greedy[number] = [(token, value) for value, token, _ in scored]

    def scored(self, number: int, token_ids: Sequence[int]) -> list[tuple[float, float]]:
        """For every token of an output: its log-probability and that of the best token at its position."""
        key = (number, tuple(token_ids))
        if key not in self._scored:
            prompt = self.prompts[number].token_ids
            answer = self.server.generate(
                input_ids=[*prompt, *token_ids],
                sampling_params={"temperature": 0, "max_new_tokens": 1},
                return_logprob=True,
                logprob_start_len=max(0, len(prompt) - 1),
                top_logprobs_num=1,
            )
            info = answer["meta_info"]
            own = [value for value, _, _ in info["input_token_logprobs"]][-len(token_ids) :]
            best = [top[0][0] for top in info["input_top_logprobs"][-len(token_ids) :]]
            self._scored[key] = list(zip(own, best, strict=True))
        return self._scored[key]


@dataclass
class Comparison:
    """Comparison of a soak's outputs with a cold run's.

    `outputs`: Number of compared outputs, including partial outputs of aborted requests.
    `same_outputs`: Outputs that equal the cold run's in every token.
    `near_ties`: Outputs with other tokens, all of which the cold run, given the same preceding tokens, rates
      as good as its own within the tolerance.
    `largest_difference`, `mean_difference`: Differences of log-probabilities after the same preceding tokens.
    `mismatches`: Outputs beyond the tolerance, with the problem. One whose log-probabilities differ by more
      may also be a same output or a near tie.
    """

    outputs: int = 0
    same_outputs: int = 0
    near_ties: int = 0
    compared_tokens: int = 0
    largest_difference: float = 0.0
    mean_difference: float = 0.0
    mismatches: list[dict[str, Any]] = field(default_factory=list)


def compare(outcomes: Sequence[Outcome], cold: ColdRun, tolerance: float) -> Comparison:
    """Compare every output with the cold run's.

    `cold`: A cold run of all their prompts.
    `tolerance`: Largest excess of the best token's log-probability over that of the chosen token, and largest
      difference between two log-probabilities of a token.
    """
    result = Comparison()
    total = 0.0
    for outcome in outcomes:
        if not outcome.token_ids:
            continue
        expected = cold.greedy[outcome.prompt]
        result.outputs += 1
        pairs = []  # log-probabilities after the same preceding tokens
        problem = ""
        for at, (token, value) in enumerate(zip(outcome.token_ids, outcome.log_probabilities, strict=True)):
            pairs.append((value, expected[at][1]))
            if token != expected[at][0]:
                pairs.pop()
                break
        else:
            at = len(outcome.token_ids)
            result.same_outputs += 1
        if at < len(outcome.token_ids):
            scored = cold.scored(outcome.prompt, outcome.token_ids)
            worst = max(best - own for own, best in scored)
            pairs += [
                (value, own)
                for value, (own, _) in zip(outcome.log_probabilities[at:], scored[at:], strict=True)
            ]
            if worst > tolerance:
                problem = f"a token {worst:.4f} below the best one of a cold run"
            else:
                result.near_ties += 1
        differences = [abs(ours - theirs) for ours, theirs in pairs]
        result.compared_tokens += len(pairs)
        result.largest_difference = max([result.largest_difference, *differences])
        total += sum(differences)
        if not problem and differences and max(differences) > tolerance:
            problem = f"a log-probability {max(differences):.4f} away from a cold run's"
        if problem:
            result.mismatches.append({"problem": problem, "first_other_token": at, **asdict(outcome)})
    result.mean_difference = total / max(1, result.compared_tokens)
    return result
