"""Servers of the demo's small model with pages of 64 tokens that share a store, and what each is asked."""

import os
import time

from sgl_kvpool.demo import shipped
from sgl_kvpool.demo.server import Server, cpu_arguments, free_port

PAGE_SIZE, LAYERS = 64, 3
#: 11 whole pages and a part of one: a prefix is cached in whole pages.
TOKENS, PAGES, CACHED = 749, 11, 704
PROMPTS = [window.text[:TOKENS] for window in shipped.held_out_windows()[:6]]


def clean_environment():
    """Nothing that tests have set for themselves; one thread for each server."""
    unwanted = [key for key in os.environ if "KVPOOL" in key or key == "TRITON_INTERPRET"]
    # Prefill attends stored rows, so that a prefix gives the same log-probabilities computed or found.
    return {**dict.fromkeys(unwanted, ""), "OMP_NUM_THREADS": "1", "KVPOOL_PREFILL_READS_ROWS": "1"}


def server(folder, name, layout, *arguments, environment):
    """A server that is not started yet."""
    return Server(
        [
            *cpu_arguments(shipped.model_path(), free_port(), max_total_tokens=2048),
            *("--page-size", str(PAGE_SIZE), "--enable-metrics", "--enable-cache-report"),
            *("--kv-cache-layout", layout),
            *arguments,
        ],
        folder / f"{name}.log",
        {**clean_environment(), **environment},
    )


def with_store(folder, name, layout, environment, backend, *arguments):
    """A server with a host tier over a store, which waits for the store's pages before it computes."""
    tier = [
        *("--enable-hierarchical-cache", "--hicache-ratio", "6", "--hicache-storage-backend", backend),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
    ]
    return server(folder, name, layout, *tier, *arguments, environment=environment)


def same(answers):
    """What has to be equal between servers of one layout."""
    return [(answer["ids"], answer["logprobs"]) for answer in answers]


def failures(server):
    """`sgl_kvpool_failures_total` by kind, those that are not 0."""
    found = {}
    for line in server.get("/metrics").decode().splitlines():
        if line.startswith("sgl_kvpool_failures_total{"):
            kind = line.partition('kind="')[2].partition('"')[0]
            found[kind] = found.get(kind, 0) + int(float(line.rpartition(" ")[2]))
    return {kind: count for kind, count in found.items() if count}


def until(condition, seconds=60.0):
    """Wait for what other processes do."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in {seconds:.0f} s"
        time.sleep(0.2)
