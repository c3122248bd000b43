"""Servers of the small model, and prompts for them. Imports neither torch nor SGLang."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sgl_kvpool import env
from sgl_kvpool.demo import shipped
from sgl_kvpool.demo.local_server import ServerFailed
from sgl_kvpool.demo.loopback import free_port
from sgl_kvpool.demo.server import Server, cpu_arguments

__all__ = [
    "CACHED_PAGES",
    "PAGE_SIZE",
    "POOL_TOKENS",
    "PROMPT_TOKENS",
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
    """Arguments of a host tier over a store, which waits for the store's pages before it computes."""
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
