"""Soak of one server: traffic in rounds, checks between and after them, comparison with a cold run."""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.soak import checks
from scripts.soak.clients import MANY, Traffic, post
from scripts.soak.cold import ColdRun, compare
from scripts.soak.prompts import Prompt, make_prompts
from scripts.soak.servers import Leg, cold_server, soaked_server
from sgl_kvpool.commands.processes.server import Server, ServerFailed
from sgl_kvpool.demo.model import held_out_windows

#: Traffic between two censuses, in seconds.
ROUND_S = 15.0
#: Number of rounds after which all caches are flushed.
FLUSH_EVERY = 3
#: Tolerance of natural logarithms: how far a token may be below the cold run's best token, and how far its
#: log-probability may be from the cold run's. Batches of other sizes round differently, by at most 0.012 on
#: the machine of the measurement with the demo's model: its logits are around 8, and bfloat16 numbers from 4
#: to 8 are 0.03 apart.
TOLERANCE = 0.05
#: The same for other models, whose logits SGLang also computes in bfloat16: between 16 and 32,
#: bfloat16 numbers are 0.125 apart, and the logits of both compared tokens may be rounded.
TOLERANCE_MODEL = 0.5
#: The same if rows loaded from the host have been rounded once more. 2016 log-probabilities of the demo's
#: model over rows that were all stored as `fp4_fp8_rope` are up to 2.35 apart from those over `bf16` rows,
#: four of them more than 0.4, and 0.014 on average.
TOLERANCE_ROUNDED = 3.0
#: Largest average of these differences of the demo's model.
MEAN_ROUNDED = 0.05

#: Largest growth of the scheduler's memory after the first round.
GROWTH_LIMIT_BYTES = 256 << 20

#: Counters of the server that go into the report.
_REPORTED = {
    "evicted_tokens": "sglang:evicted_tokens_total",
    "backed_up_tokens": checks.MOVED["to_host"],
    "loaded_tokens": checks.MOVED["to_device"],
    "fetched_tokens": "sglang:prefetched_tokens_total",
}


def tolerance(leg: Leg) -> float:
    """Largest difference to a cold run's log-probabilities."""
    if leg.rounds_on_the_way:
        return TOLERANCE_ROUNDED
    return TOLERANCE if leg.model is None else TOLERANCE_MODEL


def soak(leg: Leg, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Soak one server, with the options of the command line and logs in a folder.

    Returns: record for JSON; `violations` lists problems, `too_few` conditions that the traffic did not
      reach.
    ServerFailed: if the soaked server does not start, or fails before the traffic. A cold run's server that
      fails is a violation.
    """
    print(f"{leg.name}: starting, log {folder / f'{leg.name}.log'}", flush=True)
    violations: list[str] = []
    censuses: list[dict[str, Any]] = []
    record: dict[str, Any] = {"name": leg.name, "violations": violations}
    with (
        tempfile.TemporaryDirectory() as store,
        soaked_server(leg, folder, store, options.server_args, options.breakages) as server,
    ):
        print("  serving", flush=True)
        prompts = _prompts(server, leg, options.seed)
        too_long = leg.device_tokens + leg.page_size_tokens
        traffic = Traffic(server.port, prompts, options.seed, too_long)
        record["server"] = _described(server, prompts)
        seconds = 60 * options.minutes / len(options.legs)
        try:
            record["traffic_seconds"] = _rounds(server, traffic, seconds, censuses, violations)
            values = checks.counters(server.get("/metrics").decode())
            violations += checks.metrics_problems(values, censuses[-1])
            if leg.model is None:
                violations += checks.watch_problems(values, censuses[-1])
            violations += checks.memory_problems(censuses, GROWTH_LIMIT_BYTES)
            _flush(server, censuses, violations)
            record["server_counts"] = {k: round(values.get(name, 0)) for k, name in _REPORTED.items()}
        except (OSError, ServerFailed) as error:
            violations.append(f"the server does not answer: {type(error).__name__}: {error}")
        violations += traffic.problems
    violations += [f"log: {line}" for line in checks.log_problems(server.log.read_text(errors="replace"))]
    record.update(_summed(traffic, censuses))
    if "server_counts" in record:
        record["too_few"] = checks.too_few(record, leg.device_tokens, has_store=leg.store)
    try:
        record["outputs"] = _compared(leg, folder, options.server_args, prompts, traffic, violations)
    except (OSError, ServerFailed) as error:  # earlier results are still reported
        violations.append(f"no cold run to compare with: {type(error).__name__}: {error}")
    return record


def _prompts(server: Server, leg: Leg, seed: int) -> list[Prompt]:
    text = "".join(window.text for window in held_out_windows())
    if leg.model is None:
        ids = list(text.encode("ascii"))
    else:
        ids = server.post("/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    # The prompts exceed the pool and the host tier together, also with a narrower host layout.
    working_set = 2 * leg.device_tokens * (1 + leg.host_ratio * (3 if leg.rounds_on_the_way else 1))
    return make_prompts(ids, leg.device_tokens, leg.page_size_tokens, working_set, seed)


def _described(server: Server, prompts: Sequence[Prompt]) -> dict[str, Any]:
    info = server.info()
    names = ("kv_cache_layout", "kv_cache_arrangement", "kv_host_layout", "page_size", "max_total_num_tokens")
    return {
        **{name: info[name] for name in names if name in info},
        "arguments": server.arguments,
        "prompt_tokens": sum(len(prompt.token_ids) for prompt in prompts),
    }


def _rounds(
    server: Server, traffic: Traffic, seconds: float, censuses: list[dict[str, Any]], violations: list[str]
) -> float:
    """Run traffic with a census after every round; returns the seconds of traffic."""
    censuses.append(checks.idle_census(server))
    violations += checks.census_problems(censuses[-1])
    spent, number, known = 0.0, 0, set[str]()
    # Violations do not end the soak, since later rounds may find more. MANY failed requests end it: the
    # server has probably ended.
    while spent < seconds - 1 and len(traffic.problems) < MANY:
        began = time.monotonic()
        traffic.run(min(ROUND_S, seconds - spent))
        spent += time.monotonic() - began
        number += 1
        censuses.append(checks.idle_census(server))
        problems = [one for one in checks.census_problems(censuses[-1]) if one not in known]
        known.update(problems)
        violations += [f"after {spent:.0f} s: {problem}" for problem in problems]
        if number % FLUSH_EVERY == 0:
            _flush(server, censuses, violations)
        print(
            f"  {spent:4.0f} s, {sum(traffic.counts.values())} requests, {len(violations)} violations",
            flush=True,
        )
    return round(spent, 1)


def _flush(server: Server, censuses: list[dict[str, Any]], violations: list[str]) -> None:
    status, answer = post(server.port, "/flush_cache?timeout=30")
    if status != 200:
        violations.append(f"/flush_cache answered {status}: {answer[:200]!r}")
        return
    censuses.append(checks.idle_census(server))
    violations += checks.census_problems(censuses[-1], flushed=True)


def _summed(traffic: Traffic, censuses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    complete = sum(outcome.complete for outcome in traffic.outcomes)
    cached: Counter[str] = Counter()
    for outcome in traffic.outcomes:
        cached.update(outcome.cached)
    watched = next((c["transfers"] for c in reversed(censuses) if c["transfers"]), None)
    return {
        "requests": dict(sorted(traffic.counts.items())),
        "answers_complete": complete,
        "answers_given_up": len(traffic.outcomes) - complete,
        "found_tokens": dict(cached),
        "censuses": len(censuses),
        "pages_in_both_tiers_compared": sum((c["bytes"] or {"pages": 0})["pages"] for c in censuses),
        "transfers_compared": watched,
        "resident_megabytes": [round(c["resident_bytes"] / 1e6) for c in censuses],
    }


def _compared(
    leg: Leg, folder: Path, server_args: Sequence[str], prompts: Sequence[Prompt], traffic: Traffic,
    violations: list[str],
) -> dict[str, Any]:  # fmt: skip
    """Compare the outputs with those of a server without caches."""
    longest: Counter[int] = Counter()
    for outcome in traffic.outcomes:
        longest[outcome.prompt] = max(longest[outcome.prompt], len(outcome.token_ids))
    longest += Counter()  # without prompts that have no output
    if not longest:
        violations.append("no output to compare")
        return {}
    print(f"  cold run of {len(longest)} prompts, log {folder / f'{leg.name}-cold.log'}", flush=True)
    allowed = tolerance(leg)
    with cold_server(leg, folder, server_args) as server:
        cold = ColdRun(server, prompts)
        cold.run(longest)
        result = compare(traffic.outcomes, cold, allowed)
    if result.mismatches:
        first = result.mismatches[0]
        violations.append(
            f"{len(result.mismatches)} of {result.outputs} outputs differ from a cold run, first (prompt "
            f"{first['prompt']}, {first['kind']}): {first['problem']}"
        )
    if leg.rounds_on_the_way and leg.model is None and result.mean_difference > MEAN_ROUNDED:
        violations.append(
            f"log-probabilities are {result.mean_difference:.4f} apart from a cold run's on average, limit "
            f"{MEAN_ROUNDED}"
        )
    mismatches = {"count": len(result.mismatches), "first": result.mismatches[:3]}
    return {**asdict(result), "tolerance": allowed, "mismatches": mismatches}
