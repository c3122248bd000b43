"""Servers of the byte model and their peers, their prompts and requests. Imports neither torch nor SGLang."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sgl_kvpool import env
from sgl_kvpool.commands.processes.local_server import LocalServer, ServerFailed, free_port, past_proxies
from sgl_kvpool.commands.processes.server import Server, cpu_arguments
from sgl_kvpool.demo.cluster.mooncake_store import library_path
from sgl_kvpool.demo.model import held_out_windows, model_path

_LOOPBACK = "127.0.0.1"
PAGE_SIZE = 64
#: Tokens of a prompt: 11 whole pages, which are cached, and a part of a page.
PROMPT_TOKENS = 749
CACHED_PAGES = PROMPT_TOKENS // PAGE_SIZE
#: Tokens of a server's pool, which holds two such prompts with their answers.
POOL_TOKENS = 2048


def peer_environment() -> dict[str, str]:
    """Environment of prefill and decode servers on this machine: they announce 127.0.0.1 to each other."""
    return {"SGLANG_HOST_IP": _LOOPBACK, "HOST_IP": _LOOPBACK, "LD_LIBRARY_PATH": library_path()}


def peer_arguments(mode: str, transfer: str, bootstrap_port: int = 8998) -> list[str]:
    """Of prefill and decode servers; `transfer` `mooncake_tcp` and `nixl` need no RDMA network card."""
    return [
        *("--disaggregation-mode", mode, "--disaggregation-transfer-backend", transfer),
        # The warm-up would start a transfer without a peer.
        *("--skip-server-warmup", "--disaggregation-bootstrap-port", str(bootstrap_port)),
    ]


def router(
    log: Path,
    *,
    prefill: Sequence[tuple[LocalServer, int]] = (),
    decode: Sequence[LocalServer] = (),
    workers: Sequence[LocalServer] = (),
) -> LocalServer:
    """sglang-router in front of running servers.

    `workers` do prefill and decode, instead of `prefill` and `decode`; a request goes to the server that has
    its prefix.
    """
    port, metrics_port = free_port(), free_port()
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--host", _LOOPBACK, "--port", str(port)),
        *("--prometheus-host", _LOOPBACK, "--prometheus-port", str(metrics_port)),
    ]
    if workers:
        command += ["--worker-urls", *(worker.url for worker in workers), "--policy", "cache_aware"]
    else:
        command.append("--pd-disaggregation")
        for server, bootstrap_port in prefill:
            command += ["--prefill", server.url, str(bootstrap_port)]
        for server in decode:
            command += ["--decode", server.url]
    return LocalServer(
        command, port, log, past_proxies(), ready="/readiness", name="the router", wait_seconds=120
    )


def prompts(count: int) -> list[str]:
    """Held-out text, `PROMPT_TOKENS` bytes of each window."""
    return [window.text[:PROMPT_TOKENS] for window in held_out_windows()[:count]]


def small_server(
    layout: str,
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    pool_tokens: int = POOL_TOKENS,
) -> Server:
    """A server that is not started yet."""
    return Server(
        [
            *cpu_arguments(model_path(), free_port(), max_total_tokens=pool_tokens),
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
    """Wait for a background action of a server; ServerFailed, which names `what`, if it takes longer."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise ServerFailed(f"{what}: not in {seconds:.0f} s")
        time.sleep(0.2)


def metric_sum(server: LocalServer, name: str) -> float:
    """Sum of a server's metric over its labels; 0 for a metric that the server does not have."""
    lines = server.get("/metrics").decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name)
