"""Requests to a running server: hits on device and host, throughput."""

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from scripts.servers.shapes import PAGE_SIZE
from sgl_kvpool.commands.processes.server import Server

ONE_TOKEN = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
#: Tokens generated after hits, to check the rows that were found.
_AFTER_HIT = 16


@dataclass(frozen=True)
class Hits:
    """Median times to the first token of the same prompts, and the shares found in each tier.

    `host_ms`: None without a host tier.
    `device_share`, `host_share`: Least share of `full_hit` that was found on the device, and later in host
      memory.
    `same_tokens`: Share of equal tokens generated after host hits and after device hits.
    """

    cold_ms: float
    device_ms: float
    host_ms: float | None
    device_share: float
    host_share: float
    same_tokens: float


def full_hit(count: int) -> int:
    """Largest hit of a repeated prompt in tokens: full pages, without the last token."""
    return (count - 1) // PAGE_SIZE * PAGE_SIZE


def wait_for_hits(
    server: Server, prompts: Sequence[list[int]], warm_up: list[int], fillers: Sequence[list[int]]
) -> Hits:
    """Time the first token of prompts: cold, repeated, and once more after other prompts have evicted them.

    `server`: Running server, with --enable-cache-report if `fillers` are given.
    `prompts`: Prompts that differ from the first token on.
    `warm_up`: First prompt, of the same length, so that kernels of that shape are compiled.
    `fillers`: Prompts that exceed the device's pool; empty without a host tier.
    """

    def first_token_ms(ids: list[int]) -> tuple[float, dict[str, Any]]:
        began = time.perf_counter()
        answer = server.generate(input_ids=ids, sampling_params=ONE_TOKEN)
        return (time.perf_counter() - began) * 1e3, answer["meta_info"]

    def after(ids: list[int]) -> list[int]:
        sampling = {**ONE_TOKEN, "max_new_tokens": _AFTER_HIT}
        return server.generate(input_ids=ids, sampling_params=sampling)["output_ids"]

    def found(info: dict[str, Any], tier: str) -> float:
        details = info.get("cached_tokens_details") or {}
        return details.get(tier, 0) / full_hit(len(prompts[0]))

    for _ in range(2):
        first_token_ms(warm_up)
    cold = [first_token_ms(ids)[0] for ids in prompts]
    on_device = [first_token_ms(ids) for ids in prompts]
    tokens = [after(ids) for ids in prompts]
    device_ms = statistics.median(ms for ms, _ in on_device)
    if not fillers:
        shares = [info["cached_tokens"] / full_hit(len(prompts[0])) for _, info in on_device]
        return Hits(statistics.median(cold), device_ms, None, min(shares), 0.0, 1.0)
    time.sleep(1.0)  # backups are written after the answers
    for ids in fillers:
        first_token_ms(ids)
    on_host = [first_token_ms(ids) for ids in prompts]
    again = [after(ids) for ids in prompts]
    pairs = [a == b for old, new in zip(tokens, again, strict=True) for a, b in zip(old, new, strict=True)]
    return Hits(
        statistics.median(cold),
        device_ms,
        statistics.median(ms for ms, _ in on_host),
        min(found(info, "device") for _, info in on_device),
        min(found(info, "host") for _, info in on_host),
        statistics.fmean(pairs),
    )


def throughput(server: Server, rounds: Sequence[Sequence[list[int]]], new_tokens: int) -> float:
    """Generated tokens per second with concurrent requests for all prompts of a round.

    `rounds`: Prompts per round, all different to avoid cache hits. The first round compiles; the best other
      round counts.
    `new_tokens`: Tokens generated per prompt.
    """
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}

    def answer(ids: list[int]) -> int:
        said = server.generate(input_ids=ids, sampling_params=sampling)
        return said["meta_info"]["completion_tokens"]

    rates = []
    with ThreadPoolExecutor(max(map(len, rounds))) as threads:
        for prompts in rounds:
            began = time.perf_counter()
            count = sum(threads.map(answer, prompts))
            rates.append(count / (time.perf_counter() - began))
    return max(rates[1:])
