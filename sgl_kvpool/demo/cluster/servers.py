"""Servers of the byte model, their prompts and requests. Imports neither torch nor SGLang."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sgl_kvpool import env
from sgl_kvpool.demo import shipped
from sgl_kvpool.demo.local_server import LocalServer, ServerFailed
from sgl_kvpool.demo.loopback import free_port
from sgl_kvpool.demo.server import Server, cpu_arguments

__all__ = [
    "CACHED_PAGES",
    "PAGE_SIZE",
    "POOL_TOKENS",
    "PROMPT_TOKENS",
    "ask",
    "metric_sum",
    "prompts",
    "small_server",
    "store_arguments",
    "until",
]

PAGE_SIZE = 64
#: Tokens of a prompt: 11 whole pages, which are cached, and a part of a page.
PROMPT_TOKENS = 749
CACHED_PAGES = PROMPT_TOKENS // PAGE_SIZE
#: Tokens of a server's pool, which holds two such prompts with their answers.
POOL_TOKENS = 2048
_NEW_TOKENS = 8


def prompts(count: int) -> list[str]:
    """Held-out text, `PROMPT_TOKENS` bytes of each window."""
    return [window.text[:PROMPT_TOKENS] for window in shipped.held_out_windows()[:count]]


def small_server(
    layout: str,
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    pool_tokens: int = POOL_TOKENS,
) -> Server:
    """A server that is not started yet.

    Parameters
    ----------
    layout : str
    arguments : sequence of str
        Further arguments of the server.
    log : path
        File for its output.
    environment : mapping
        Variables added to those of this process.
    pool_tokens : int
        Tokens of the server's pool.
    """
    return Server(
        [
            *cpu_arguments(shipped.model_path(), free_port(), max_total_tokens=pool_tokens),
            *("--page-size", str(PAGE_SIZE), "--enable-metrics", "--enable-cache-report"),
            *("--kv-cache-layout", layout),
            *arguments,
        ],
        log,
        # Prefill attends stored rows, so that log-probabilities do not depend on where a prefix is found.
        {env.PREFILL_READS_ROWS: "1", "OMP_NUM_THREADS": "1", **environment},
    )


def store_arguments(backend: str) -> list[str]:
    """Arguments of a host tier over a store; a server with them waits for stored pages before a prefill."""
    return [
        *("--enable-hierarchical-cache", "--hicache-ratio", "6", "--hicache-storage-backend", backend),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
    ]


def until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait for a background action of a server.

    Raises
    ------
    ServerFailed
        If the condition is not true in time; the message names `what`.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise ServerFailed(f"{what}: not in {seconds:.0f} s")
        time.sleep(0.2)


def ask(server: LocalServer, text: str) -> dict[str, Any]:
    """Generate eight tokens after a text, greedily.

    Returns
    -------
    dict
        `ids` and `logprobs` of the tokens, logarithms to 6 digits; `cached`, the number of the text's tokens
        that were found in a cache, and `details`, SGLang's `cached_tokens_details` by place.
    """
    greedy = {"temperature": 0, "max_new_tokens": _NEW_TOKENS, "ignore_eos": True}
    # The plain /generate, which the router serves too.
    answer = server.post("/generate", text=text, sampling_params=greedy, return_logprob=True)
    meta = answer["meta_info"]
    return {
        "ids": answer["output_ids"],
        "logprobs": [round(entry[0], 6) for entry in meta["output_token_logprobs"]],
        "cached": meta["cached_tokens"],
        "details": meta.get("cached_tokens_details"),
    }


def metric_sum(server: LocalServer, name: str) -> float:
    """Sum of a server's metric over its labels; 0 for a metric that the server does not have."""
    lines = server.get("/metrics").decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name)
