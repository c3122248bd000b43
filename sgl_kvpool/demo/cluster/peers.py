"""Arguments of prefill and decode servers over loopback, and sglang-router in front of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sgl_kvpool.demo.local_server import LocalServer
from sgl_kvpool.demo.loopback import free_port, past_proxies
from sgl_kvpool.demo.mooncake_libraries import library_path

__all__ = ["decode_arguments", "peer_environment", "prefill_arguments", "router"]

_LOOPBACK = "127.0.0.1"


def peer_environment() -> dict[str, str]:
    """Environment of prefill and decode servers on this machine: they announce 127.0.0.1 to each other."""
    return {"SGLANG_HOST_IP": _LOOPBACK, "HOST_IP": _LOOPBACK, "LD_LIBRARY_PATH": library_path()}


def prefill_arguments(transfer: str, bootstrap_port: int) -> list[str]:
    """Arguments of a prefill server.

    Parameters
    ----------
    transfer : str
        --disaggregation-transfer-backend; `mooncake_tcp` and `nixl` need no RDMA network card.
    bootstrap_port : int
        Port at which decode servers find the prefill server.
    """
    return [*_peer("prefill", transfer), "--disaggregation-bootstrap-port", str(bootstrap_port)]


def decode_arguments(transfer: str) -> list[str]:
    """Arguments of a decode server; see `prefill_arguments`."""
    return _peer("decode", transfer)


def _peer(mode: str, transfer: str) -> list[str]:
    return [
        *("--disaggregation-mode", mode, "--disaggregation-transfer-backend", transfer),
        # The warm-up would start a transfer without a peer.
        "--skip-server-warmup",
    ]


def router(
    log: Path,
    *,
    prefill: Sequence[tuple[LocalServer, int]] = (),
    decode: Sequence[LocalServer] = (),
    workers: Sequence[LocalServer] = (),
) -> LocalServer:
    """sglang-router in front of running servers.

    Parameters
    ----------
    log : path
        File for its output.
    prefill : sequence of (server, bootstrap port)
    decode : sequence of servers
        Decode servers of `prefill`.
    workers : sequence of servers
        Servers that do prefill and decode, instead of `prefill` and `decode`; a request goes to the server
        that has its prefix.
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
        command,
        port,
        log,
        past_proxies(),
        ready="/readiness",
        name="the router",
        wait_seconds=120,
    )
